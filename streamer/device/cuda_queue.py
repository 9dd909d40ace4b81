"""Streams and events of a CUDA device. Events are recycled: making one costs more than recording one."""

from collections import deque
from collections.abc import Callable
from typing import Any

from streamer.device.base import Event, Stream
from streamer.device.cuda_driver import NOT_READY, Driver

_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_BLOCKING_SYNC = 1  # CU_EVENT_BLOCKING_SYNC: a waiting thread sleeps instead of burning a core
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no ordering with the default stream


class EventPool:
    """Free event handles of one context. `take` and `give_back` are atomic under the interpreter lock."""

    def __init__(self, driver: Driver, *, spin: bool) -> None:
        self.driver = driver
        self.flags = _DISABLE_TIMING | (0 if spin else _BLOCKING_SYNC)
        self.is_open = True
        self._free: deque[tuple[Any, int]] = deque()
        self._made: list[Any] = []

    def take(self) -> tuple[Any, int]:
        """The bindings' handle of an event, and the same as a number."""
        try:
            return self._free.pop()
        except IndexError:
            handle = self.driver.call("cuEventCreate", self.flags)
            self._made.append(handle)
            return handle, int(handle)

    def give_back(self, handle: Any, number: int) -> None:
        if self.is_open:
            self._free.append((handle, number))

    def close(self, attempt: Callable[..., None]) -> None:
        """Destroy every event ever made; `attempt` calls the driver and keeps the first error."""
        self.is_open = False
        self._free.clear()
        while self._made:
            attempt("cuEventDestroy", self._made.pop())


class CudaEvent:
    """A recorded point of a stream. The handle goes back to the pool when nobody holds the event any more."""

    __slots__ = ("_activate", "_done", "_pool", "handle", "number")

    def __init__(self, pool: EventPool, activate: Callable[[], None], handle: Any, number: int) -> None:
        self._pool, self._activate, self._done = pool, activate, False
        self.handle, self.number = handle, number

    @property
    def is_done(self) -> bool:
        if not self._done:
            self._activate()
            code = self._pool.driver.quick.cuEventQuery(self.number)
            if code == NOT_READY:
                return False
            if code != 0:
                raise self._pool.driver.error("cuEventQuery", code)
            self._done = True
        return True

    def sync(self) -> None:
        """Ask first, which costs a microsecond; only what is not done yet gives the interpreter lock away."""
        if not self.is_done:
            (code,) = self._pool.driver.api.cuEventSynchronize(self.handle)
            if code != 0:
                raise self._pool.driver.error("cuEventSynchronize", code)
            self._done = True

    def __del__(self) -> None:
        self._pool.give_back(self.handle, self.number)

    def __repr__(self) -> str:
        return f"<CudaEvent done={self._done}>"


class CudaStream:
    """An ordered queue of device work that does not order with any other stream."""

    def __init__(
        self,
        name: str,
        driver: Driver,
        pool: EventPool,
        activate: Callable[[], None],
        release: Callable[["CudaStream"], None],
    ) -> None:
        self.name = name
        self.raw = driver.call("cuStreamCreate", _NON_BLOCKING)  # the bindings' handle: cheapest to pass on
        self._driver, self._pool, self._activate, self._release = driver, pool, activate, release
        self.handle = int(self.raw)
        self.is_open = True

    def record(self) -> CudaEvent:
        self._activate()
        event = CudaEvent(self._pool, self._activate, *self._pool.take())
        code = self._driver.quick.cuEventRecord(event.number, self.handle)
        if code != 0:
            raise self._driver.error("cuEventRecord", code)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._activate()
        self._driver.call("cuStreamWaitEvent", self.raw, event.handle, 0)

    def sync(self) -> None:
        self._activate()
        self._driver.call("cuStreamSynchronize", self.raw)

    def close(self) -> None:
        if self.is_open:
            self._activate()
            self.is_open = False
            try:
                self._driver.call("cuStreamSynchronize", self.raw)
            finally:
                self._release(self)

    def __repr__(self) -> str:
        return f"<CudaStream {self.name} {'open' if self.is_open else 'closed'}>"


def raw_stream(stream: Stream) -> Any:
    """What the bindings take for `stream`: their own handle where it is ours, else the number."""
    return stream.raw if isinstance(stream, CudaStream) else stream.handle
