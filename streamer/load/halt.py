"""How a load is stopped: once, by whoever fails or cancels first; everybody who waits is woken."""

import threading
from collections.abc import Callable


class Halt:
    """`stop` is what workers look at. `wakers` are called once each, in the thread that requests."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []
        self._cause: BaseException | None = None

    @property
    def is_requested(self) -> bool:
        return self.stop.is_set()

    @property
    def cause(self) -> BaseException | None:
        """The first failure; None for a plain cancellation."""
        return self._cause

    def on_request(self, waker: Callable[[], None]) -> None:
        with self._lock:
            self._wakers.append(waker)
            requested = self.stop.is_set()
        if requested:
            waker()

    def request(self, cause: BaseException | None = None) -> None:
        """Stop everything. Only the first request's cause counts: later ones are consequences."""
        with self._lock:
            if self.stop.is_set():
                return
            self._cause = cause
            self.stop.set()
            wakers = list(self._wakers)
        for waker in wakers:
            waker()
