"""The stages between the workers: what is allocated ahead, what happens to a weight once all of it is queued.

allocate -> (workers: touch, stage, upload) -> settle: checksums on the device, rearrangement, layer events.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamer.device.base import Buffer, Device, Event, PendingChecksum, Stream
from streamer.errors import DeviceError, ResidencyError
from streamer.load.blame import name_weight
from streamer.load.channel import Channel
from streamer.load.landing import Finisher, Landing
from streamer.load.timings import UploadTimings
from streamer.load.weights import ResidentWeights
from streamer.plan.chunks import chunks_of
from streamer.plan.plan import Layout, Plan, PlannedWeight, Segment
from streamer.residency.ledger import Ledger
from streamer.trace import Tracer
from streamer.transfer.base import Batch, Move, Origin

BATCHES_AHEAD = 64  # waiting for a worker
WEIGHTS_AHEAD = 64  # weights waiting to be settled
SETTLING = 16  # weights whose checksums or rearrangement are in flight


class Allocator:
    """Allocates segments and feeds their moves; never more than one segment ahead of the workers."""

    def __init__(
        self,
        plan: Plan,
        device: Device,
        weights: ResidentWeights,
        ledger: Ledger,
        tracer: Tracer,
        landing: Landing | None,
        *,
        workers: int,
        batch: int,
    ) -> None:
        self._plan, self._device, self._weights = plan, device, weights
        self._ledger, self._tracer, self._landing = ledger, tracer, landing
        self._pace = Pace(plan.nbytes, plan.chunk_nbytes, workers, batch)
        self.batches: Channel[Batch] = Channel(BATCHES_AHEAD)

    def run(self) -> None:
        """Body of the allocating thread. Aborted when the load is stopped."""
        put = 0  # batches so far
        begun = 0  # taken batches at which the previous segment's upload has begun
        for segment in self._plan.segments:
            self.batches.wait_taken(begun)
            begun = put + 1
            buffer = self._allocate(segment)
            for index in segment.weights:
                put += self._feed(self._plan.weights[index], buffer)
        self.batches.close()

    def _allocate(self, segment: Segment) -> Buffer:
        names = [self._plan.weights[index].name for index in segment.weights]
        what = f"{segment.name} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"
        with self._tracer.span("allocate", segment.name, nbytes=segment.nbytes):
            buffer = self._device.allocate(segment.nbytes, what=what)
        self._weights.add(segment.index, buffer)
        self._ledger.allocated(segment.index)
        return buffer

    def _feed(self, weight: PlannedWeight, segment: Buffer) -> int:
        """Put the weight's batches; returns how many."""
        buffer, offset = segment, weight.destination_offset
        if weight.layout is not Layout.FILE:
            assert self._landing is not None, f"{weight.name} needs a finisher"
            buffer, offset = self._landing.buffer, self._landing.reserve(weight)
        moves = tuple(Move(chunk, buffer, offset + chunk.offset) for chunk in chunks_of(weight, self._plan))
        put = done = 0
        while done < len(moves):
            batch = moves[done : done + self._pace.next()]
            self._pace.advance(sum(move.chunk.nbytes for move in batch))
            self.batches.put(batch)
            put, done = put + 1, done + len(batch)
        return put


class Pace:
    """How many chunks go into the next batch: few at both ends of a load, so that no worker waits long.

    At the start the link has nothing to do until the first chunk is there; at the end everybody waits for the
    last worker.
    """

    def __init__(self, total: int, chunk_nbytes: int, workers: int, most: int) -> None:
        self._total, self._sent = total, 0
        self._round, self._most = 2 * workers * chunk_nbytes, most

    def next(self) -> int:
        near = min(self._sent, self._total - self._sent)
        return max(1, min(self._most, near // self._round))

    def advance(self, nbytes: int) -> None:
        self._sent += nbytes


@dataclass
class _Progress:
    """A weight on its way: what is queued and what is to be proved."""

    weight: PlannedWeight
    left: int  # file bytes not yet queued
    buffer: Buffer | None = None
    offset: int = 0  # of the weight's byte 0 in `buffer`
    checksums: list[tuple[int, int, int]] = field(default_factory=list)  # (offset, nbytes, checksum)


@dataclass(frozen=True)
class _Settling:
    weight: PlannedWeight
    event: Event
    proofs: tuple[tuple[int, int, PendingChecksum], ...]  # (offset, host's checksum, device's)


class Settler:
    """The account of the workers (their Hooks) and the thread that settles fully queued weights."""

    def __init__(
        self,
        plan: Plan,
        paths: Sequence[str],
        device: Device,
        weights: ResidentWeights,
        ledger: Ledger,
        tracer: Tracer,
        uploads: Sequence[Stream],
        stream: Stream,
        *,
        landing: Landing | None,
        finisher: Finisher | None,
        verify: bool,
    ) -> None:
        self._plan, self._paths, self._device, self._weights = plan, paths, device, weights
        self._ledger, self._tracer, self._uploads, self._stream = ledger, tracer, uploads, stream
        self._landing, self._finisher, self._verify = landing, finisher, verify
        self.lock = threading.Lock()
        self._progress = [_Progress(weight, weight.tensor.nbytes) for weight in plan.weights]
        self._unqueued = [len(segment.weights) for segment in plan.segments]
        self.queued: Channel[int] = Channel(WEIGHTS_AHEAD)
        self._traces = tracer.enabled
        self.timings = UploadTimings(tracer, len(uploads))

    # ---- Hooks: called by workers

    def read(self, nbytes: int, origin: Origin) -> None:
        if origin is Origin.PAGE_CACHE:
            self._ledger.read(page_cache=nbytes)
        else:
            self._ledger.read(storage=nbytes)

    def submitted(self, move: Move, stream: int, checksum: int | None) -> None:
        if self._traces:
            self.timings.submitted(move, stream)
        chunk = move.chunk
        progress = self._progress[chunk.weight]
        with self.lock:
            if checksum is not None:
                progress.checksums.append((chunk.offset, chunk.nbytes, checksum))
            progress.left -= chunk.nbytes
            is_queued = not progress.left
        if is_queued:
            progress.buffer, progress.offset = move.buffer, move.offset - chunk.offset
            self.queued.put(chunk.weight)

    def completed(self, move: Move) -> None:
        if self._traces:
            self.timings.completed(move)
        self._ledger.completed(move.chunk.weight, move.chunk.nbytes)

    def blame(self, move: Move, error: Exception) -> Exception:
        weight = self._plan.weights[move.chunk.weight]
        return name_weight(error, weight, self._paths[weight.tensor.shard], f" at byte {move.chunk.offset}")

    # ---- the settling thread

    def run(self) -> None:
        """Body of the settling thread: ends when `queued` is closed and everything is settled."""
        settling: deque[_Settling] = deque()
        while settling or not self.queued.is_ended:
            index = self.queued.get_nowait() if settling else self.queued.get()
            if index is not None:
                self._begin(index, settling)
            if settling and (index is None or len(settling) >= SETTLING):
                self._end(settling.popleft())

    def _begin(self, index: int, settling: deque[_Settling]) -> None:
        """Queue what follows a weight's copies. Its copies are all queued before this."""
        weight = self._plan.weights[index]
        self._unqueued[weight.segment] -= 1
        lands = weight.layout is not Layout.FILE
        is_last = not self._unqueued[weight.segment]
        if not (self._verify or lands or is_last):
            return
        try:
            self._join()
            proofs = self._prove(self._progress[index]) if self._verify else ()
            if lands:
                self._finish(self._progress[index])
            if self._verify or lands:
                event = self._stream.record()
                settling.append(_Settling(weight, event, proofs))
                if lands and self._landing is not None:
                    self._landing.finished(index, event)
            if is_last:
                self._ledger.segment_submitted(weight.segment, self._stream.record())
        except DeviceError as error:
            raise name_weight(error, weight, self._paths[weight.tensor.shard]) from error

    def _join(self) -> None:
        """Order the settling stream behind every copy queued so far."""
        for upload in self._uploads:
            self._stream.wait(upload.record())

    def _prove(self, progress: _Progress) -> tuple[tuple[int, int, PendingChecksum], ...]:
        """One checksum a chunk on the device, over the file bytes where they arrived."""
        assert progress.buffer is not None, progress.weight.name
        proofs = []
        for offset, nbytes, expected in sorted(progress.checksums):
            at = progress.offset + offset
            pending = self._device.checksum(progress.buffer, at, nbytes, stream=self._stream)
            proofs.append((offset, expected, pending))
        progress.checksums.clear()
        return tuple(proofs)

    def _finish(self, progress: _Progress) -> None:
        assert self._finisher is not None, f"{progress.weight.name} needs a finisher"
        assert progress.buffer is not None, progress.weight.name
        target = self._weights.place(progress.weight)
        self._finisher.finish(
            progress.weight,
            progress.buffer,
            progress.offset,
            target.buffer,
            target.offset,
            stream=self._stream,
        )

    def _end(self, settling: _Settling) -> None:
        """Wait for a weight's settling and report it."""
        weight = settling.weight
        try:
            with self._tracer.span("finish", weight.name, nbytes=weight.tensor.nbytes):
                settling.event.sync()
                results = [(at, expected, proof.result()) for at, expected, proof in settling.proofs]
        except DeviceError as error:
            raise name_weight(error, weight, self._paths[weight.tensor.shard]) from error
        for at, expected, found in results:
            if found != expected:
                path = self._paths[weight.tensor.shard]
                raise ResidencyError(
                    f"{path}: {weight.name}: device bytes from byte {at} on differ from the file's "
                    f"(checksum {found:#018x}, expected {expected:#018x})"
                )
        if weight.layout is not Layout.FILE:
            self._ledger.finished(weight.index)
        if self._verify:
            self._ledger.verified(weight.index)
