"""What every strategy is given and must do: values and protocols. A strategy is the body of given threads."""

import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from streamer.device.base import Buffer, Device, Stream
from streamer.plan.plan import Chunk
from streamer.trace import Tracer

PAGE_NBYTES = 4096
MIB = 1 << 20


class Source(Protocol):
    """A shard's bytes, as `gguf.mapping.Mapping` gives them; FileChangedError where bytes have gone."""

    address: int

    @property
    def nbytes(self) -> int: ...
    @property
    def descriptor(self) -> int: ...
    def touch(self, offset: int, nbytes: int) -> None: ...
    def read_into(self, address: int, offset: int, nbytes: int) -> None: ...
    def open_direct(self) -> bool: ...
    def read_direct(self, address: int, offset: int, nbytes: int) -> int: ...
    def drop(self, offset: int, nbytes: int) -> None: ...
    def resident_bytes(self, offset: int = 0, nbytes: int | None = None) -> int: ...
    def check_unchanged(self) -> None: ...
    def close(self) -> None: ...


class Origin(enum.StrEnum):
    """Where a chunk's bytes came from."""

    PAGE_CACHE = "page_cache"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True)
class Move:
    """A chunk and where it goes: `buffer[offset : offset + chunk.nbytes]`."""

    chunk: Chunk
    buffer: Buffer
    offset: int


Batch = tuple[Move, ...]  # pieces of one weight that follow each other, in the file and in device memory


class Feed(Protocol):
    """Batches in execution order, handed to whichever worker asks."""

    def get(self) -> Batch | None:
        """The next one; blocks until there is one. None at the end, or when the load has been stopped."""

    def get_nowait(self) -> Batch | None:
        """The next one if there is one now."""


class Hooks(Protocol):
    """The account of a run, called from workers' threads."""

    def read(self, nbytes: int, origin: Origin) -> None:
        """So many bytes are about to be taken from there."""

    def submitted(self, move: Move, stream: int, checksum: int | None) -> None:
        """The copy is queued on `run.streams[stream]`. `checksum` is of the bytes the host handed over."""

    def completed(self, move: Move) -> None:
        """The event after the copy has completed: the bytes are in device memory."""

    def blame(self, move: Move, error: Exception) -> Exception:
        """The error to raise instead: one that names the weight."""


@dataclass(frozen=True)
class Run:
    """One load, as its workers see it. Streams, buffers and sources outlive every worker."""

    device: Device
    sources: Sequence[Source]  # by Chunk.shard
    streams: Sequence[Stream]  # of the transfer's `n_streams`
    feed: Feed
    hooks: Hooks
    stop: threading.Event
    tracer: Tracer
    checksum: bool = False  # compute each chunk's checksum as it passes
    mapping_is_safe: bool = True  # a truncation cannot kill the process: memcpy from the mapping is allowed


@dataclass(frozen=True)
class TransferStatistics:
    strategy: str
    workers: int
    slots: int
    pinned_bytes: int  # slots and registered windows held now


class Transfer(Protocol):
    """A strategy. Owns pinned memory and registrations from first use to `close`; reusable after."""

    name: str
    n_workers: int
    n_streams: int
    chunk_nbytes: int  # largest chunk it moves; the plan's chunks are cut to it
    batch: int  # chunks a worker takes at a time, at most

    def prepare(self) -> None:
        """Pin now what the workers would pin at their start. Optional: a thread may do it early."""

    def work(self, worker: int, run: Run) -> None:
        """Body of worker `worker` (0 .. n_workers - 1): move until the feed ends and all copies are done.

        Returns early, copies still in flight, when `run.stop` is set: the caller then drains the streams.
        """

    def detach(self) -> None:
        """Let go of everything that refers to sources. Streams are drained."""

    def close(self) -> None:
        """Unpin and unregister everything. Streams are drained. Idempotent."""

    def statistics(self) -> TransferStatistics: ...
