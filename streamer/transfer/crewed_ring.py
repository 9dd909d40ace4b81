"""The pinned ring filled by processes: for machines with many cores, where a dozen threads meet at one lock.

One thread conducts: it cuts batches into pieces, hands them to a crew (crew.py), queues a batch's copy once
its last piece is there, and takes room back behind the copy's event, all in order. Ring memory is shared and
page-locked by the device. A crew that breaks is let go, and the conductor copies by itself.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from streamer.device.base import CopyKind, Device, Event
from streamer.errors import DeviceError, GgufdError
from streamer.trace import SpanRecord
from streamer.transfer import crew_child
from streamer.transfer.base import MIB, PAGE_NBYTES, Batch, Run, TransferStatistics
from streamer.transfer.crew import Crew, Done, Job
from streamer.transfer.ring_space import RingSpace
from streamer.transfer.shared_memory import SharedMemory
from streamer.transfer.slot_worker import span_nbytes
from streamer.transfer.slots import checksum_at
from streamer.transfer.source_policy import Way, choose_way, fill, read_no_further

log = logging.getLogger("ggufd.transfer")

BATCH = 4  # chunks in one copy
PIECE_NBYTES = 4 * MIB  # what one process copies at a time
MAX_REGIONS = 64  # batches in the ring: the driver blocks whoever queues a thousand copies
LOOK_S = 0.05  # a conductor that waits looks this often whether to stop, and whether its crew still lives

CHILD_WAYS = {
    Way.MAP: crew_child.MAP,
    Way.READ: crew_child.READ,
    Way.DIRECT: crew_child.DIRECT,
    Way.READ_DROP: crew_child.READ_DROP,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a batch's range of the file; `target`: where it goes, counted from the ring's begin."""

    offset: int
    nbytes: int
    target: int
    chunk: int = -1  # of the batch, where a piece is exactly one: then its checksum is the chunk's


@dataclass(slots=True)
class Region:
    """A batch in the ring, in the file's own alignment. `left`: pieces not yet there."""

    batch: Batch
    nbytes: int
    checksums: list[int | None]  # one a chunk, None unless wanted
    way: Way = Way.MAP
    start: int = 0  # of its first byte, counted from the ring's begin
    left: int = 0
    event: Event | None = None


def pieces_of(offset: int, nbytes: int, start: int, piece_nbytes: int) -> Iterator[Piece]:
    """Cut a range of the file where pages begin, so that no two pieces share one. Pure."""
    end = offset + nbytes
    while offset < end:
        until = min(end, (offset // PAGE_NBYTES * PAGE_NBYTES) + piece_nbytes)
        yield Piece(offset, until - offset, start)
        start += until - offset
        offset = until


def chunks_of(batch: Batch, start: int) -> Iterator[Piece]:
    """A batch's chunks as pieces, for checksums. Two may share a page: both then bring the same bytes."""
    begin = batch[0].chunk.file_offset
    for index, move in enumerate(batch):
        offset = move.chunk.file_offset
        yield Piece(offset, move.chunk.nbytes, start + offset - begin, index)


class CrewedRing:
    """Pins `ring_nbytes` and starts `processes` processes in `prepare`; they end with `detach`.

    `proves`: the processes take the checksums of a run that wants them, else the conductor does.
    """

    name = "ring"
    n_workers = 1
    n_streams = 1

    def __init__(
        self,
        device: Device,
        *,
        processes: int,
        chunk_nbytes: int,
        ring_nbytes: int,
        batch: int = BATCH,
        piece_nbytes: int = PIECE_NBYTES,
        proves: bool = False,
    ) -> None:
        assert piece_nbytes % PAGE_NBYTES == 0, piece_nbytes
        self._device, self.chunk_nbytes, self.batch = device, chunk_nbytes, batch
        self._ring_nbytes = max(ring_nbytes // PAGE_NBYTES * PAGE_NBYTES, self._least)
        self._piece_nbytes = piece_nbytes
        self._memory: SharedMemory | None = None
        self._crew = Crew(processes, proves=proves)
        self._processes = processes

    @property
    def _least(self) -> int:
        """Room for one chunk, wherever it begins in a page."""
        return (-(-self.chunk_nbytes // PAGE_NBYTES) + 1) * PAGE_NBYTES

    def prepare(self) -> None:
        self._ready()

    def work(self, worker: int, run: Run) -> None:
        memory = self._ready()
        conductor = Conductor(memory, self._crew, run, self._piece_nbytes, self._least)
        try:
            conductor.work()
        finally:
            if conductor.is_staging:
                self._crew.close()  # it may be writing to the ring still

    def detach(self) -> None:
        self._crew.close()  # its processes map the files

    def close(self) -> None:
        self._crew.close()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def statistics(self) -> TransferStatistics:
        pinned = self._memory.pinned_nbytes if self._memory is not None else 0
        return TransferStatistics(self.name, self._processes, pinned // self.chunk_nbytes, pinned)

    def __repr__(self) -> str:
        return f"CrewedRing({self.statistics()})"

    def _ready(self) -> SharedMemory:
        """The processes come up while memory is pinned."""
        memory = self._memory or SharedMemory(self._ring_nbytes)
        try:
            if not self._crew.is_open:
                self._crew.start(memory.descriptor, memory.nbytes)
            memory.pin(self._device, self._least)
        except BaseException:
            self._memory = None
            self._crew.close()
            memory.close()
            raise
        self._memory = memory
        return memory


class Conductor:
    """One load through the ring. Owned by the worker's thread."""

    def __init__(
        self, memory: SharedMemory, crew: Crew, run: Run, piece_nbytes: int, least_nbytes: int
    ) -> None:
        self._run, self._crew, self._address = run, crew, memory.address
        self._space = RingSpace(memory.pinned_nbytes)
        self._piece_nbytes = piece_nbytes
        self._most = max(self._space.nbytes // 4, least_nbytes) - PAGE_NBYTES  # bytes of a region
        self._file = crew.introduce(run.sources) if crew.is_open else 0  # index of the first source
        self._waiting: Batch = ()  # taken, and not yet cut
        self._next: Region | None = None  # cut, but there was no room yet
        self._staging: deque[Region] = deque()  # oldest first
        self._uploading: deque[Region] = deque()
        self._pieces: dict[int, tuple[Region, Piece]] = {}  # given to the crew, by token
        self._token = 0

    @property
    def is_staging(self) -> bool:
        """The crew may still be writing to the ring."""
        return bool(self._pieces)

    def work(self) -> None:
        """Until the feed ends and all copies are done, or the run is stopped."""
        while not self._run.stop.is_set():
            if self._collect() | self._upload() | self._settle() | self._stage():
                continue
            if self._pieces:
                if not (self._crew.wait(LOOK_S) or self._crew.is_whole):
                    self._take_over()
            elif self._uploading:
                self._done_with(self._uploading.popleft())
            else:
                batch = self._run.feed.get()
                if batch is None:
                    return
                self._waiting = batch

    # ---- steps: each does what can be done now, and says whether that was anything

    def _collect(self) -> bool:
        if not self._pieces:
            return False
        try:
            records = self._crew.collect()
        except OSError:
            self._take_over()
            return True
        for done in records:
            region, piece = self._pieces.pop(done.token)
            region.left -= 1
            if done.code:
                self._copy(region, piece)  # again, by itself: it knows how to tell what is wrong
                continue
            if piece.chunk >= 0:
                region.checksums[piece.chunk] = done.checksum
            if self._run.tracer.enabled:
                self._trace(done, region)
        return bool(records)

    def _upload(self) -> bool:
        """Queue the copies of regions whose pieces are all there."""
        uploaded = False
        while self._staging and not self._staging[0].left:
            region = self._staging.popleft()
            first, run = region.batch[0], self._run
            address = self._address + region.start
            if run.checksum:
                self._complete_checksums(region)
            with self._blamed(region):
                stream = run.streams[0]
                run.device.upload(
                    first.buffer, first.offset, address, region.nbytes, stream=stream, kind=CopyKind.WEIGHTS
                )
                region.event = stream.record()
            for move, checksum in zip(region.batch, region.checksums, strict=True):
                run.hooks.submitted(move, 0, checksum)
            self._uploading.append(region)
            uploaded = True
        return uploaded

    def _settle(self) -> bool:
        """Report copies that are done."""
        settled = False
        while self._uploading:
            region = self._uploading[0]
            assert region.event is not None, "uploading"
            with self._blamed(region):
                if not region.event.is_done:
                    break
            self._done_with(self._uploading.popleft())
            settled = True
        return settled

    def _stage(self) -> bool:
        """Give the next region's pieces to the crew, if there is one and room for it."""
        run, region = self._run, self._next or self._cut()
        if region is None:
            return False
        self._next = region
        first = region.batch[0].chunk
        offset, shift = first.file_offset, first.file_offset % PAGE_NBYTES
        pages = -(-(shift + region.nbytes) // PAGE_NBYTES) * PAGE_NBYTES
        begin = self._space.take(pages) if len(self._space) < MAX_REGIONS else None
        if begin is None:
            return False
        self._next, region.start = None, begin + shift
        source = run.sources[first.shard]
        with self._blamed(region):  # a process of the crew may die of the mapping: we do not
            region.way = choose_way(source, offset, region.nbytes, mapping_is_safe=True)
        if region.way is Way.READ_DROP:
            read_no_further(source)  # the processes share the descriptor
        run.hooks.read(region.nbytes, region.way.origin)
        self._staging.append(region)
        if run.checksum and self._crew.proves:
            pieces = chunks_of(region.batch, region.start)
        else:
            pieces = pieces_of(offset, region.nbytes, region.start, self._piece_nbytes)
        self._give(region, list(pieces))
        return True

    def _cut(self) -> Region | None:
        """As much of the next batch as a region may hold."""
        batch = self._waiting or self._run.feed.get_nowait()
        if batch is None:
            return None
        count = len(batch)
        while count > 1 and span_nbytes(batch[:count]) > self._most:
            count -= 1
        self._waiting = batch[count:]
        return Region(batch[:count], span_nbytes(batch[:count]), [None] * count)

    # ---- details

    def _complete_checksums(self, region: Region) -> None:
        """Those that no process of the crew has taken."""
        for index, piece in enumerate(chunks_of(region.batch, region.start)):
            if region.checksums[index] is None:
                region.checksums[index] = checksum_at(self._address + piece.target, piece.nbytes)

    def _give(self, region: Region, pieces: list[Piece]) -> None:
        if not self._crew.is_open:
            for piece in pieces:
                if not self._run.stop.is_set():
                    self._copy(region, piece)
            return
        region.left = len(pieces)
        file, way = self._file + region.batch[0].chunk.shard, CHILD_WAYS[region.way]
        jobs = []
        for piece in pieces:
            self._token = (self._token + 1) % (1 << 32)
            self._pieces[self._token] = region, piece
            jobs.append(Job(self._token, file, way, piece.offset, piece.nbytes, piece.target))
        try:
            self._crew.give(jobs)
        except OSError:
            self._take_over()

    def _take_over(self) -> None:
        """The crew is broken: end it, then do what it has not done."""
        log.warning("event=staging_processes_lost pieces=%d", len(self._pieces))
        if not self._crew.close():  # it may still write to the ring: what lies there cannot be trusted
            with self._blamed(self._staging[0]):
                raise DeviceError("staging process", "does not end", "storage does not answer")
        for region, piece in self._pieces.values():
            self._copy(region, piece)
            region.left -= 1
        self._pieces.clear()

    def _copy(self, region: Region, piece: Piece) -> None:
        """What the crew does, done here."""
        run, way, chunk = self._run, region.way, region.batch[0].chunk
        source, address = run.sources[chunk.shard], self._address + piece.target
        if way is Way.MAP and not run.mapping_is_safe:
            way = Way.READ
        if way is Way.DIRECT:
            address -= piece.offset % PAGE_NBYTES
        with self._blamed(region), run.tracer.span("stage 0", str(chunk.weight)):
            if way is Way.MAP:
                source.touch(piece.offset, piece.nbytes)
            fill(way, source, piece.offset, piece.nbytes, address)

    def _done_with(self, region: Region) -> None:
        """Wait for a region's copy, report it, take its room back."""
        assert region.event is not None, "uploading"
        with self._blamed(region):
            region.event.sync()
        self._space.give_back()
        for move in region.batch:
            self._run.hooks.completed(move)

    def _trace(self, done: Done, region: Region) -> None:
        name, add = str(region.batch[0].chunk.weight), self._run.tracer.add
        add(SpanRecord(f"touch {done.process}", name, done.begun_s, done.touched_s))
        add(SpanRecord(f"stage {done.process}", name, done.touched_s, done.ended_s))

    @contextlib.contextmanager
    def _blamed(self, region: Region) -> Iterator[None]:
        """Errors inside name the region's weight."""
        try:
            yield
        except GgufdError as error:
            raise self._run.hooks.blame(region.batch[0], error) from error
