"""A shard's bytes: read-only mapping and descriptor, with calls that release the interpreter lock. No policy.

What protects against a file that shrinks or breaks while it is used (each is a FileChangedError):
- `read_into` and `read_direct` copy in the kernel: end of file and I/O errors come back as results. They are
  the safe path.
- `touch` populates page tables in the kernel: a page that has gone is an error code.
- Loads from `address` or `view` by others (memcpy, a DMA set-up in the driver) are not protected: a page cut
  off between `touch` and the load raises SIGBUS. Whoever reads the mapping so calls `touch` right before,
  `check_unchanged` after, and keeps a guard for the signal meanwhile (load/guard.py).
A rename or unlink of the path changes nothing: the open descriptor keeps the old file's bytes.
"""

import ctypes
import errno
import mmap
import os
from types import TracebackType
from typing import NoReturn, Self

import numpy as np

from streamer.errors import FileChangedError, GGUFError
from streamer.gguf.directory import Shard

PAGE_NBYTES = mmap.PAGESIZE
DIRECT_ALIGNMENT = 4096  # of address, offset and length for O_DIRECT: at least any disk's logical block
_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22  # Linux 5.14
_SCRATCH_NBYTES = 1 << 20
_QUICK_NBYTES = 256 << 10  # a question about so much takes a few microseconds

_libc = ctypes.CDLL(None, use_errno=True)  # CDLL (not PyDLL): calls run without the interpreter lock
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_quick = ctypes.PyDLL(None, use_errno=True)  # with the lock: cheaper for what takes a few microseconds
_quick.mincore.argtypes = _libc.mincore.argtypes
_libc.pread64.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_libc.pread64.restype = ctypes.c_ssize_t


def direct_span(offset: int, nbytes: int) -> tuple[int, int]:
    """The O_DIRECT-aligned span around `[offset, offset + nbytes)`: its offset and length."""
    begin = offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    end = -(-(offset + nbytes) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
    return begin, end - begin


class Mapping:
    """One shard, mapped shared and read-only, never writable. Every method may be called from any thread.

    Owns the mapping and the descriptors until `close`; `address` and `view` are valid until then.
    FileChangedError at opening when the file is not the one whose header was read.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._direct: int | None = None
        self._can_populate = True
        try:
            self._descriptor = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise GGUFError(shard.path, "file", error.strerror or str(error)) from None
        try:
            self.check_unchanged()
            self._mmap = mmap.mmap(self._descriptor, shard.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            os.close(self._descriptor)
            raise GGUFError(shard.path, "file", f"cannot be mapped: {error.strerror}") from None
        except FileChangedError:
            os.close(self._descriptor)
            raise
        self.address = np.frombuffer(self._mmap, dtype=np.uint8).ctypes.data
        self._closed = False

    @property
    def nbytes(self) -> int:
        return self.shard.nbytes

    @property
    def descriptor(self) -> int:
        return self._descriptor

    @property
    def is_direct(self) -> bool:
        """Whether `open_direct` has succeeded."""
        return self._direct is not None

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Read-only bytes of the mapping, unprotected (see above). Release it before `close`."""
        self._check_range(offset, nbytes)
        return memoryview(self._mmap)[offset : offset + nbytes]

    def touch(self, offset: int, nbytes: int) -> None:
        """Fault the pages of a range in (MADV_POPULATE_READ), so that later loads do not wait for storage."""
        self._check_range(offset, nbytes)
        begin = offset // PAGE_NBYTES * PAGE_NBYTES
        while self._can_populate and nbytes:
            code = self._madvise(begin, offset + nbytes - begin, _MADV_POPULATE_READ)
            if code == 0:
                return
            if code == errno.EINVAL:
                self._can_populate = False  # older kernel
            elif code not in (errno.EINTR, errno.EAGAIN):
                self._raise_touch_failed(code, offset, nbytes)
        self._read_through(offset, nbytes)

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        """Copy file bytes to host memory at `address`, which the caller owns (`nbytes` long, writable)."""
        self._check_range(offset, nbytes)
        self._pread(self._descriptor, address, offset, nbytes, nbytes)

    def open_direct(self) -> bool:
        """Open a second descriptor with O_DIRECT and try it; False where the file system has none."""
        if self._direct is not None:
            return True
        try:  # through /proc, so that it is this very file even after a rename
            descriptor = os.open(
                f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
            )
        except OSError:
            return False
        with mmap.mmap(-1, DIRECT_ALIGNMENT) as page:  # page-aligned, as O_DIRECT demands
            try:
                os.preadv(descriptor, [page], 0)
            except OSError:
                os.close(descriptor)
                return False
        self._direct = descriptor
        return True

    def read_direct(self, address: int, offset: int, nbytes: int) -> int:
        """Read around the page cache. Returns where the byte at `offset` lies, counted from `address`.

        `address` is DIRECT_ALIGNMENT-aligned and has room for `direct_span(offset, nbytes)[1]` bytes.
        """
        self._check_range(offset, nbytes)
        assert self._direct is not None, "open_direct first"
        assert address % DIRECT_ALIGNMENT == 0, hex(address)
        begin, span = direct_span(offset, nbytes)
        shift = offset - begin
        self._pread(self._direct, address, begin, span, shift + nbytes)
        return shift

    def drop(self, offset: int, nbytes: int) -> None:
        """Give a range's pages back: out of the page tables, and of the page cache if nobody maps them."""
        self._check_range(offset, nbytes)
        begin = -(-offset // PAGE_NBYTES) * PAGE_NBYTES
        end = offset + nbytes
        if end < self.nbytes:
            end = end // PAGE_NBYTES * PAGE_NBYTES
        if begin < end:
            self._madvise(begin, end - begin, _MADV_DONTNEED)
            os.posix_fadvise(self._descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def resident_bytes(self, offset: int = 0, nbytes: int | None = None) -> int:
        """Bytes of a range in the page cache (mincore), in whole pages but at most the range.

        Linux tells the truth to who owns or may write the file; to others everything seems resident, as it
        does where a sandbox forbids the question.
        """
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        self._check_range(offset, nbytes)
        if not nbytes:
            return 0
        begin = offset // PAGE_NBYTES * PAGE_NBYTES
        length = offset + nbytes - begin
        states = np.empty(-(-length // PAGE_NBYTES), dtype=np.uint8)  # bit 0: resident
        libc = _quick if nbytes <= _QUICK_NBYTES else _libc
        if libc.mincore(self.address + begin, length, states.ctypes.data):
            code = ctypes.get_errno()
            if code in (errno.EPERM, errno.ENOSYS):
                return nbytes
            raise GGUFError(self.shard.path, "file", f"mincore: {os.strerror(code)}")
        return min(nbytes, int(np.count_nonzero(states & 1)) * PAGE_NBYTES)

    def check_unchanged(self) -> None:
        """FileChangedError unless the open file has the size, time and identity its header was read with."""
        shard = self.shard
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise FileChangedError(shard.path, "file", f"cannot be looked at: {error.strerror}") from None
        if status.st_ino != shard.inode:
            raise FileChangedError(shard.path, "file", "was replaced after its header was read")
        if status.st_size < shard.nbytes:
            lacking = shard.nbytes - status.st_size
            raise FileChangedError(
                shard.path, "file", f"was truncated after its header was read: {lacking} bytes lack"
            )
        if (status.st_size, status.st_mtime_ns) != (shard.nbytes, shard.mtime_ns):
            raise FileChangedError(shard.path, "file", "was written to after its header was read")

    def close(self) -> None:
        """Unmap and close. All reads have ended, views are released, registrations closed. Idempotent."""
        if self._closed:
            return
        self._mmap.close()
        self._closed = True
        os.close(self._descriptor)
        if self._direct is not None:
            os.close(self._direct)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"at {self.address:#x}"
        return f"Mapping({self.shard.path}, {self.nbytes} bytes, {state})"

    def _check_range(self, offset: int, nbytes: int) -> None:
        assert 0 <= offset <= offset + nbytes <= self.nbytes, (offset, nbytes, self.nbytes)

    def _madvise(self, begin: int, length: int, advice: int) -> int:
        """0 or the error's number."""
        return ctypes.get_errno() if _libc.madvise(self.address + begin, length, advice) else 0

    def _raise_touch_failed(self, code: int, offset: int, nbytes: int) -> NoReturn:
        self.check_unchanged()  # says truncated, if that is what happened
        where = f"{nbytes} bytes at {offset}"
        raise FileChangedError(self.shard.path, "file", f"{where} cannot be read: {os.strerror(code)}")

    def _read_through(self, offset: int, nbytes: int) -> None:
        """`touch` without MADV_POPULATE_READ: read into a scratch buffer, which fills the page cache."""
        scratch = np.empty(min(nbytes, _SCRATCH_NBYTES), dtype=np.uint8)
        end = offset + nbytes
        while offset < end:
            part = min(end - offset, scratch.nbytes)
            self.read_into(scratch.ctypes.data, offset, part)
            offset += part

    def _pread(self, descriptor: int, address: int, offset: int, nbytes: int, needed: int) -> None:
        """Up to `nbytes`, but at least `needed` (an aligned span may run past the end of the file)."""
        done = 0
        while done < needed:
            count = _libc.pread64(descriptor, address + done, nbytes - done, offset + done)
            if count > 0:
                done += count
            elif count == 0:
                lacking = needed - done
                reason = f"ends early: {lacking} of {needed} bytes at {offset} lack"
                raise FileChangedError(self.shard.path, "file", reason)
            elif (code := ctypes.get_errno()) != errno.EINTR:
                where = f"{nbytes - done} bytes at {offset + done}"
                raise FileChangedError(
                    self.shard.path, "file", f"{where} cannot be read: {os.strerror(code)}"
                )
