"""The device that fails on purpose fails exactly as told."""

import pytest

from streamer.device.base import CopyKind
from streamer.device.faulty import FaultyDevice
from streamer.device.host import HostDevice
from streamer.errors import DeviceError, DeviceMemoryError


@pytest.fixture
def inner():
    device = HostDevice()
    yield device
    device.close()


def test_the_nth_call_of_any_kind_fails_once(inner) -> None:
    device = FaultyDevice(inner, nth=3)
    stream = device.create_stream("a")
    stream.record()
    with pytest.raises(DeviceError, match="stream_sync: INJECTED"):
        stream.sync()
    stream.sync()
    assert device.plan.failed == "stream_sync"


def test_only_named_calls_count(inner) -> None:
    device = FaultyDevice(inner, nth=2, calls=frozenset({"allocate"}))
    device.create_stream("a").record().sync()
    device.allocate(10)
    with pytest.raises(DeviceMemoryError, match="layer 7") as caught:
        device.allocate(20, what="layer 7")
    assert caught.value.asked == 20
    assert device.plan.counts["allocate"] == 2
    assert device.plan.counts["create_stream"] == 1
    device.allocate(30)


def test_sticky_faults_stay(inner) -> None:
    device = FaultyDevice(inner, nth=1, calls=frozenset({"record"}), sticky=True)
    stream = device.create_stream("a")
    for _ in range(3):
        with pytest.raises(DeviceError):
            stream.record()
    stream.close()


def test_events_of_one_stream_are_waited_for_by_another(inner) -> None:
    device = FaultyDevice(inner)
    first, second = device.create_stream("a"), device.create_stream("b")
    buffer, pinned = device.allocate(8), device.allocate_pinned(8)
    device.upload(buffer, 0, pinned.address, 8, stream=first, kind=CopyKind.WEIGHTS)
    second.wait(first.record())
    assert device.checksum(buffer, 0, 8, stream=second).result()
    assert {"upload", "wait", "record", "checksum", "checksum_result"} <= set(device.plan.counts)


def test_unknown_calls_are_refused(inner) -> None:
    with pytest.raises(ValueError, match="uplaod"):
        FaultyDevice(inner, calls=frozenset({"uplaod"}))


def test_entering_serving_twice_is_our_own_fault(inner) -> None:
    inner.enter_serving()
    with pytest.raises(AssertionError):
        inner.enter_serving()
