"""Touch and copy: for integrated GPUs and shared page tables, where the driver's own faults are ruinous.

Every chunk's pages are populated on a CPU thread first. Then it is copied either from a pinned slot or
straight from the touched mapping, whichever was faster on the first chunks. The mapping is read-only and
stays so. Where the GPU's memory is the host's, a chunk's pages are dropped from the cache once its copy has
completed, so that the model is never held twice.
"""

import threading

from streamer.device.base import Capabilities, Device
from streamer.errors import GgufdError
from streamer.transfer.base import Move, Run, TransferStatistics
from streamer.transfer.pinned_ring import upload_from
from streamer.transfer.slots import Slot, SlotPool, checksum_at, checksum_of_mapping
from streamer.transfer.source_policy import Way, choose_way, fill

PROBE_CHUNKS = 2  # of each path, after one to warm up; smaller than PROBE_NBYTES do not count
PROBE_NBYTES = 256 << 10
STOP_SLICE_S = 0.1  # a thread that waits looks at `stop` this often


class PathProbe:
    """Decides once between slot and mapping. Worker 0 times chunks copied alone; the others wait for it."""

    def __init__(self, *, allowed: bool) -> None:
        self._seconds: dict[bool, list[float]] = {False: [], True: []}  # seconds a byte, by path
        self._over = threading.Event()
        self.direct = False  # copy from the mapping; until the probe is over: from slots
        if not allowed:
            self._over.set()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def next_path(self) -> bool:
        """The path that still needs measuring."""
        return len(self._seconds[True]) < len(self._seconds[False])

    def measured(self, direct: bool, seconds: float, nbytes: int) -> None:
        """Record one copy; after the last one the path with the best time is chosen."""
        self._seconds[direct].append(seconds / nbytes)
        if all(len(x) > PROBE_CHUNKS for x in self._seconds.values()):
            self.direct = min(self._seconds[True][1:]) < min(self._seconds[False][1:])
            self.end()

    def end(self) -> None:
        """Decided, or there is nothing more to decide on."""
        self._over.set()

    def wait(self, stop: threading.Event) -> None:
        while not (self._over.wait(STOP_SLICE_S) or stop.is_set()):
            pass


class TouchCopy:
    """Memory: slots as in the ring; no second copy of the model."""

    name = "touch"

    def __init__(
        self, device: Device, *, workers: int, chunk_nbytes: int, slots_per_worker: int = 2, streams: int = 1
    ) -> None:
        self.n_workers, self.n_streams, self.chunk_nbytes = workers, min(streams, workers), chunk_nbytes
        self._pool = SlotPool(device, workers=workers, per_worker=slots_per_worker, chunk_nbytes=chunk_nbytes)
        self._shares_memory = device.capabilities.integrated
        self.probe = PathProbe(allowed=reads_pageable_memory(device.capabilities))

    def prepare(self) -> None:
        for worker in range(self.n_workers):
            self._pool.take(worker)

    def work(self, worker: int, run: Run) -> None:
        slots = self._pool.take(worker)
        try:
            if worker:
                self.probe.wait(run.stop)
            if slots:
                self._loop(slots, worker, run)
        finally:
            if not worker:
                self.probe.end()

    def _loop(self, slots: list[Slot], worker: int, run: Run) -> None:
        turn = 0
        while not run.stop.is_set():
            move = run.feed.get_nowait()
            if move is None:
                for i in range(len(slots)):
                    self._settle(slots[(turn + i) % len(slots)], run)
                move = run.feed.get()
                if move is None:
                    return
            slot = slots[turn % len(slots)]
            turn += 1
            try:
                self._move(slot, move, worker, run)
            except GgufdError as error:
                raise run.hooks.blame(move, error) from error

    def detach(self) -> None:
        return None

    def close(self) -> None:
        self._pool.close()

    def statistics(self) -> TransferStatistics:
        return TransferStatistics(self.name, self.n_workers, self._pool.count, self._pool.nbytes)

    def _settle(self, slot: Slot, run: Run) -> None:
        if run.stop.is_set():
            return
        move = slot.settle(run)
        if move is not None and self._shares_memory:
            run.sources[move.chunk.shard].drop(move.chunk.file_offset, move.chunk.nbytes)

    def _move(self, slot: Slot, move: Move, worker: int, run: Run) -> None:
        chunk = move.chunk
        source = run.sources[chunk.shard]
        way = choose_way(source, chunk, mapping_is_safe=run.mapping_is_safe)
        if way is Way.MAP:
            with run.tracer.span(f"touch {worker}", str(chunk.weight)):
                source.touch(chunk.file_offset, chunk.nbytes)
        self._settle(slot, run)
        if run.stop.is_set():
            return
        probing = way is Way.MAP and not self.probe.is_over and worker == 0
        probing = probing and chunk.nbytes >= PROBE_NBYTES
        direct = way is Way.MAP and (self.probe.next_path() if probing else self.probe.direct)
        started_s = run.tracer.clock()
        with run.tracer.span(f"stage {worker}", str(chunk.weight)):
            if direct:
                address = source.address + chunk.file_offset
            else:
                address = slot.address + fill(way, source, chunk, slot.address)
        take = checksum_of_mapping if direct else checksum_at
        checksum = take(address, chunk.nbytes) if run.checksum else None
        upload_from(slot, move, address, worker, run)
        run.hooks.submitted(move, worker % len(run.streams), way.origin, checksum)
        if probing:
            self._settle(slot, run)
            self.probe.measured(direct, run.tracer.clock() - started_s, chunk.nbytes)


def reads_pageable_memory(capabilities: Capabilities) -> bool:
    """Whether a copy from the touched mapping is worth trying: the device sees host pages without staging."""
    return (
        capabilities.kind == "host" or capabilities.integrated or capabilities.pageable_uses_host_page_tables
    )
