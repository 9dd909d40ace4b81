"""Registered windows: DMA straight from the read-only mapping, no copy by the CPU. For few cores.

The file is cut by a fixed grid into page-aligned windows. One thread populates and registers a window and
queues the copies from it; when it has gone on to the next one, another thread waits for the last copy and
unregisters. Registration serialises with DMA in the driver: two such threads reach 19-20 GB/s, one thread 15,
more gain nothing (measured). A batch goes in one copy, or in one a window where it crosses a grid line: one
copy may not span two registrations. With `keep` a window stays registered, counted as pinned, and a reload is
pure DMA.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterator

from streamer.device.base import CopyKind, Device, Event, Registration
from streamer.errors import GgufdError
from streamer.transfer.base import MIB, PAGE_NBYTES, Batch, Origin, Run, Source, TransferStatistics
from streamer.transfer.slot_worker import span_nbytes
from streamer.transfer.slots import checksum_of_mapping
from streamer.transfer.source_policy import is_cached

WINDOW_NBYTES = 64 * MIB
MAX_WINDOWS = 4  # one being registered, two being copied from, one being given back
OPEN_WINDOWS = 2  # the current one and the one before: a batch may lie in both
BATCH = 8  # chunks in one copy: large ones come closer to the link's peak, smaller ones report earlier
IN_FLIGHT = 16  # batches queued and not done: the driver blocks whoever queues a thousand copies
LOOK_S = 0.05  # who waits for a window to be given back looks this often whether to stop

Key = tuple[int, int]  # (address of the mapping, window index)


class Window:
    """A registered range. `event`: after the last copy from it. `batch`: the last one, to be blamed."""

    __slots__ = ("batch", "event", "registration")

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.event: Event | None = None
        self.batch: Batch = ()


class RegisteredWindow:
    """Pinned bytes: at most `max_windows` windows, or the whole file with `keep`."""

    name = "window"
    n_workers = 2  # registers and queues; gives back
    n_streams = 1

    def __init__(
        self,
        device: Device,
        *,
        chunk_nbytes: int,
        window_nbytes: int = WINDOW_NBYTES,
        max_windows: int = MAX_WINDOWS,
        batch: int = BATCH,
        keep: bool = False,
    ) -> None:
        assert window_nbytes % PAGE_NBYTES == 0, window_nbytes
        assert max_windows > 1, "a batch may lie in two windows"
        self._device, self.chunk_nbytes, self.batch = device, chunk_nbytes, batch
        self._window_nbytes, self._max_windows, self._keep = window_nbytes, max_windows, keep
        self._open: dict[Key, Window] = {}  # oldest first
        self._returning: queue.SimpleQueue[Window | None] = queue.SimpleQueue()
        self._registered: set[Window] = set()
        self._given_back = threading.Condition()  # over _registered

    def prepare(self) -> None:
        return None

    def work(self, worker: int, run: Run) -> None:
        if worker:
            self._give_back(run)
            return
        try:
            self._upload_all(run)
        finally:
            self._returning.put(None)

    def detach(self) -> None:
        """Also after a load that was stopped: whatever was on its way to be given back."""
        self._open.clear()
        self._returning = queue.SimpleQueue()
        while self._registered:
            self._registered.pop().registration.close()

    def close(self) -> None:
        self.detach()

    def statistics(self) -> TransferStatistics:
        with self._given_back:
            pinned = sum(window.registration.nbytes for window in self._registered)
        return TransferStatistics(self.name, self.n_workers, 0, pinned)

    # ---- the thread that registers and queues

    def _upload_all(self, run: Run) -> None:
        in_flight: deque[tuple[Batch, Event]] = deque()
        while not run.stop.is_set():
            batch = run.feed.get_nowait()
            if batch is None:
                self._report(in_flight, run, most=0)
                batch = run.feed.get()
                if batch is None:
                    return
            with _blamed(run, batch):
                event = self._upload(batch, run)
            if event is None:
                return
            in_flight.append((batch, event))
            self._report(in_flight, run, most=IN_FLIGHT)

    def _upload(self, batch: Batch, run: Run) -> Event | None:
        """Queue a batch's copies, one a window; returns the event after the last. None when stopped."""
        first, nbytes, stream = batch[0], span_nbytes(batch), run.streams[0]
        begin, source = first.chunk.file_offset, run.sources[first.chunk.shard]
        cached = is_cached(source, begin, nbytes)
        run.hooks.read(nbytes, Origin.PAGE_CACHE if cached else Origin.STORAGE)
        done = 0
        event: Event | None = None
        while done < nbytes:
            offset = begin + done
            index = offset // self._window_nbytes
            part = min(nbytes - done, (index + 1) * self._window_nbytes - offset)
            window = self._window(source, index, run)
            if window is None:
                return None
            address = source.address + offset
            run.device.upload(
                first.buffer, first.offset + done, address, part, stream=stream, kind=CopyKind.WEIGHTS
            )
            event = window.event = stream.record()
            window.batch = batch
            done += part
        for move in batch:
            address = source.address + move.chunk.file_offset
            checksum = checksum_of_mapping(address, move.chunk.nbytes) if run.checksum else None
            run.hooks.submitted(move, 0, checksum)
        return event

    def _window(self, source: Source, index: int, run: Run) -> Window | None:
        """The window, registered. None when the run was stopped meanwhile."""
        key = (source.address, index)
        if key in self._open:
            return self._open[key]
        if not self._keep:
            while len(self._open) >= OPEN_WINDOWS:
                self._returning.put(self._open.pop(next(iter(self._open))))
            if not self._wait_for_room(run):
                return None
        start = index * self._window_nbytes
        nbytes = min(self._window_nbytes, source.nbytes - start)
        with run.tracer.span("touch 0", f"window {index}"):
            source.touch(start, nbytes)  # before registering: faults inside the driver are ten times slower
        with run.tracer.span("stage 0", f"register {index}"):
            address = source.address + start
            window = Window(self._device.register(address, -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES))
        with self._given_back:
            self._registered.add(window)
        self._open[key] = window
        return window

    def _wait_for_room(self, run: Run) -> bool:
        with self._given_back:
            while len(self._registered) >= self._max_windows:
                if run.stop.is_set():
                    return False
                self._given_back.wait(LOOK_S)
        return True

    def _report(self, in_flight: deque[tuple[Batch, Event]], run: Run, *, most: int) -> None:
        """Report completed copies, oldest first; wait until at most `most` batches are in flight."""
        while in_flight and not run.stop.is_set():
            batch, event = in_flight[0]
            with _blamed(run, batch):
                if len(in_flight) <= most and not event.is_done:
                    return
                event.sync()
            in_flight.popleft()
            for move in batch:
                run.hooks.completed(move)

    # ---- the thread that gives back

    def _give_back(self, run: Run) -> None:
        """Unregister each window after its last copy, until told that there are no more."""
        while (window := self._returning.get()) is not None and not run.stop.is_set():
            if window.event is not None:
                with _blamed(run, window.batch):
                    window.event.sync()
            with run.tracer.span("stage 1", "unregister"):
                window.registration.close()
            with self._given_back:
                self._registered.remove(window)
                self._given_back.notify()


@contextlib.contextmanager
def _blamed(run: Run, batch: Batch) -> Iterator[None]:
    """Errors inside name the weight of `batch`."""
    try:
        yield
    except GgufdError as error:
        raise run.hooks.blame(batch[0], error) from error
