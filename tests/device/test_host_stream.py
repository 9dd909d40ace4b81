"""The host's streams: order, failure, bounded queues, the simulated link."""

import threading

import pytest

from streamer.device.base import CopyKind
from streamer.device.host import HostDevice
from streamer.device.host_stream import QUEUE_DEPTH, Link
from streamer.errors import DeviceError


@pytest.fixture
def device():
    opened = HostDevice()
    yield opened
    opened.close()


def test_an_event_waits_for_the_work_before_it(device) -> None:
    stream, gate = device.create_stream("gate"), threading.Event()
    stream.submit(gate.wait)
    event = stream.record()
    assert not event.is_done
    gate.set()
    event.sync()
    assert event.is_done


def test_another_stream_holds_until_the_event(device) -> None:
    first, second, gate = device.create_stream("first"), device.create_stream("second"), threading.Event()
    seen: list[str] = []
    first.submit(gate.wait)
    first.submit(lambda: seen.append("first"))
    second.wait(first.record())
    second.submit(lambda: seen.append("second"))
    assert seen == []
    gate.set()
    second.sync()
    assert seen == ["first", "second"]


def test_failed_work_fails_the_stream_for_good_and_skips_what_follows(device) -> None:
    stream, seen = device.create_stream("bad"), []

    def fail() -> None:
        raise ValueError("no such plane")

    before = stream.record()
    stream.submit(fail)
    stream.submit(lambda: seen.append(1))
    after = stream.record()
    before.sync()
    with pytest.raises(DeviceError, match="stream bad: ValueError: no such plane"):
        after.sync()
    with pytest.raises(DeviceError):
        stream.sync()
    assert seen == []


def test_a_failure_travels_with_its_event(device) -> None:
    first, second = device.create_stream("first"), device.create_stream("second")
    first.submit(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    second.wait(first.record())
    with pytest.raises(DeviceError, match="ZeroDivisionError"):
        second.sync()


def test_a_closed_stream_refuses_work(device) -> None:
    stream = device.create_stream("closed")
    stream.close()
    with pytest.raises(DeviceError, match="closed"):
        stream.record()


def test_the_queue_is_bounded_and_submitting_waits(device) -> None:
    stream, gate = device.create_stream("full"), threading.Event()
    stream.submit(gate.wait)
    submitted: list[int] = []

    def submit() -> None:
        for i in range(QUEUE_DEPTH + 50):
            stream.submit(lambda: None)
            submitted.append(i)

    thread = threading.Thread(target=submit)
    thread.start()
    while len(submitted) < QUEUE_DEPTH - 1:
        thread.join(timeout=0.001)
    assert len(submitted) <= QUEUE_DEPTH + 1
    gate.set()
    thread.join()
    stream.sync()


def test_the_link_serves_one_copy_after_the_other_in_virtual_time() -> None:
    link = Link(bytes_per_s=100.0)
    assert link.reserve(50, ready_at=10.0) == 10.5
    assert link.reserve(100, ready_at=10.1) == 11.5  # behind the first
    assert link.reserve(10, ready_at=20.0) == 20.1  # the link had idled


def test_a_late_wake_up_is_caught_up() -> None:
    """Three copies submitted at once: their ends do not depend on when the thread got to run."""
    link = Link(bytes_per_s=10.0)
    assert [round(link.reserve(1, ready_at=0.0), 6) for _ in range(3)] == [0.1, 0.2, 0.3]


def test_copies_take_the_links_time_and_hurry_ends_the_delay() -> None:
    device = HostDevice(link_bytes_per_s=1.0)  # a copy of 1 MiB takes twelve days
    buffer, pinned = device.allocate(1 << 20), device.allocate_pinned(1 << 20)
    pinned.view[:] = b"\x07" * (1 << 20)
    stream = device.create_stream("slow")
    device.upload(buffer, 0, pinned.address, 1 << 20, stream=stream, kind=CopyKind.WEIGHTS)
    event = stream.record()
    assert not event.is_done
    device.hurry()
    event.sync()
    assert bytes(buffer.array) == b"\x07" * (1 << 20)
    device.close()


def test_the_source_of_a_slow_copy_is_read_to_its_end() -> None:
    """As with DMA: a source that changes before the event shows in device memory."""
    device = HostDevice(link_bytes_per_s=1.0)
    buffer, pinned = device.allocate(100), device.allocate_pinned(100)
    pinned.view[:] = b"\x01" * 100
    stream = device.create_stream("slow")
    device.upload(buffer, 0, pinned.address, 100, stream=stream, kind=CopyKind.WEIGHTS)
    pinned.view[99] = 2
    device.hurry()
    stream.sync()
    assert buffer.array[99] == 2
    device.close()


def test_memory_used_after_close_is_an_error_not_a_crash(device) -> None:
    buffer, stream = device.allocate(100), device.create_stream("late")
    buffer.close()
    with pytest.raises(DeviceError, match="after close"):
        device.fill(buffer, 0, 100, 1, stream=stream)


def test_work_in_flight_keeps_closed_memory_alive(device) -> None:
    buffer, stream, gate = device.allocate(1 << 22), device.create_stream("gate"), threading.Event()
    stream.submit(gate.wait)
    device.fill(buffer, 0, 1 << 22, 1, stream=stream)
    buffer.close()
    gate.set()
    stream.sync()


def test_fresh_memory_is_poisoned_on_request() -> None:
    device = HostDevice(poison=0xAB)
    assert bytes(device.allocate(1000).array) == b"\xab" * 1000
    device.close()
