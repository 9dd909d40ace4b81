"""A device that fails on purpose: wraps any Device, counts its calls, fails the nth. Ships."""

import threading
from collections import Counter

from streamer.device.base import (
    Buffer,
    CopyKind,
    Device,
    DeviceStatistics,
    Event,
    Hurrying,
    MemoryInfo,
    PendingChecksum,
    PinnedBuffer,
    Registration,
    Stream,
)
from streamer.errors import DeviceError, DeviceMemoryError

ALLOCATING = frozenset({"allocate", "allocate_pinned", "register"})  # these fail with DeviceMemoryError
CALLS = ALLOCATING | {
    "create_stream",
    "upload",
    "download",
    "fill",
    "checksum",
    "checksum_result",
    "record",
    "wait",
    "event_sync",
    "stream_sync",
}


class FaultPlan:
    """Which call fails: the `nth` (from 1) of those in `calls`, once, and every later one too if `sticky`."""

    def __init__(self, nth: int | None, calls: frozenset[str], sticky: bool) -> None:
        unknown = calls - CALLS
        if unknown:
            raise ValueError(f"unknown device calls: {sorted(unknown)}")
        self.nth, self.calls, self.sticky = nth, calls, sticky
        self._lock = threading.Lock()
        self._seen = 0
        self.counts: Counter[str] = Counter()
        self.failed: str | None = None  # the call that was failed

    @property
    def seen(self) -> int:
        """Calls of the named set so far."""
        return self._seen

    def check(self, call: str, asked: int = 0, what: str = "") -> None:
        """Count one call; raise if its turn has come."""
        with self._lock:
            self.counts[call] += 1
            if call not in self.calls:
                return
            self._seen += 1
            due = self.nth is not None and (self._seen == self.nth or (self.sticky and self._seen > self.nth))
            if not due:
                return
            self.failed = call
        if call in ALLOCATING:
            raise DeviceMemoryError(call, "INJECTED", asked, 0, what)
        raise DeviceError(call, "INJECTED", f"call {self.nth} was to fail")


class FaultyEvent:
    def __init__(self, inner: Event, plan: FaultPlan) -> None:
        self.inner, self._plan = inner, plan

    @property
    def is_done(self) -> bool:
        return self.inner.is_done

    def sync(self) -> None:
        self._plan.check("event_sync")
        self.inner.sync()


class FaultyStream:
    def __init__(self, inner: Stream, plan: FaultPlan) -> None:
        self.inner, self._plan = inner, plan

    @property
    def handle(self) -> int:
        return self.inner.handle

    def record(self) -> FaultyEvent:
        self._plan.check("record")
        return FaultyEvent(self.inner.record(), self._plan)

    def wait(self, event: Event) -> None:
        self._plan.check("wait")
        self.inner.wait(event.inner if isinstance(event, FaultyEvent) else event)

    def sync(self) -> None:
        self._plan.check("stream_sync")
        self.inner.sync()

    def close(self) -> None:
        self.inner.close()


class FaultyChecksum:
    def __init__(self, inner: PendingChecksum, plan: FaultPlan) -> None:
        self._inner, self._plan = inner, plan

    def result(self) -> int:
        self._plan.check("checksum_result")
        return self._inner.result()


class FaultyDevice:
    """Fails the `nth` call of `calls` (default all; None: never). Closing never fails: drains rely on it."""

    def __init__(
        self, inner: Device, *, nth: int | None = None, calls: frozenset[str] = CALLS, sticky: bool = False
    ) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.plan = FaultPlan(nth, calls, sticky)

    def memory_info(self) -> MemoryInfo:
        return self.inner.memory_info()

    def create_stream(self, name: str) -> FaultyStream:
        self.plan.check("create_stream")
        return FaultyStream(self.inner.create_stream(name), self.plan)

    def allocate(self, nbytes: int, *, what: str = "") -> Buffer:
        self.plan.check("allocate", nbytes, what)
        return self.inner.allocate(nbytes, what=what)

    def allocate_pinned(self, nbytes: int) -> PinnedBuffer:
        self.plan.check("allocate_pinned", nbytes, "pinned memory")
        return self.inner.allocate_pinned(nbytes)

    def pin(self, address: int, nbytes: int) -> Registration:
        self.plan.check("allocate_pinned", nbytes, "pinned memory")
        return self.inner.pin(address, nbytes)

    def register(self, address: int, nbytes: int) -> Registration:
        self.plan.check("register", nbytes, "registered memory")
        return self.inner.register(address, nbytes)

    def upload(
        self, buffer: Buffer, offset: int, source: int, nbytes: int, *, stream: Stream, kind: CopyKind
    ) -> None:
        self.plan.check("upload")
        self.inner.upload(buffer, offset, source, nbytes, stream=_inner(stream), kind=kind)

    def download(self, buffer: Buffer, offset: int, target: int, nbytes: int, *, stream: Stream) -> None:
        self.plan.check("download")
        self.inner.download(buffer, offset, target, nbytes, stream=_inner(stream))

    def fill(self, buffer: Buffer, offset: int, nbytes: int, value: int, *, stream: Stream) -> None:
        self.plan.check("fill")
        self.inner.fill(buffer, offset, nbytes, value, stream=_inner(stream))

    def checksum(self, buffer: Buffer, offset: int, nbytes: int, *, stream: Stream) -> FaultyChecksum:
        self.plan.check("checksum")
        return FaultyChecksum(self.inner.checksum(buffer, offset, nbytes, stream=_inner(stream)), self.plan)

    def enter_serving(self) -> None:
        self.inner.enter_serving()

    def enter_loading(self) -> None:
        self.inner.enter_loading()

    def statistics(self) -> DeviceStatistics:
        return self.inner.statistics()

    def hurry(self) -> None:
        if isinstance(self.inner, Hurrying):
            self.inner.hurry()

    def close(self) -> None:
        self.inner.close()

    def __repr__(self) -> str:
        return f"FaultyDevice({self.inner!r}, seen={self.plan.seen}, failed={self.plan.failed})"


def _inner(stream: Stream) -> Stream:
    return stream.inner if isinstance(stream, FaultyStream) else stream
