"""What the CUDA device adds to the contract that host and CUDA share (tests/contract)."""

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import pytest

from streamer.device.base import CopyKind, CopyPhase
from streamer.device.checksum import checksum_reference
from streamer.device.cuda import CudaDevice
from streamer.errors import DeviceError, DeviceMemoryError, DeviceNotFoundError
from streamer.gguf.mapping import PAGE_NBYTES

pytestmark = pytest.mark.cuda
MIB = 1 << 20
OpenDevice = Callable[..., CudaDevice]


def random_bytes(nbytes: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def put(device: CudaDevice, data: bytes, offset: int = 0, nbytes: int | None = None):
    """A buffer of `nbytes` with `data` at `offset`, and the stream that filled it."""
    stream = device.create_stream("put")
    buffer = device.allocate(nbytes or offset + len(data), what="test")
    pinned = device.allocate_pinned(len(data))
    pinned.view[:] = data
    device.upload(buffer, offset, pinned.address, len(data), stream=stream, kind=CopyKind.WEIGHTS)
    stream.sync()
    pinned.close()
    return buffer, stream


def get(device: CudaDevice, buffer, offset: int, nbytes: int, stream) -> bytes:
    target = np.empty(nbytes, dtype=np.uint8)
    device.download(buffer, offset, target.ctypes.data, nbytes, stream=stream)
    stream.sync()
    return target.tobytes()


def test_capabilities_come_from_the_driver(device: CudaDevice) -> None:
    capabilities = device.capabilities
    assert capabilities.kind == "cuda"
    assert capabilities.name
    assert capabilities.compute_capability >= (8, 0)
    assert capabilities.multiprocessors > 0
    assert capabilities.copy_engines > 0
    assert capabilities.unified_addressing


def test_bytes_come_back_from_any_offset(device: CudaDevice) -> None:
    data = random_bytes(3 * MIB + 17)
    buffer, stream = put(device, data, offset=5)
    assert get(device, buffer, 5, len(data), stream) == data
    assert get(device, buffer, 6, 100, stream) == data[1:101]
    stream.close()
    buffer.close()


def test_allocations_are_aligned_for_any_load(device: CudaDevice) -> None:
    buffers = [device.allocate(n) for n in (1, 255, 257, 3 * MIB)]
    assert all(buffer.handle % 256 == 0 for buffer in buffers)
    for buffer in buffers:
        buffer.close()


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 15, 16, 17, 511, 512, 513, 4096, 65_536 + 3, 9 * MIB + 5])
def test_checksum_equals_the_reference_at_any_offset(device: CudaDevice, nbytes: int) -> None:
    data = random_bytes(nbytes + 64, seed=nbytes)
    buffer, stream = put(device, data)
    for offset in (0, 1, 2, 7, 8, 9, 15, 16, 18, 34):
        found = device.checksum(buffer, offset, nbytes, stream=stream).result()
        assert found == checksum_reference(data[offset : offset + nbytes]), offset
    stream.close()
    buffer.close()


def test_checksums_in_flight_on_two_streams_do_not_mix(device: CudaDevice) -> None:
    data = [random_bytes(MIB + i, seed=i) for i in range(8)]
    filled = [put(device, piece) for piece in data]
    pending = [
        device.checksum(buffer, 0, len(piece), stream=stream)
        for _ in range(3)
        for (buffer, stream), piece in zip(filled, data, strict=True)
    ]
    assert [p.result() for p in pending] == [checksum_reference(piece) for piece in data] * 3
    for buffer, stream in filled:
        stream.close()
        buffer.close()


def test_more_checksums_may_be_pending_than_a_page_of_slots(device: CudaDevice) -> None:
    data = random_bytes(1000)
    buffer, stream = put(device, data)
    pending = [device.checksum(buffer, i, 100, stream=stream) for i in range(10)] * 1
    pending += [device.checksum(buffer, 0, 1000, stream=stream) for _ in range(4100)]
    assert pending[3].result() == checksum_reference(data[3:103])
    assert {p.result() for p in pending[10:]} == {checksum_reference(data)}
    stream.close()
    buffer.close()


def test_a_flipped_bit_and_exchanged_words_change_the_checksum(device: CudaDevice) -> None:
    data = bytearray(random_bytes(100_000))
    buffer, stream = put(device, bytes(data))
    before = device.checksum(buffer, 0, len(data), stream=stream).result()
    value = data[77_777] ^ 4
    device.fill(buffer, 77_777, 1, value, stream=stream)
    assert device.checksum(buffer, 0, len(data), stream=stream).result() != before
    stream.close()
    buffer.close()


def test_fill_touches_only_its_range(device: CudaDevice) -> None:
    buffer, stream = put(device, bytes(1000))
    device.fill(buffer, 10, 20, 0xA5, stream=stream)
    assert get(device, buffer, 0, 1000, stream) == bytes(10) + b"\xa5" * 20 + bytes(970)
    stream.close()
    buffer.close()


def test_event_is_done_after_the_work_before_it(device: CudaDevice) -> None:
    stream = device.create_stream("copy")
    buffer = device.allocate(64 * MIB)
    pinned = device.allocate_pinned(64 * MIB)
    device.upload(buffer, 0, pinned.address, 64 * MIB, stream=stream, kind=CopyKind.WEIGHTS)
    event = stream.record()
    event.sync()
    assert event.is_done
    for resource in (stream, pinned, buffer):
        resource.close()


def test_stream_waits_for_another_streams_event(device: CudaDevice) -> None:
    first, second = device.create_stream("first"), device.create_stream("second")
    buffer = device.allocate(32 * MIB)
    pinned = device.allocate_pinned(32 * MIB)
    pinned.view[:] = b"\x11" * (32 * MIB)
    device.upload(buffer, 0, pinned.address, 32 * MIB, stream=first, kind=CopyKind.WEIGHTS)
    second.wait(first.record())
    target = device.allocate_pinned(32 * MIB)
    device.download(buffer, 0, target.address, 32 * MIB, stream=second)
    second.sync()
    assert target.view[-1] == 0x11
    for resource in (first, second, pinned, target, buffer):
        resource.close()


def test_events_are_recycled(device: CudaDevice) -> None:
    stream = device.create_stream("many")
    handles = set()
    for _ in range(50):
        event = stream.record()
        handles.add(int(event.handle))
        event.sync()
        del event
    assert len(handles) == 1
    stream.close()


def test_every_method_works_from_a_thread_that_never_saw_the_context(device: CudaDevice) -> None:
    found: list[bytes] = []

    def work() -> None:
        buffer, stream = put(device, b"thread")
        found.append(get(device, buffer, 0, 6, stream))
        stream.close()
        buffer.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [b"thread"]


def test_uploads_are_counted_by_phase_and_kind(device: CudaDevice) -> None:
    buffer, stream = put(device, bytes(1000))
    pinned = device.allocate_pinned(100)
    device.enter_serving()
    device.upload(buffer, 0, pinned.address, 100, stream=stream, kind=CopyKind.TABLES)
    stream.sync()
    counted = device.statistics().uploaded_bytes
    assert counted[CopyPhase.LOAD, CopyKind.WEIGHTS] == 1000
    assert counted[CopyPhase.SERVE, CopyKind.TABLES] == 100
    assert counted[CopyPhase.SERVE, CopyKind.WEIGHTS] == 0
    for resource in (stream, pinned, buffer):
        resource.close()


def test_registered_window_of_a_read_only_mapping_is_copied_from(device: CudaDevice, tmp_path) -> None:
    if not device.capabilities.read_only_host_register:
        pytest.skip("READ_ONLY_HOST_REGISTER_SUPPORTED is 0")
    import mmap

    data = random_bytes(4 * MIB)
    path = tmp_path / "file"
    path.write_bytes(data)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    window = device.register(address + PAGE_NBYTES, 2 * MIB)
    assert device.statistics().pinned_bytes == 2 * MIB
    stream, buffer = device.create_stream("dma"), device.allocate(2 * MIB)
    device.upload(buffer, 0, address + PAGE_NBYTES, 2 * MIB, stream=stream, kind=CopyKind.WEIGHTS)
    assert get(device, buffer, 0, 2 * MIB, stream) == data[PAGE_NBYTES : PAGE_NBYTES + 2 * MIB]
    for resource in (stream, window, buffer):
        resource.close()
    with pytest.raises(DeviceError, match="cuMemHostUnregister"):
        device.driver.call("cuMemHostUnregister", address + PAGE_NBYTES)
    mapping.close()


def test_too_large_allocation_says_asked_and_free(device: CudaDevice) -> None:
    total = device.memory_info().total
    with pytest.raises(DeviceMemoryError) as caught:
        device.allocate(2 * total, what="segment layer 3")
    assert caught.value.asked == 2 * total
    assert 0 < caught.value.free <= total
    assert "segment layer 3" in str(caught.value)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(caught.value)


def test_error_names_call_code_and_explanation(device: CudaDevice) -> None:
    stream = device.create_stream("bad")
    buffer = device.allocate(100)
    buffer.close()
    with pytest.raises(DeviceError, match=r"cuMemFree: CUDA_ERROR_\w+: .+"):
        device.driver.call("cuMemFree", buffer.raw)
    stream.close()


def test_close_frees_what_is_left_and_the_device_opens_again(open_device: OpenDevice) -> None:
    for _ in range(2):
        device = open_device()
        before = device.memory_info().free
        device.create_stream("left")
        device.allocate(64 * MIB)
        device.allocate_pinned(MIB)
        assert device.memory_info().free < before
        device.close()
        device.close()
        statistics = device.statistics()
        assert (statistics.allocated_bytes, statistics.pinned_bytes, statistics.live_streams) == (0, 0, 0)


def test_pool_keeps_its_reserve(open_device: OpenDevice) -> None:
    device = open_device(pool=True)
    first = device.allocate(MIB)
    first.close()
    second = device.allocate(MIB)
    stream = device.create_stream("pool")
    device.fill(second, 0, MIB, 7, stream=stream)
    assert get(device, second, MIB - 1, 1, stream) == b"\x07"
    device.close()


def test_unknown_ordinal_is_refused_with_the_count(open_device: OpenDevice) -> None:
    from streamer.device.cuda import open_cuda

    open_device().close()
    with pytest.raises(DeviceNotFoundError, match=r"cuda:99: no such device, the driver has \d"):
        open_cuda(99, checksum_code=lambda capability: b"")


def test_pinned_view_is_the_memory(device: CudaDevice) -> None:
    pinned = device.allocate_pinned(4096)
    pinned.view[7] = 9
    assert ctypes.c_ubyte.from_address(pinned.address + 7).value == 9
    assert pinned.address % PAGE_NBYTES == 0
    pinned.close()
