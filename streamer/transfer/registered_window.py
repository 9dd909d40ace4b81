"""Registered windows: DMA straight from the read-only mapping, no copy by the CPU. For few cores.

The file is cut by a fixed grid into page-aligned windows. A window is populated, registered, copied from, and
unregistered after the events of its copies; a chunk across a grid line goes in two copies, since one copy may
not span two registrations. Registration serialises with DMA in the driver (19-23 GB/s measured), so a second
worker gains nothing. With `keep` a window stays registered, counted as pinned, and a reload is pure DMA.
"""

from collections import OrderedDict

from streamer.device.base import CopyKind, Device, Event, Registration
from streamer.errors import DeviceError, GgufdError
from streamer.transfer.base import MIB, PAGE_NBYTES, Move, Origin, Run, Source, TransferStatistics
from streamer.transfer.slots import checksum_of_mapping
from streamer.transfer.source_policy import is_cached

WINDOW_NBYTES = 64 * MIB
MAX_WINDOWS = 3  # one being registered, one being copied from, one being given back

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
        keep: bool = False,
    ) -> None:
        assert window_nbytes % PAGE_NBYTES == 0, window_nbytes
        self._device, self.chunk_nbytes = device, chunk_nbytes
        self._window_nbytes, self._max_windows, self._keep = window_nbytes, max_windows, keep
        self._windows: OrderedDict[Key, Window] = OrderedDict()  # least recently used first

    def prepare(self) -> None:
        return None

    def work(self, worker: int, run: Run) -> None:
        in_flight: list[tuple[Move, Event]] = []
        while not run.stop.is_set():
            move = run.feed.get_nowait()
            if move is None:
                self._report(in_flight, run, wait=True)
                move = run.feed.get()
                if move is None:
                    return
            try:
                in_flight.append((move, self._upload(move, run)))
            except GgufdError as error:
                raise run.hooks.blame(move, error) from error
            self._report(in_flight, run, wait=False)

    def detach(self) -> None:
        while self._windows:
            self._windows.popitem()[1].registration.close()

    def close(self) -> None:
        self.detach()

    def statistics(self) -> TransferStatistics:
        pinned = sum(window.registration.nbytes for window in self._windows.values())
        return TransferStatistics(self.name, 1, 0, pinned)

    def _upload(self, move: Move, run: Run) -> Event:
        """Queue a chunk's copies, one a window; returns the event after the last."""
        chunk, stream = move.chunk, run.streams[0]
        source = run.sources[chunk.shard]
        cached = is_cached(source, chunk)
        done = 0
        event: Event | None = None
        while done < chunk.nbytes:
            offset = chunk.file_offset + done
            index = offset // self._window_nbytes
            part = min(chunk.nbytes - done, (index + 1) * self._window_nbytes - offset)
            window = self._window(source, index, run)
            self._device.upload(
                move.buffer,
                move.offset + done,
                source.address + offset,
                part,
                stream=stream,
                kind=CopyKind.WEIGHTS,
            )
            event = window.event = stream.record()
            done += part
        assert event is not None, "chunks are not empty"
        checksum = (
            checksum_of_mapping(source.address + chunk.file_offset, chunk.nbytes) if run.checksum else None
        )
        run.hooks.submitted(move, 0, Origin.PAGE_CACHE if cached else Origin.STORAGE, checksum)
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

    def _report(self, in_flight: list[tuple[Move, Event]], run: Run, *, wait: bool) -> None:
        """Report completed copies, oldest first; `wait` for all of them."""
        done = 0
        for move, event in in_flight:
            if run.stop.is_set() or not (wait or event.is_done):
                break
            try:
                event.sync()
            except DeviceError as error:
                raise run.hooks.blame(move, error) from error
            run.hooks.completed(move)
            done += 1
        del in_flight[:done]
