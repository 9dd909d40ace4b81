"""The pinned ring: workers own slots, fill them and queue their copies. The default over a link.

A worker's turn: ask residency and touch (the copy out of the slot is still running), wait for the slot's
event, copy the chunk into the slot, checksum it if asked, queue the upload and its event. Everything that
takes time runs without the interpreter lock; what holds it is some 20 us a chunk.
"""

from streamer.device.base import CopyKind, Device
from streamer.errors import GgufdError
from streamer.transfer.base import Move, Run, TransferStatistics
from streamer.transfer.slots import Slot, SlotPool, checksum_at
from streamer.transfer.source_policy import Way, choose_way, fill


class PinnedRing:
    """Pins `workers` x `slots_per_worker` slots of `chunk_nbytes` and a page: all its host memory."""

    name = "ring"

    def __init__(
        self, device: Device, *, workers: int, chunk_nbytes: int, slots_per_worker: int = 2, streams: int = 1
    ) -> None:
        self.n_workers, self.n_streams, self.chunk_nbytes = workers, min(streams, workers), chunk_nbytes
        self._pool = SlotPool(device, workers=workers, per_worker=slots_per_worker, chunk_nbytes=chunk_nbytes)

    def prepare(self) -> None:
        for worker in range(self.n_workers):
            self._pool.take(worker)

    def work(self, worker: int, run: Run) -> None:
        slots = self._pool.take(worker)
        if not slots:
            return  # no pinned memory left for this worker: the others carry on
        turn = 0
        while not run.stop.is_set():
            move = run.feed.get_nowait()
            if move is None:
                settle_all(slots, turn, run)  # nothing to do now: report what is in flight before sleeping
                move = run.feed.get()
                if move is None:
                    return
            slot = slots[turn % len(slots)]
            turn += 1
            try:
                stage_and_upload(slot, move, worker, run)
            except GgufdError as error:
                raise run.hooks.blame(move, error) from error

    def detach(self) -> None:
        return None  # slots hold nothing of a source

    def close(self) -> None:
        self._pool.close()

    def statistics(self) -> TransferStatistics:
        return TransferStatistics(self.name, self.n_workers, self._pool.count, self._pool.nbytes)

    def __repr__(self) -> str:
        return f"PinnedRing({self.statistics()})"


def settle_all(slots: list[Slot], turn: int, run: Run) -> None:
    """Wait for and report every copy in flight, oldest first; `turn` counts the slots used so far."""
    for i in range(len(slots)):
        if run.stop.is_set():
            return
        slots[(turn + i) % len(slots)].settle(run)


def stage_and_upload(slot: Slot, move: Move, worker: int, run: Run) -> None:
    """One chunk through one slot. On return the slot belongs to the copy until its event."""
    chunk = move.chunk
    source = run.sources[chunk.shard]
    way = choose_way(source, chunk, mapping_is_safe=run.mapping_is_safe)
    if way is Way.MAP:
        with run.tracer.span(f"touch {worker}", str(chunk.weight)):
            source.touch(chunk.file_offset, chunk.nbytes)
    slot.settle(run)
    if run.stop.is_set():
        return
    with run.tracer.span(f"stage {worker}", str(chunk.weight)):
        address = slot.address + fill(way, source, chunk, slot.address)
        checksum = checksum_at(address, chunk.nbytes) if run.checksum else None
    upload_from(slot, move, address, worker, run)
    run.hooks.submitted(move, worker % len(run.streams), way.origin, checksum)


def upload_from(slot: Slot, move: Move, address: int, worker: int, run: Run) -> None:
    """Queue the copy of `move` from host `address` and hand the slot to its event."""
    stream = run.streams[worker % len(run.streams)]
    run.device.upload(
        move.buffer, move.offset, address, move.chunk.nbytes, stream=stream, kind=CopyKind.WEIGHTS
    )
    slot.event = stream.record()
    slot.move = move
