"""Memory of a CUDA device: its own, page-locked host memory, registered windows. Each is freed once."""

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Callable
from typing import Any


class Owned:
    """Something to be given back. `release` frees it; the device keeps the living ones to free last."""

    __slots__ = ("_release", "is_open", "nbytes")

    def __init__(self, nbytes: int, release: Callable[["Owned"], None]) -> None:
        self.nbytes = nbytes
        self._release: Callable[[Owned], None] = release
        self.is_open = True

    def close(self) -> None:
        """Idempotent. The device marks it closed once it comes to the driver's freeing call."""
        if self.is_open:
            self._release(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.nbytes} bytes {'open' if self.is_open else 'closed'}>"


class CudaBuffer(Owned):
    """Device memory. `raw` is the bindings' address."""

    __slots__ = ("handle", "raw")

    def __init__(self, raw: Any, nbytes: int, release: Callable[[Owned], None]) -> None:
        super().__init__(nbytes, release)
        self.raw = raw
        self.handle = int(raw)


class CudaPinned(Owned):
    """Page-locked host memory; every context may copy from it (portable)."""

    __slots__ = ("address", "view")

    def __init__(self, address: int, nbytes: int, release: Callable[[Owned], None]) -> None:
        super().__init__(nbytes, release)
        self.address = address
        self.view = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


class CudaRegistration(Owned):
    """A page-locked range of somebody else's memory, which must outlive this."""

    __slots__ = ("address",)

    def __init__(self, address: int, nbytes: int, release: Callable[[Owned], None]) -> None:
        super().__init__(nbytes, release)
        self.address = address


class PinnedRanges:
    """Which host memory the copy engines read by themselves. Disjoint ranges; readers take no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: tuple[list[int], list[int]] = [], []  # starts, ends; replaced as a whole

    def add(self, address: int, nbytes: int) -> None:
        with self._lock:
            starts, ends = self._ranges
            at = bisect_right(starts, address)
            self._ranges = (
                [*starts[:at], address, *starts[at:]],
                [*ends[:at], address + nbytes, *ends[at:]],
            )

    def remove(self, address: int) -> None:
        with self._lock:
            starts, ends = self._ranges
            at = starts.index(address)
            self._ranges = [*starts[:at], *starts[at + 1 :]], [*ends[:at], *ends[at + 1 :]]

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether one range holds all of `[address, address + nbytes)`."""
        starts, ends = self._ranges
        at = bisect_right(starts, address) - 1
        return at >= 0 and address + nbytes <= ends[at]
