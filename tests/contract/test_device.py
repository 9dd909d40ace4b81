"""What every device must do: memory, order, events, the one counted door, checksums, errors."""

import ctypes
import mmap
import threading

import numpy as np
import pytest
from pipeline_support import device_bytes

from streamer.device.base import CopyKind, CopyPhase, Device
from streamer.device.checksum import checksum_reference
from streamer.errors import DeviceError, DeviceMemoryError

MIB = 1 << 20


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def put(device: Device, buffer, data: bytes, offset: int = 0) -> None:
    """Upload from a pinned buffer and wait."""
    stream = device.create_stream("put")
    pinned = device.allocate_pinned(len(data))
    pinned.view[:] = data
    device.upload(buffer, offset, pinned.address, len(data), stream=stream, kind=CopyKind.WEIGHTS)
    stream.sync()
    stream.close()
    pinned.close()


def test_uploaded_bytes_come_back(device: Device) -> None:
    data = random_bytes(3 * MIB + 17)
    buffer = device.allocate(len(data) + 1000, what="test")
    put(device, buffer, data, offset=333)
    assert device_bytes(device, buffer, 333, len(data)) == data


def test_memory_is_aligned_counted_and_given_back(device: Device) -> None:
    buffers = [device.allocate(size) for size in (1, 255, 4097, MIB)]
    assert all(buffer.handle % 256 == 0 for buffer in buffers)
    assert device.statistics().allocated_bytes >= sum(buffer.nbytes for buffer in buffers)
    for buffer in buffers:
        buffer.close()
        buffer.close()  # idempotent
    assert device.statistics().allocated_bytes == 0
    assert device.statistics().peak_allocated_bytes >= MIB


def test_pinned_memory_is_counted_apart(device: Device) -> None:
    pinned = device.allocate_pinned(2 * MIB)
    assert device.statistics().pinned_bytes >= 2 * MIB
    assert device.statistics().allocated_bytes == 0
    pinned.view[0], pinned.view[2 * MIB - 1] = 1, 2
    assert ctypes.string_at(pinned.address, 1) == b"\x01"
    pinned.close()
    pinned.close()
    assert device.statistics().pinned_bytes == 0


@pytest.mark.parametrize("call", ["register", "pin"])
def test_registered_memory_is_a_source_and_is_counted(device: Device, call: str) -> None:
    memory = mmap.mmap(-1, MIB)
    array = np.frombuffer(memory, dtype=np.uint8)
    memory[:] = random_bytes(MIB, 3)
    registration = getattr(device, call)(array.ctypes.data, MIB)
    assert device.statistics().pinned_bytes == MIB
    buffer, stream = device.allocate(MIB), device.create_stream("window")
    device.upload(buffer, 0, array.ctypes.data, MIB, stream=stream, kind=CopyKind.WEIGHTS)
    stream.sync()
    registration.close()
    registration.close()
    assert device.statistics().pinned_bytes == 0
    assert device_bytes(device, buffer, 0, MIB) == bytes(memory)
    stream.close()


def test_work_on_one_stream_keeps_its_order(device: Device) -> None:
    buffer, stream = device.allocate(4 * MIB), device.create_stream("order")
    for value in range(20):
        device.fill(buffer, 0, buffer.nbytes, value, stream=stream)
    stream.sync()
    assert device_bytes(device, buffer, 0, buffer.nbytes) == bytes([19]) * buffer.nbytes
    stream.close()


def test_a_stream_waits_for_anothers_event(device: Device) -> None:
    buffer = device.allocate(8 * MIB)
    first, second = device.create_stream("first"), device.create_stream("second")
    for round_ in range(10):
        device.fill(buffer, 0, buffer.nbytes, 2 * round_, stream=first)
        second.wait(first.record())
        device.fill(buffer, 0, buffer.nbytes, 2 * round_ + 1, stream=second)
        first.wait(second.record())
    first.sync()
    assert device_bytes(device, buffer, 0, buffer.nbytes) == bytes([19]) * buffer.nbytes
    first.close()
    second.close()


def test_an_event_is_done_after_sync_and_stays_done(device: Device) -> None:
    buffer, stream = device.allocate(MIB), device.create_stream("event")
    device.fill(buffer, 0, MIB, 1, stream=stream)
    event = stream.record()
    event.sync()
    assert event.is_done
    device.fill(buffer, 0, MIB, 2, stream=stream)
    assert event.is_done
    stream.sync()
    stream.close()


def test_closing_a_stream_finishes_its_work(device: Device) -> None:
    buffer, stream = device.allocate(MIB), device.create_stream("closing")
    for value in range(50):
        device.fill(buffer, 0, MIB, value, stream=stream)
    stream.close()
    stream.close()
    assert device.statistics().live_streams == 0
    assert device_bytes(device, buffer, MIB - 1, 1) == bytes([49])


def test_uploads_are_counted_by_phase_and_kind(device: Device) -> None:
    buffer, stream, pinned = (
        device.allocate(4096),
        device.create_stream("count"),
        device.allocate_pinned(4096),
    )
    device.upload(buffer, 0, pinned.address, 1000, stream=stream, kind=CopyKind.WEIGHTS)
    device.upload(buffer, 0, pinned.address, 24, stream=stream, kind=CopyKind.TABLES)
    device.enter_serving()
    device.upload(buffer, 0, pinned.address, 7, stream=stream, kind=CopyKind.ACTIVATIONS)
    stream.sync()
    counts = device.statistics().uploaded_bytes
    assert counts[CopyPhase.LOAD, CopyKind.WEIGHTS] == 1000
    assert counts[CopyPhase.LOAD, CopyKind.TABLES] == 24
    assert counts[CopyPhase.SERVE, CopyKind.ACTIVATIONS] == 7
    assert counts[CopyPhase.SERVE, CopyKind.WEIGHTS] == 0
    device.enter_loading()
    device.upload(buffer, 0, pinned.address, 3, stream=stream, kind=CopyKind.WEIGHTS)
    stream.sync()
    counts = device.statistics().uploaded_bytes
    assert {key: n for key, n in counts.items() if n} == {(CopyPhase.LOAD, CopyKind.WEIGHTS): 3}
    stream.close()


@pytest.mark.parametrize("nbytes", [1, 7, 8, 511, 512, 513, 4096, MIB + 3])
def test_checksum_is_the_reference_of_device_bytes(device: Device, nbytes: int) -> None:
    data = random_bytes(nbytes + 256, nbytes)
    buffer, stream = device.allocate(len(data)), device.create_stream("checksum")
    put(device, buffer, data)
    for offset in (0, 256):
        pending = device.checksum(buffer, offset, nbytes, stream=stream)
        assert pending.result() == checksum_reference(data[offset : offset + nbytes])
    stream.close()


def test_checksum_is_ordered_on_its_stream(device: Device) -> None:
    buffer, stream = device.allocate(MIB), device.create_stream("checksum")
    pending = []
    for value in range(8):
        device.fill(buffer, 0, MIB, value, stream=stream)
        pending.append(device.checksum(buffer, 0, MIB, stream=stream))
    found = [p.result() for p in pending]
    assert found == [checksum_reference(bytes([value]) * MIB) for value in range(8)]
    stream.close()


def test_a_range_outside_the_buffer_is_refused(device: Device) -> None:
    if device.capabilities.kind != "host":
        pytest.skip("a driver checks addresses, not our buffers")
    buffer, stream, pinned = device.allocate(100), device.create_stream("range"), device.allocate_pinned(200)
    with pytest.raises(DeviceError, match="100 bytes"):
        device.upload(buffer, 1, pinned.address, 100, stream=stream, kind=CopyKind.WEIGHTS)
    assert device.statistics().uploaded_bytes[CopyPhase.LOAD, CopyKind.WEIGHTS] == 0
    stream.close()


def test_memory_that_is_not_there_is_refused_with_both_numbers(device: Device) -> None:
    asked = 1 << 50
    with pytest.raises(DeviceMemoryError, match="layer 3") as caught:
        device.allocate(asked, what="layer 3")
    assert caught.value.asked == asked
    assert str(asked) in str(caught.value)
    assert caught.value.exit_code == 71
    assert device.statistics().allocated_bytes == 0


def test_calls_from_many_threads_are_all_counted(device: Device) -> None:
    buffer, pinned = device.allocate(MIB), device.allocate_pinned(MIB)
    errors: list[Exception] = []

    def work(index: int) -> None:
        try:
            stream = device.create_stream(f"thread {index}")
            for _ in range(50):
                device.upload(
                    buffer, index * 4096, pinned.address, 4096, stream=stream, kind=CopyKind.WEIGHTS
                )
            stream.close()
        except DeviceError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert device.statistics().uploaded_bytes[CopyPhase.LOAD, CopyKind.WEIGHTS] == 6 * 50 * 4096


def test_close_frees_everything_and_is_idempotent(device: Device) -> None:
    device.allocate(MIB)
    device.allocate_pinned(4096)
    device.create_stream("left open")
    device.close()
    device.close()
    statistics = device.statistics()
    assert (statistics.allocated_bytes, statistics.pinned_bytes, statistics.live_streams) == (0, 0, 0)
