"""The host as a device: anonymous memory, streams that are threads, and an optional simulated link.

The same pipeline runs on it as on a GPU, so whatever must be true there (ordering, slot reuse, back-pressure)
is tested here for real. Copies and checksums run on the streams' threads without the interpreter lock.
"""

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from streamer.device.account import Account
from streamer.device.base import Buffer, Capabilities, CopyKind, DeviceStatistics, MemoryInfo, Stream
from streamer.device.checksum import checksum_reference
from streamer.device.host_memory import host_memory
from streamer.device.host_stream import HostEvent, HostStream, Link
from streamer.errors import DeviceError, DeviceMemoryError

HOST_CAPABILITIES = Capabilities(
    kind="host",
    name="host",
    host_register=True,
    read_only_host_register=True,
    memory_pools=True,
    copy_engines=1,
    unified_addressing=True,
)


class _Closable(Protocol):
    def close(self) -> None: ...


class HostMemory:
    """Anonymous page-aligned memory, device or pinned. Freed with the last numpy view of it."""

    def __init__(self, nbytes: int, on_close: Callable[["HostMemory"], None]) -> None:
        self.nbytes = nbytes
        self._on_close = on_close
        self._array: npt.NDArray[np.uint8] | None = _anonymous(nbytes)  # (nbytes,)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes, (nbytes,) uint8, without a copy."""
        if self._array is None:
            raise DeviceError("host memory", "INVALID_HANDLE", "used after close")
        return self._array

    @property
    def handle(self) -> int:
        return int(self.array.ctypes.data)

    @property
    def address(self) -> int:
        return self.handle

    @property
    def view(self) -> memoryview:
        return self.array.data

    def close(self) -> None:
        if self._array is not None:
            self._array = None
            self._on_close(self)

    def __repr__(self) -> str:
        return f"HostMemory({self.nbytes} bytes, {'closed' if self._array is None else 'live'})"


class HostRegistration:
    """A counted promise that a range stays mapped; the host needs no pinning for its copies."""

    def __init__(self, nbytes: int, on_close: Callable[["HostRegistration"], None]) -> None:
        self.nbytes = nbytes
        self._on_close: Callable[[HostRegistration], None] | None = on_close

    def close(self) -> None:
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            on_close(self)


class HostChecksum:
    """A checksum that a stream's thread computes."""

    def __init__(self) -> None:
        self.event = HostEvent()
        self.value = 0

    def result(self) -> int:
        self.event.sync()
        return self.value


class HostDevice:
    """`link_bytes_per_s` simulates a link; `poison` fills fresh memory; limits refuse what exceeds them."""

    def __init__(
        self,
        *,
        link_bytes_per_s: float | None = None,
        poison: int | None = None,
        memory_limit: int | None = None,
        pinned_limit: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        read_memory: Callable[[], MemoryInfo] = host_memory,
    ) -> None:
        self.capabilities = HOST_CAPABILITIES
        self._link = Link(link_bytes_per_s) if link_bytes_per_s else None
        self._poison, self._memory_limit, self._pinned_limit = poison, memory_limit, pinned_limit
        self._clock, self._read_memory = clock, read_memory
        self._account = Account()
        self._lock = threading.Lock()
        self._live: dict[int, _Closable] = {}  # by id: everything `close` must still free

    def memory_info(self) -> MemoryInfo:
        info = self._read_memory()
        if self._memory_limit is None:
            return info
        left = max(self._memory_limit - self._account.statistics().allocated_bytes, 0)
        return MemoryInfo(free=min(info.free, left), total=min(info.total, self._memory_limit))

    def create_stream(self, name: str) -> HostStream:
        stream = HostStream(name, link=self._link, on_close=self._stream_closed, clock=self._clock)
        self._account.streams(1)
        self._keep(stream)
        return stream

    def allocate(self, nbytes: int, *, what: str = "") -> HostMemory:
        free = self.memory_info().free
        memory = self._take(nbytes, nbytes > free, free, what, self._freed)
        self._account.allocated(nbytes)
        self._keep(memory)
        if self._poison is not None:
            memory.array.fill(self._poison)
        return memory

    def allocate_pinned(self, nbytes: int) -> HostMemory:
        left = self._pinnable()
        memory = self._take(nbytes, nbytes > left, left, "pinned memory", self._unpinned)
        self._account.pinned(nbytes)
        self._keep(memory)
        return memory

    def pin(self, address: int, nbytes: int) -> HostRegistration:
        left = self._pinnable()
        if nbytes > left:
            raise DeviceMemoryError("host pin", "OUT_OF_MEMORY", nbytes, left, "pinned memory")
        return self.register(address, nbytes)

    def register(self, address: int, nbytes: int) -> HostRegistration:
        registration = HostRegistration(nbytes, self._unpinned)
        self._account.pinned(nbytes)
        self._keep(registration)
        return registration

    def upload(
        self, buffer: Buffer, offset: int, source: int, nbytes: int, *, stream: Stream, kind: CopyKind
    ) -> None:
        target = _range(buffer, offset, nbytes, "upload")
        _own(stream).copy(lambda i, j: _move(target[i:j], source + i, to_host=False), nbytes)
        self._account.uploaded(kind, nbytes)

    def download(self, buffer: Buffer, offset: int, target: int, nbytes: int, *, stream: Stream) -> None:
        source = _range(buffer, offset, nbytes, "download")
        _own(stream).copy(lambda i, j: _move(source[i:j], target + i, to_host=True), nbytes)

    def fill(self, buffer: Buffer, offset: int, nbytes: int, value: int, *, stream: Stream) -> None:
        target = _range(buffer, offset, nbytes, "fill")
        _own(stream).submit(lambda: target.fill(value))

    def checksum(self, buffer: Buffer, offset: int, nbytes: int, *, stream: Stream) -> HostChecksum:
        source = _range(buffer, offset, nbytes, "checksum")
        pending = HostChecksum()

        def compute() -> None:
            pending.value = checksum_reference(source.data)

        _own(stream).submit(compute, pending.event)
        return pending

    def enter_serving(self) -> None:
        self._account.enter_serving()

    def enter_loading(self) -> None:
        self._account.enter_loading()

    def statistics(self) -> DeviceStatistics:
        return self._account.statistics()

    def hurry(self) -> None:
        with self._lock:
            streams = [x for x in self._live.values() if isinstance(x, HostStream)]
        for stream in streams:
            stream.hurry()

    def close(self) -> None:
        self.hurry()
        with self._lock:
            live = list(self._live.values())
        for resource in sorted(
            live, key=lambda x: not isinstance(x, HostStream)
        ):  # streams first: they use the rest
            resource.close()

    def _pinnable(self) -> int:
        """Bytes that may still be pinned."""
        if self._pinned_limit is None:
            return self._read_memory().free
        return max(self._pinned_limit - self._account.statistics().pinned_bytes, 0)

    def _take(
        self, nbytes: int, refused: bool, free: int, what: str, on_close: Callable[[HostMemory], None]
    ) -> HostMemory:
        if refused:
            raise DeviceMemoryError("host allocate", "OUT_OF_MEMORY", nbytes, free, what)
        try:
            return HostMemory(nbytes, on_close)
        except (OSError, ValueError, OverflowError) as error:
            raise DeviceMemoryError("host allocate", type(error).__name__, nbytes, free, what) from error

    def _keep(self, resource: _Closable) -> None:
        with self._lock:
            self._live[id(resource)] = resource

    def _forget(self, resource: _Closable) -> None:
        with self._lock:
            self._live.pop(id(resource), None)

    def _stream_closed(self, stream: HostStream) -> None:
        self._account.streams(-1)
        self._forget(stream)

    def _freed(self, memory: HostMemory) -> None:
        self._account.allocated(-memory.nbytes)
        self._forget(memory)

    def _unpinned(self, memory: HostMemory | HostRegistration) -> None:
        self._account.pinned(-memory.nbytes)
        self._forget(memory)

    def __repr__(self) -> str:
        return f"HostDevice({self._account.statistics()})"


def _anonymous(nbytes: int) -> npt.NDArray[np.uint8]:
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= 1 << 21:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)[:nbytes]


def _range(buffer: Buffer, offset: int, nbytes: int, call: str) -> npt.NDArray[np.uint8]:
    """The bytes a call works on; the view keeps the memory mapped until the work has run."""
    assert isinstance(buffer, HostMemory), buffer
    if offset < 0 or nbytes < 0 or offset + nbytes > buffer.nbytes:
        raise DeviceError(
            call, "INVALID_VALUE", f"[{offset}, {offset + nbytes}) of a buffer of {buffer.nbytes} bytes"
        )
    return buffer.array[offset : offset + nbytes]


def _own(stream: Stream) -> HostStream:
    assert isinstance(stream, HostStream), stream
    return stream


def _move(device: npt.NDArray[np.uint8], host: int, *, to_host: bool) -> None:
    """Copy between device bytes and a host address; a foreign call, so without the interpreter lock."""
    target, source = (host, device.ctypes.data) if to_host else (device.ctypes.data, host)
    ctypes.memmove(target, source, device.nbytes)
