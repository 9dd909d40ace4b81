"""Streams of the host device: a thread and a bounded queue each; events; a simulated link."""

import threading
from collections import deque
from collections.abc import Callable

from streamer.device.base import Event
from streamer.errors import DeviceError

QUEUE_DEPTH = 1024  # queued items a stream; submitting beyond it blocks, as a driver's queue does

Work = Callable[[], None]
Copy = Callable[[int, int], None]  # move the bytes [begin, end) of a copy


class HostEvent:
    """Done once everything queued before it on its stream has run. Carries the stream's failure, if any."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: DeviceError | None = None

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def sync(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error

    def finish(self, error: DeviceError | None) -> None:
        """Called once, by the stream's thread."""
        self._error = error
        self._done.set()

    def __repr__(self) -> str:
        return f"HostEvent({'failed' if self._error else 'done' if self.is_done else 'pending'})"


class Link:
    """Simulated copy engine shared by all streams: each copy costs nbytes / bytes_per_s, one after the other.

    Virtual time: a copy starts at the later of "ready" and "previous copy's end", so that a late wake-up of a
    thread is caught up instead of adding to the total.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._busy_until = 0.0

    def reserve(self, nbytes: int, ready_at: float) -> float:
        """The time at which a copy that could start at `ready_at` ends."""
        with self._lock:
            self._busy_until = max(self._busy_until, ready_at) + nbytes / self.bytes_per_s
            return self._busy_until


class HostStream:
    """A queue of work with one thread. After a failure later work is skipped; events carry the failure."""

    def __init__(
        self,
        name: str,
        *,
        link: Link | None,
        on_close: Callable[["HostStream"], None],
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self._link, self._on_close, self._clock = link, on_close, clock
        self._queue: deque[tuple[Work | None, HostEvent | None]] = deque()
        self._changed = threading.Condition()
        self._closing = self._closed = False
        self._hurry = threading.Event()
        self._error: DeviceError | None = None
        self._stalled_until = (
            0.0  # end of the last wait for another stream: copies cannot have started before
        )
        self._thread = threading.Thread(target=self._run, name=f"stream {name}", daemon=True)
        self._thread.start()

    @property
    def handle(self) -> int:
        return id(self)

    def submit(self, work: Work | None, event: HostEvent | None = None) -> None:
        """Queue `work`, then `event`. Blocks while the queue is full. DeviceError once closed."""
        with self._changed:
            while len(self._queue) >= QUEUE_DEPTH and not self._closing:
                self._changed.wait()
            if self._closing:
                raise DeviceError("stream submit", "INVALID_HANDLE", f"stream {self.name} is closed")
            self._queue.append((work, event))
            self._changed.notify_all()

    def copy(self, copy: Copy, nbytes: int) -> None:
        """Queue a copy over the link: it ends no earlier than the simulated rate allows."""
        if self._link is None:
            self.submit(lambda: copy(0, nbytes))
            return
        submitted_at = self._clock()
        self.submit(lambda: self._paced(copy, nbytes, submitted_at))

    def record(self) -> HostEvent:
        event = HostEvent()
        self.submit(None, event)
        return event

    def wait(self, event: Event) -> None:
        self.submit(lambda: self._stall(event))

    def sync(self) -> None:
        self.record().sync()

    def hurry(self) -> None:
        """From now on no simulated delay on this stream; for the drain of a cancelled load."""
        self._hurry.set()

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._on_close(self)

    def _paced(self, copy: Copy, nbytes: int, submitted_at: float) -> None:
        """Half the bytes move at the start, half at the end: as with DMA, the source must not change."""
        assert self._link is not None
        ends_at = self._link.reserve(nbytes, max(submitted_at, self._stalled_until))
        half = nbytes // 2
        copy(0, half)
        remaining = ends_at - self._clock()
        if remaining > 0:
            self._hurry.wait(remaining)
        copy(half, nbytes)

    def _stall(self, event: Event) -> None:
        event.sync()
        self._stalled_until = self._clock()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                work, event = self._queue.popleft()
                self._changed.notify_all()
            if work is not None and self._error is None:
                self._perform(work)
            del work  # the closure holds buffers: free them before sleeping again
            if event is not None:
                event.finish(self._error)
            del event

    def _perform(self, work: Work) -> None:
        try:
            work()
        except DeviceError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001  the border: whatever the work raised fails the stream, as on a device
            self._error = DeviceError(f"stream {self.name}", type(error).__name__, str(error))

    def __repr__(self) -> str:
        return f"HostStream({self.name!r}, queued={len(self._queue)}, {'closed' if self._closed else 'open'})"
