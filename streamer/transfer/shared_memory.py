"""The ring's memory where processes fill it: a file in memory that they map, page-locked by the device."""

import contextlib
import ctypes
import logging
import mmap
import os

from streamer.device.base import Device, Registration
from streamer.errors import DeviceError, DeviceMemoryError
from streamer.transfer.base import PAGE_NBYTES

log = logging.getLogger("ggufd.transfer")

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class SharedMemory:
    """Memory that other processes may map by its descriptor; as much of it pinned as can be had."""

    def __init__(self, nbytes: int) -> None:
        try:
            self.descriptor = os.memfd_create("ggufd-ring", os.MFD_CLOEXEC)
        except OSError as error:
            raise DeviceError("memfd_create", error.strerror or str(error), "pinned memory") from error
        os.ftruncate(self.descriptor, nbytes)
        self._mmap = mmap.mmap(self.descriptor, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap))
        self.nbytes = nbytes
        self._registration: Registration | None = None

    @property
    def pinned_nbytes(self) -> int:
        return self._registration.nbytes if self._registration is not None else 0

    def pin(self, device: Device, least: int) -> None:
        """Pin all, or a half, a quarter ... with a warning; DeviceMemoryError when not even `least` bytes."""
        nbytes = self.nbytes
        with contextlib.suppress(OSError):
            self._mmap.madvise(_POPULATE_WRITE, 0, nbytes)
        while self._registration is None:
            try:
                self._registration = device.pin(self.address, nbytes)
            except DeviceMemoryError as error:
                nbytes = nbytes // 2 // PAGE_NBYTES * PAGE_NBYTES
                if nbytes < least:
                    raise
                log.warning("event=smaller_ring nbytes=%d asked=%d free=%d", nbytes, error.asked, error.free)

    def close(self) -> None:
        """Unpin and unmap; nobody copies from or to it any more."""
        registration, self._registration = self._registration, None
        try:
            if registration is not None:
                registration.close()
        finally:
            self._mmap.close()
            os.close(self.descriptor)
