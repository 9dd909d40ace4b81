"""Touch and copy: for integrated GPUs and shared page tables, where the driver's own faults are ruinous.

Every chunk's pages are populated on a CPU thread first. Then it is copied either from a pinned slot or
straight from the touched mapping, whichever was faster on the first chunks. The mapping is read-only and
stays so. Where the GPU's memory is the host's, a chunk's pages are dropped from the cache once its copy has
completed, so that the model is never held twice.
"""

import threading
from collections.abc import Sequence

from streamer.device.base import Capabilities, Device
from streamer.transfer.base import Move, Run, TransferStatistics
from streamer.transfer.slot_worker import SlotWorker
from streamer.transfer.slots import Slot, SlotPool, checksum_of_mapping
from streamer.transfer.source_policy import Way

BATCH = 4  # chunks a worker takes at a time
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


class TouchWorker(SlotWorker):
    """Takes the path that the probe says; drops a chunk's pages behind its copy where memory is shared."""

    def __init__(
        self, slots: Sequence[Slot], worker: int, run: Run, probe: PathProbe, *, drops_pages: bool
    ) -> None:
        super().__init__(slots, worker, run)
        self._probe, self._measures, self._drops_pages = probe, worker == 0, drops_pages

    def _settle(self, slot: Slot) -> Move | None:
        move = super()._settle(slot)
        if move is not None and self._drops_pages:
            self._run.sources[move.chunk.shard].drop(move.chunk.file_offset, move.chunk.nbytes)
        return move

    def _carry(self, move: Move, slot: Slot, way: Way) -> None:
        probe, nbytes = self._probe, move.chunk.nbytes
        is_mapped = way is Way.MAP
        if not (self._measures and is_mapped and nbytes >= PROBE_NBYTES) or probe.is_over:
            self._carry_by(move, slot, way, direct=is_mapped and probe.direct)
            return
        direct, started_s = probe.next_path(), self._run.tracer.clock()
        self._carry_by(move, slot, way, direct=direct)
        self._settle(slot)
        probe.measured(direct, self._run.tracer.clock() - started_s, nbytes)

    def _carry_by(self, move: Move, slot: Slot, way: Way, *, direct: bool) -> None:
        if not direct:
            super()._carry(move, slot, way)
            return
        chunk = move.chunk
        address = self._run.sources[chunk.shard].address + chunk.file_offset
        with self._run.tracer.span(self._staging, str(chunk.weight)):
            checksum = checksum_of_mapping(address, chunk.nbytes) if self._run.checksum else None
        self._upload(move, slot, address, checksum)


class TouchCopy:
    """Memory: slots as in the ring; no second copy of the model."""

    name = "touch"

    def __init__(
        self,
        device: Device,
        *,
        workers: int,
        chunk_nbytes: int,
        slots_per_worker: int = 2,
        streams: int = 1,
        batch: int = BATCH,
    ) -> None:
        self.n_workers, self.n_streams, self.chunk_nbytes = workers, min(streams, workers), chunk_nbytes
        self.batch = batch
        self._pool = SlotPool(device, workers=workers, per_worker=slots_per_worker, chunk_nbytes=chunk_nbytes)
        self._shares_memory = device.capabilities.integrated
        self.probe = PathProbe(allowed=reads_pageable_memory(device.capabilities))

    def prepare(self) -> None:
        self._pool.take_all()

    def work(self, worker: int, run: Run) -> None:
        slots = self._pool.take(worker)
        try:
            if worker:
                self.probe.wait(run.stop)
            if slots:
                TouchWorker(slots, worker, run, self.probe, drops_pages=self._shares_memory).work()
        finally:
            if not worker:
                self.probe.end()

    def detach(self) -> None:
        return None

    def close(self) -> None:
        self._pool.close()

    def statistics(self) -> TransferStatistics:
        return TransferStatistics(self.name, self.n_workers, self._pool.count, self._pool.nbytes)


def reads_pageable_memory(capabilities: Capabilities) -> bool:
    """Whether a copy from the touched mapping is worth trying: the device sees host pages without staging."""
    return (
        capabilities.kind == "host" or capabilities.integrated or capabilities.pageable_uses_host_page_tables
    )
