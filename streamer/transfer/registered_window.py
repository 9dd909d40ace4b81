"""Registered windows: DMA straight from the read-only mapping, no copy by the CPU. For few cores.

The file is cut by a fixed grid into page-aligned windows. A window is populated, registered, copied from, and
unregistered after the events of its copies. A batch goes in one copy, or in one a window where it crosses a
grid line: one copy may not span two registrations. Registration serialises with DMA in the driver (19-23 GB/s
measured), so a second worker gains nothing. With `keep` a window stays registered, counted as pinned, and a
reload is pure DMA.
"""

from collections import OrderedDict, deque

from streamer.device.base import CopyKind, Device, Event, Registration
from streamer.errors import GgufdError
from streamer.transfer.base import MIB, PAGE_NBYTES, Batch, Origin, Run, Source, TransferStatistics
from streamer.transfer.slot_worker import span_nbytes
from streamer.transfer.slots import checksum_of_mapping
from streamer.transfer.source_policy import is_cached

WINDOW_NBYTES = 64 * MIB
MAX_WINDOWS = 3  # one being registered, one being copied from, one being given back
BATCH = 8  # chunks in one copy: large ones come closer to the link's peak, smaller ones report earlier
IN_FLIGHT = 16  # batches queued and not done: the driver blocks whoever queues a thousand copies

Key = tuple[int, int]  # (address of the mapping, window index)


class Window:
    """A registered range. `event`: after the last copy from it."""

    __slots__ = ("event", "registration")

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.event: Event | None = None


class RegisteredWindow:
    """Pinned bytes: at most `max_windows` windows, or the whole file with `keep`."""

    name = "window"
    n_workers = 1
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
        self._device, self.chunk_nbytes, self.batch = device, chunk_nbytes, batch
        self._window_nbytes, self._max_windows, self._keep = window_nbytes, max_windows, keep
        self._windows: OrderedDict[Key, Window] = OrderedDict()  # least recently used first

    def prepare(self) -> None:
        return None

    def work(self, worker: int, run: Run) -> None:
        in_flight: deque[tuple[Batch, Event]] = deque()
        while not run.stop.is_set():
            batch = run.feed.get_nowait()
            if batch is None:
                self._report(in_flight, run, most=0)
                batch = run.feed.get()
                if batch is None:
                    return
            try:
                in_flight.append((batch, self._upload(batch, run)))
            except GgufdError as error:
                raise run.hooks.blame(batch[0], error) from error
            self._report(in_flight, run, most=IN_FLIGHT)

    def detach(self) -> None:
        while self._windows:
            self._windows.popitem()[1].registration.close()

    def close(self) -> None:
        self.detach()

    def statistics(self) -> TransferStatistics:
        pinned = sum(window.registration.nbytes for window in self._windows.values())
        return TransferStatistics(self.name, 1, 0, pinned)

    def _upload(self, batch: Batch, run: Run) -> Event:
        """Queue a batch's copies, one a window; returns the event after the last."""
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
            address = source.address + offset
            run.device.upload(
                first.buffer, first.offset + done, address, part, stream=stream, kind=CopyKind.WEIGHTS
            )
            event = window.event = stream.record()
            done += part
        assert event is not None, "chunks are not empty"
        for move in batch:
            address = source.address + move.chunk.file_offset
            checksum = checksum_of_mapping(address, move.chunk.nbytes) if run.checksum else None
            run.hooks.submitted(move, 0, checksum)
        return event

    def _window(self, source: Source, index: int, run: Run) -> Window:
        key = (source.address, index)
        window = self._windows.get(key)
        if window is not None:
            self._windows.move_to_end(key)
            return window
        while not self._keep and len(self._windows) >= self._max_windows:
            self._give_back()
        start = index * self._window_nbytes
        nbytes = min(self._window_nbytes, source.nbytes - start)
        with run.tracer.span("touch 0", f"window {index}"):
            source.touch(start, nbytes)  # before registering: faults inside the driver are ten times slower
        with run.tracer.span("stage 0", f"register {index}"):
            address = source.address + start
            window = Window(self._device.register(address, -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES))
        self._windows[key] = window
        return window

    def _give_back(self) -> None:
        """Unregister the least recently used window, after its last copy."""
        window = next(iter(self._windows.values()))
        if window.event is not None:
            window.event.sync()
        self._windows.popitem(last=False)
        window.registration.close()

    def _report(self, in_flight: deque[tuple[Batch, Event]], run: Run, *, most: int) -> None:
        """Report completed copies, oldest first; wait until at most `most` batches are in flight."""
        while in_flight and not run.stop.is_set():
            batch, event = in_flight[0]
            try:
                if len(in_flight) > most:
                    event.sync()
                elif not event.is_done:
                    return
            except GgufdError as error:
                raise run.hooks.blame(batch[0], error) from error
            in_flight.popleft()
            for move in batch:
                run.hooks.completed(move)
