"""A worker's turns over its slots: what the ring and touch-and-copy do alike.

A batch: ask residency once, touch all of it in one call. A chunk's turn: wait for the slot's event, copy the
chunk into the slot, checksum it if asked, queue the upload and its event. Of all calls only the touch, the
copy by the CPU and the wait for an event that is not done yet give the interpreter lock away: taking it back
costs tens of microseconds where a dozen threads want it.
"""

from collections.abc import Sequence

from streamer.device.base import CopyKind
from streamer.errors import GgufdError
from streamer.transfer.base import Batch, Move, Run
from streamer.transfer.slots import Slot, checksum_at
from streamer.transfer.source_policy import Way, choose_way, fill


class SlotWorker:
    """Owned by one thread. On return from a turn the slot belongs to its copy until the event."""

    def __init__(self, slots: Sequence[Slot], worker: int, run: Run) -> None:
        self._slots, self._run = slots, run
        self._turn = 0  # slots used so far
        self._lane = worker % len(run.streams)
        self._stream = run.streams[self._lane]
        self._touching, self._staging = f"touch {worker}", f"stage {worker}"  # lanes of the trace

    def work(self) -> None:
        """Until the feed ends and all copies are done, or the run is stopped."""
        run = self._run
        while not run.stop.is_set():
            batch = run.feed.get_nowait()
            if batch is None:
                self._settle_all()  # nothing to do now: report what is in flight before sleeping
                batch = run.feed.get()
                if batch is None:
                    return
            way = self._open(batch)
            for move in batch:
                slot = self._slots[self._turn % len(self._slots)]
                self._turn += 1
                self._settle(slot)
                if run.stop.is_set():
                    return
                try:
                    self._carry(move, slot, way)
                except GgufdError as error:
                    raise run.hooks.blame(move, error) from error

    def _open(self, batch: Batch) -> Way:
        """How the batch's bytes leave the file; its pages are mapped if they leave by the mapping."""
        run, chunk = self._run, batch[0].chunk
        source, nbytes = run.sources[chunk.shard], span_nbytes(batch)
        try:
            way = choose_way(source, chunk.file_offset, nbytes, mapping_is_safe=run.mapping_is_safe)
            run.hooks.read(nbytes, way.origin)
            if way is Way.MAP:
                with run.tracer.span(self._touching, str(chunk.weight)):
                    source.touch(chunk.file_offset, nbytes)
        except GgufdError as error:
            raise run.hooks.blame(batch[0], error) from error
        return way

    def _carry(self, move: Move, slot: Slot, way: Way) -> None:
        """One chunk through one slot that is free."""
        with self._run.tracer.span(self._staging, str(move.chunk.weight)):
            source, chunk = self._run.sources[move.chunk.shard], move.chunk
            address = slot.address + fill(way, source, chunk.file_offset, chunk.nbytes, slot.address)
            checksum = checksum_at(address, move.chunk.nbytes) if self._run.checksum else None
        self._upload(move, slot, address, checksum)

    def _upload(self, move: Move, slot: Slot, address: int, checksum: int | None) -> None:
        """Queue the copy of `move` from host `address` and hand the slot to its event."""
        stream = self._stream
        self._run.device.upload(
            move.buffer, move.offset, address, move.chunk.nbytes, stream=stream, kind=CopyKind.WEIGHTS
        )
        slot.event, slot.move = stream.record(), move
        self._run.hooks.submitted(move, self._lane, checksum)

    def _settle(self, slot: Slot) -> Move | None:
        """Wait for the copy out of a slot and report it; its move, if there was one."""
        return slot.settle(self._run)

    def _settle_all(self) -> None:
        """Every copy in flight, oldest first."""
        for i in range(len(self._slots)):
            if self._run.stop.is_set():
                return
            self._settle(self._slots[(self._turn + i) % len(self._slots)])


def span_nbytes(batch: Batch) -> int:
    """Bytes of a batch: its chunks follow each other."""
    first, last = batch[0].chunk, batch[-1].chunk
    return last.file_offset + last.nbytes - first.file_offset
