"""The contract of a device: memory, streams, events, counted copies. Backends: host.py, cuda.py.

faulty.py wraps one. Vocabulary as in cuda.core. `stream` is keyword-only. Nothing here knows weights, models
or files.
Thread rule: every method may be called from any thread; a backend makes its context current itself.
"""

import enum
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class CopyKind(enum.StrEnum):
    WEIGHTS = "weights"
    ACTIVATIONS = "activations"
    TABLES = "tables"


class CopyPhase(enum.StrEnum):
    LOAD = "load"
    SERVE = "serve"


@dataclass(frozen=True)
class Capabilities:
    """What a device can do, read from the driver once. `transfer/choose.py` holds tables over this."""

    kind: str  # "cuda" | "host"
    name: str  # "NVIDIA H200" | "host"
    ordinal: int = 0
    compute_capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    integrated: bool = False
    pageable_memory_access: bool = False  # HMM or coherent: the device can fault host pages
    pageable_uses_host_page_tables: bool = False  # coherent link (Grace)
    host_register: bool = False
    read_only_host_register: bool = False
    memory_pools: bool = False
    copy_engines: int = 0
    unified_addressing: bool = False


@dataclass(frozen=True)
class MemoryInfo:
    free: int  # bytes
    total: int  # bytes


class Event(Protocol):
    """A point in a stream, made by `Stream.record`: done once everything before it there is done."""

    @property
    def is_done(self) -> bool: ...
    def sync(self) -> None:
        """Block the calling thread, without the interpreter lock, until done. DeviceError if it failed."""


class Stream(Protocol):
    """An ordered queue of device work."""

    @property
    def handle(self) -> int: ...
    def record(self) -> Event: ...
    def wait(self, event: Event) -> None:
        """Later work on this stream starts after `event`; the host does not block."""

    def sync(self) -> None: ...
    def close(self) -> None:
        """Finish queued work, then release. Idempotent."""


class Buffer(Protocol):
    """Device memory, owned by whoever allocated it until `close`."""

    @property
    def nbytes(self) -> int: ...
    @property
    def handle(self) -> int:
        """Device address of byte 0."""

    def close(self) -> None:
        """Free now. The caller has already waited for work that uses it. Idempotent."""


class PinnedBuffer(Protocol):
    """Page-locked host memory, readable by the copy engines."""

    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def view(self) -> memoryview:
        """Writable bytes; invalid after `close`."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class DeviceStatistics:
    allocated_bytes: int  # live device bytes
    peak_allocated_bytes: int
    pinned_bytes: int  # live pinned and registered host bytes
    peak_pinned_bytes: int
    uploaded_bytes: dict[tuple[CopyPhase, CopyKind], int]  # through the one door
    live_streams: int


class Device(Protocol):
    capabilities: Capabilities

    def memory_info(self) -> MemoryInfo: ...
    def create_stream(self, name: str) -> Stream: ...
    def allocate(self, nbytes: int, *, what: str = "") -> Buffer:
        """Uninitialised device memory, 256-byte aligned. DeviceMemoryError names `what`, asked and free."""

    def allocate_pinned(self, nbytes: int) -> PinnedBuffer: ...
    def pin(self, address: int, nbytes: int) -> "Registration":
        """Page-lock existing writable memory (shared with other processes); else as `allocate_pinned`."""

    def register(self, address: int, nbytes: int) -> "Registration":
        """Page-lock existing read-only host memory (a window of a mapping) for DMA; counted as pinned."""

    def upload(
        self, buffer: Buffer, offset: int, source: int, nbytes: int, *, stream: Stream, kind: CopyKind
    ) -> None:
        """The one door: copy `nbytes` from host address `source` to `buffer[offset:]`, asynchronously.

        Counted under the current phase and `kind`. The source must be pinned or registered for the copy to be
        asynchronous, and stay unchanged until an event recorded after it on `stream` is done.
        """

    def download(self, buffer: Buffer, offset: int, target: int, nbytes: int, *, stream: Stream) -> None:
        """Copy to host address `target`, asynchronously; ordered on `stream`."""

    def fill(self, buffer: Buffer, offset: int, nbytes: int, value: int, *, stream: Stream) -> None:
        """Set bytes to `value` (0..255), ordered on `stream`."""

    def checksum(self, buffer: Buffer, offset: int, nbytes: int, *, stream: Stream) -> "PendingChecksum":
        """`checksum.checksum_reference` of device bytes, computed on the device, ordered on `stream`."""

    def enter_serving(self) -> None:
        """From now on uploads count under phase `serve`. Once a load."""

    def enter_loading(self) -> None:
        """Another load begins on an open device: uploads count under `load` again, all from zero."""

    def statistics(self) -> DeviceStatistics: ...
    def close(self) -> None:
        """Sync, free what is still allocated, leave the process able to open the device again. Idempotent."""


class Registration(Protocol):
    @property
    def nbytes(self) -> int: ...
    def close(self) -> None: ...


class PendingChecksum(Protocol):
    def result(self) -> int:
        """Block until computed; an unsigned 64-bit integer."""


@runtime_checkable
class Hurrying(Protocol):
    """A device that delays work on purpose (a simulated link)."""

    def hurry(self) -> None:
        """Queued work finishes without its simulated delay: a cancelled load does not wait for it."""
