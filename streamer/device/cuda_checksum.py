"""The residency checksum on a CUDA device: one launch each, the kernel writes its result to pinned memory.

The machine code comes from above (`kernels/checksum.cu`, compiled by kernels/) as bytes with one kernel:
    checksum(const void* data, u64 nbytes, Accumulator* accumulator, u64* result)
An accumulator (16 bytes, zero between uses) collects the blocks' sums; the last block writes the result and
zeroes the accumulator again.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from streamer.device.base import Event, Stream
from streamer.device.cuda_queue import raw_stream
from streamer.errors import DeviceError

if TYPE_CHECKING:
    from streamer.device.cuda import CudaDevice

ChecksumCode = Callable[[tuple[int, int]], bytes]  # compute capability -> cubin

BLOCK = 512  # threads
BLOCKS_PER_MULTIPROCESSOR = 4
BYTES_PER_BLOCK = BLOCK * 16 * 4  # what a block reads in one turn: four 16-byte loads a thread
SLOTS = 4096  # checksums in flight a page of accumulators
ACCUMULATOR_NBYTES = 16
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
_PARAMETER_TYPES = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p)


class ChecksumKernel:
    """Launches checksums on one device. Accumulators and results come in pages of SLOTS, at first use.

    A page (64 KiB of the device's memory, 32 KiB pinned) is the device's own, as its context is: not in its
    account.
    """

    def __init__(self, device: "CudaDevice", code: ChecksumCode) -> None:
        self._device = device
        module = device.load_module(code(device.capabilities.compute_capability))
        self._function = device.driver.call("cuModuleGetFunction", module, b"checksum")
        self._free: deque[tuple[int, int]] = deque()  # (accumulator on the device, result in pinned memory)
        self._pages: list[tuple[Any, int]] = []  # (accumulators, results)

    def launch(self, address: int, nbytes: int, *, stream: Stream) -> "CudaPendingChecksum":
        accumulator, result = self._take_slot()
        widest = self._device.capabilities.multiprocessors * BLOCKS_PER_MULTIPROCESSOR
        grid = max(1, min(widest, -(-nbytes // BYTES_PER_BLOCK)))
        parameters = ((address, nbytes, accumulator, result), _PARAMETER_TYPES)
        queue = raw_stream(stream)
        self._device.driver.call(
            "cuLaunchKernel", self._function, grid, 1, 1, BLOCK, 1, 1, 0, queue, parameters, 0
        )
        return CudaPendingChecksum(stream.record(), result, lambda: self._free.append((accumulator, result)))

    def _take_slot(self) -> tuple[int, int]:
        while True:
            try:
                return self._free.popleft()
            except IndexError:
                self._add_page()

    def close(self, attempt: Callable[..., None]) -> None:
        """Free the pages; `attempt` calls the driver and keeps the first error."""
        self._free.clear()
        while self._pages:
            accumulators, results = self._pages.pop()
            attempt("cuMemFree", accumulators)
            attempt("cuMemFreeHost", results)

    def _add_page(self) -> None:
        driver = self._device.driver
        accumulators = driver.call("cuMemAlloc", SLOTS * ACCUMULATOR_NBYTES)
        try:
            results = int(driver.call("cuMemHostAlloc", SLOTS * 8, _PORTABLE))
        except DeviceError:
            driver.call("cuMemFree", accumulators)
            raise
        self._pages.append((accumulators, results))
        stream = self._device.create_stream("checksum")
        try:
            driver.call("cuMemsetD8Async", accumulators, 0, SLOTS * ACCUMULATOR_NBYTES, stream.raw)
        finally:
            stream.close()
        first = int(accumulators)
        self._free.extend((first + i * ACCUMULATOR_NBYTES, results + i * 8) for i in range(SLOTS))


class CudaPendingChecksum:
    """A checksum on its way. Its slot is free again once the result was read; an unread one keeps it."""

    def __init__(self, event: Event, result: int, free: Callable[[], None]) -> None:
        self._event, self._address, self._free = event, result, free
        self._value: int | None = None

    def result(self) -> int:
        if self._value is None:
            self._event.sync()
            self._value = int(ctypes.c_uint64.from_address(self._address).value)
            self._free()
        return self._value
