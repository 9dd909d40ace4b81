"""The CUDA device: the contract of base.py over the driver API. Only cuda*.py use the driver here.

Device memory comes from cuMemAlloc: at the size of a plan's segments it costs 0.05 ms (0.4 ms at 4 GiB), less
than the stream-ordered pool's first growth (0.6 ms at 512 MiB, 5 ms at 4 GiB), and a load allocates once. The
pool can be chosen (`pool=True`) where memory is given back and taken again: its reserve is kept.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from streamer.device.account import Account
from streamer.device.base import Buffer, CopyKind, DeviceStatistics, MemoryInfo, Stream
from streamer.device.cuda_checksum import ChecksumCode, ChecksumKernel, CudaPendingChecksum
from streamer.device.cuda_driver import OUT_OF_MEMORY, Driver, find_device, load_driver, read_capabilities
from streamer.device.cuda_memory import CudaBuffer, CudaPinned, CudaRegistration, Owned, PinnedRanges
from streamer.device.cuda_queue import CudaStream, EventPool, raw_stream
from streamer.errors import DeviceError, DeviceMemoryError

OwnedType = TypeVar("OwnedType", bound=Owned)

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE
_READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY: needed for a read-only mapping
_MAX_POOL_RESERVE = 2**64 - 1


class CudaDevice:
    """One GPU through its primary context. Every method may be called from any thread."""

    def __init__(
        self,
        driver: Driver,
        ordinal: int,
        *,
        checksum_code: ChecksumCode,
        pool: bool = False,
        spin: bool = False,
    ) -> None:
        """Retain the primary context (about 0.15 s). `spin`: waiting for an event burns a core."""
        self.driver = driver
        self._handle = find_device(driver, ordinal)
        self.capabilities = read_capabilities(driver, self._handle, ordinal)
        self.context = driver.call("cuDevicePrimaryCtxRetain", self._handle)
        self._token = object()
        self._account = Account()
        self._events = EventPool(driver, spin=spin)
        self._lock = threading.Lock()  # over _owned, _streams, _modules, and making the checksum kernel
        self._owned: dict[int, Owned] = {}
        self._streams: dict[int, CudaStream] = {}
        self._modules: list[Any] = []
        self._checksum_code = checksum_code
        self._checksum: ChecksumKernel | None = None
        self._checksum_lock = threading.Lock()
        self._pinned = PinnedRanges()
        self._is_open = True
        self._pool = self._open_pool() if pool else None

    def __repr__(self) -> str:
        state = "lost" if self.driver.lost else "open" if self._is_open else "closed"
        return f"<CudaDevice cuda:{self.capabilities.ordinal} {self.capabilities.name} {state}>"

    def activate(self) -> None:
        """Make this device's context the calling thread's current one (nothing when it is already)."""
        self.driver.make_current(self.context, self._token)

    # ---- memory ----------------------------------------------------------------------

    def memory_info(self) -> MemoryInfo:
        self.activate()
        free, total = self.driver.call("cuMemGetInfo")
        return MemoryInfo(free=int(free), total=int(total))

    def allocate(self, nbytes: int, *, what: str = "") -> CudaBuffer:
        self.activate()
        name, arguments = (
            ("cuMemAlloc", (nbytes,)) if self._pool is None else ("cuMemAllocAsync", (nbytes, 0))
        )
        code, raw = getattr(self.driver.api, name)(*arguments)
        if code != 0:
            raise self._allocation_error(name, code, nbytes, what or "device memory")
        buffer = CudaBuffer(raw, nbytes, self._free_buffer)
        self._account.allocated(nbytes)
        return self._own(buffer)

    def allocate_pinned(self, nbytes: int) -> CudaPinned:
        self.activate()
        code, address = self.driver.api.cuMemHostAlloc(nbytes, _PORTABLE)
        if code != 0:
            raise self._allocation_error("cuMemHostAlloc", code, nbytes, "pinned memory")
        pinned = CudaPinned(int(address), nbytes, self._free_pinned)
        self._account.pinned(nbytes)
        self._pinned.add(pinned.address, nbytes)
        return self._own(pinned)

    def register(self, address: int, nbytes: int) -> CudaRegistration:
        if not self.capabilities.read_only_host_register:
            raise DeviceError(
                "cuMemHostRegister",
                "CUDA_ERROR_NOT_SUPPORTED",
                "this device cannot register read-only host memory (READ_ONLY_HOST_REGISTER_SUPPORTED is 0)",
            )
        return self._register(address, nbytes, _PORTABLE | _READ_ONLY)

    def pin(self, address: int, nbytes: int) -> CudaRegistration:
        return self._register(address, nbytes, _PORTABLE)

    # ---- streams and copies ------------------------------------------------------------

    def create_stream(self, name: str) -> CudaStream:
        self.activate()
        stream = CudaStream(name, self.driver, self._events, self.activate, self._destroy_stream)
        with self._lock:
            self._streams[id(stream)] = stream
        self._account.streams(1)
        return stream

    def upload(
        self, buffer: Buffer, offset: int, source: int, nbytes: int, *, stream: Stream, kind: CopyKind
    ) -> None:
        assert 0 <= offset <= offset + nbytes <= buffer.nbytes, (offset, nbytes, buffer.nbytes)
        self.activate()
        if self._pinned.covers(source, nbytes):
            code = self.driver.quick.cuMemcpyHtoDAsync(buffer.handle + offset, source, nbytes, stream.handle)
        else:  # the driver stages it, and returns when it has
            (code,) = self.driver.api.cuMemcpyHtoDAsync(
                buffer.handle + offset, source, nbytes, raw_stream(stream)
            )
        if code != 0:
            raise self.driver.error("cuMemcpyHtoDAsync", code)
        self._account.uploaded(kind, nbytes)

    def download(self, buffer: Buffer, offset: int, target: int, nbytes: int, *, stream: Stream) -> None:
        assert 0 <= offset <= offset + nbytes <= buffer.nbytes, (offset, nbytes, buffer.nbytes)
        self.activate()
        self.driver.call("cuMemcpyDtoHAsync", target, buffer.handle + offset, nbytes, raw_stream(stream))

    def fill(self, buffer: Buffer, offset: int, nbytes: int, value: int, *, stream: Stream) -> None:
        assert 0 <= offset <= offset + nbytes <= buffer.nbytes, (offset, nbytes, buffer.nbytes)
        self.activate()
        self.driver.call("cuMemsetD8Async", buffer.handle + offset, value, nbytes, raw_stream(stream))

    def checksum(self, buffer: Buffer, offset: int, nbytes: int, *, stream: Stream) -> CudaPendingChecksum:
        assert 0 <= offset <= offset + nbytes <= buffer.nbytes, (offset, nbytes, buffer.nbytes)
        self.activate()
        return self.prepare_checksum().launch(buffer.handle + offset, nbytes, stream=stream)

    def prepare_checksum(self) -> ChecksumKernel:
        """Compile (or find) and load the checksum kernel, so that the first checksum does not wait for it."""
        with self._checksum_lock:
            if self._checksum is None:
                self._checksum = ChecksumKernel(self, self._checksum_code)
            return self._checksum

    # ---- code ------------------------------------------------------------------------

    def load_module(self, cubin: bytes) -> Any:
        """Load machine code; the module lives until the device closes. Returns the driver's CUmodule."""
        self.activate()
        module = self.driver.call("cuModuleLoadData", cubin)
        with self._lock:
            self._modules.append(module)
        return module

    def function(self, module: Any, symbol: str) -> Any:
        """The CUfunction `symbol` of a loaded module."""
        self.activate()
        return self.driver.call("cuModuleGetFunction", module, symbol.encode())

    # ---- account and end -------------------------------------------------------------

    def enter_serving(self) -> None:
        self._account.enter_serving()

    def enter_loading(self) -> None:
        self._account.enter_loading()

    def statistics(self) -> DeviceStatistics:
        return self._account.statistics()

    def close(self) -> None:
        """As in the contract. After a lost context the driver's answers to freeing say nothing."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        first: list[DeviceError] = []

        def attempt(name: str, *arguments: Any) -> None:
            try:
                self.driver.call(name, *arguments)
            except DeviceError as error:
                first.append(error)

        attempt("cuCtxSetCurrent", self.context)
        attempt("cuCtxSynchronize")
        self._close_all(first)
        if self._checksum is not None:
            self._checksum.close(attempt)
        self._events.close(attempt)
        while self._modules:
            attempt("cuModuleUnload", self._modules.pop())
        if self._pool is not None:
            attempt("cuMemPoolTrimTo", self._pool, 0)
        attempt("cuDevicePrimaryCtxRelease", self._handle)
        if first and not self.driver.lost:
            raise first[0]

    # ---- inside ----------------------------------------------------------------------

    def _register(self, address: int, nbytes: int, flags: int) -> CudaRegistration:
        self.activate()
        (code,) = self.driver.api.cuMemHostRegister(address, nbytes, flags)
        if code != 0:
            raise self._allocation_error("cuMemHostRegister", code, nbytes, "pinned memory")
        registration = CudaRegistration(address, nbytes, self._unregister)
        self._account.pinned(nbytes)
        self._pinned.add(address, nbytes)
        return self._own(registration)

    def _own(self, owned: OwnedType) -> OwnedType:
        with self._lock:
            self._owned[id(owned)] = owned
        return owned

    def _disown(self, owned: Owned) -> None:
        """Before the freeing call, which is made once whatever it answers; what fails here may be retried."""
        self.activate()
        owned.is_open = False
        with self._lock:
            self._owned.pop(id(owned), None)

    def _free_buffer(self, owned: Owned) -> None:
        assert isinstance(owned, CudaBuffer)
        self._disown(owned)
        self._account.allocated(-owned.nbytes)
        if self._pool is None:
            self.driver.call("cuMemFree", owned.raw)
        else:
            self.driver.call("cuMemFreeAsync", owned.raw, 0)

    def _free_pinned(self, owned: Owned) -> None:
        assert isinstance(owned, CudaPinned)
        self._disown(owned)
        self._pinned.remove(owned.address)
        self._account.pinned(-owned.nbytes)
        self.driver.call("cuMemFreeHost", owned.address)

    def _unregister(self, owned: Owned) -> None:
        assert isinstance(owned, CudaRegistration)
        self._disown(owned)
        self._pinned.remove(owned.address)
        self._account.pinned(-owned.nbytes)
        self.driver.call("cuMemHostUnregister", owned.address)

    def _destroy_stream(self, stream: CudaStream) -> None:
        with self._lock:
            self._streams.pop(id(stream), None)
        self._account.streams(-1)
        self.driver.call("cuStreamDestroy", stream.raw)

    def _close_all(self, errors: list[DeviceError]) -> None:
        """Close what is still open: streams, registrations, pinned memory, buffers."""
        with self._lock:
            order: dict[type, int] = {CudaRegistration: 0, CudaPinned: 1, CudaBuffer: 2}
            owned = sorted(self._owned.values(), key=lambda o: order[type(o)])
            closers: list[Callable[[], None]] = [s.close for s in self._streams.values()]
        for close in (*closers, *(o.close for o in owned)):
            try:
                close()
            except DeviceError as error:
                errors.append(error)

    def _allocation_error(self, call: str, code: Any, asked: int, what: str) -> DeviceError:
        error = self.driver.error(call, code)
        if int(code) != OUT_OF_MEMORY:
            return error
        return DeviceMemoryError(call, error.code, asked, self.memory_info().free, what)

    def _open_pool(self) -> Any:
        """The device's default pool, told to keep what it once got."""
        self.activate()
        api = self.driver.api
        pool = self.driver.call("cuDeviceGetDefaultMemPool", self._handle)
        threshold = api.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        self.driver.call("cuMemPoolSetAttribute", pool, threshold, api.cuuint64_t(_MAX_POOL_RESERVE))
        return pool


def open_cuda(
    ordinal: int, *, checksum_code: ChecksumCode, pool: bool = False, spin: bool = False
) -> CudaDevice:
    """Initialise the driver, take device `ordinal` (0.2–0.4 s: in a thread), or DeviceNotFoundError."""
    return CudaDevice(load_driver(), ordinal, checksum_code=checksum_code, pool=pool, spin=spin)
