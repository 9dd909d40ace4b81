"""A staging process: copies pieces of files into the shared ring, as told. Needs only the standard library,
and numpy where it proves what it has copied.

    python -I -S crew_child.py NUMBER JOBS DONE FILES RING RING_NBYTES PATH      (four are descriptors)

PATH, where modules are found, is empty unless the checksum of every piece is wanted: taken in the ring, just
after the copy, while the bytes are in a cache.

All processes of a crew read jobs from one pipe: whoever is free takes the next. It ends when the pipe does,
which is when the daemon closes it or is gone. A page that a truncation takes away kills only this process.
"""

import ctypes
import errno
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

JOB = struct.Struct("<IHHQQQ")  # token, file, way, offset in the file, bytes, offset in the ring
# token, number of the process, errno or 0, when begun, touched and ended, checksum or 0
DONE = struct.Struct("<IHHdddQ")
FILE = struct.Struct("<Q")  # size; the descriptor comes beside it
MAP, READ, DIRECT, READ_DROP = range(4)  # ways, as in source_policy.py
PAGE_NBYTES = 4096
RECORDS = 4096 // JOB.size  # a write of so many is atomic

_PROT_READ, _PROT_WRITE, _MAP_SHARED, _MADV_POPULATE_READ = 1, 2, 1, 22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.pread64.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_libc.pread64.restype = ctypes.c_ssize_t


@dataclass
class File:
    """A file as this process sees it. `direct`: a second descriptor with O_DIRECT, once one was needed."""

    descriptor: int
    nbytes: int
    address: int
    direct: int = -1


Checksum = Callable[[memoryview], int]


def work(
    number: int, jobs: int, done: int, files: socket.socket, ring: int, checksum: Checksum | None
) -> None:
    """Until the pipe of jobs ends."""
    known: list[File] = []
    while len(record := os.read(jobs, JOB.size)) == JOB.size:
        token, index, way, offset, nbytes, target = JOB.unpack(record)
        while len(known) <= index:
            known.append(receive(files))
        begun_s = time.perf_counter()
        touched_s, code = begun_s, 0
        if way == MAP:
            code = touch(known[index], offset, nbytes)
            touched_s = time.perf_counter()
            if not code:
                ctypes.memmove(ring + target, known[index].address + offset, nbytes)
        else:
            code = read(known[index], way, offset, nbytes, ring + target)
        proof = 0
        if checksum is not None and not code:
            proof = checksum(memoryview((ctypes.c_char * nbytes).from_address(ring + target)).cast("B"))
        os.write(done, DONE.pack(token, number, code, begun_s, touched_s, time.perf_counter(), proof))


def receive(files: socket.socket) -> File:
    """The next file, mapped."""
    message, (descriptor,), _, _ = socket.recv_fds(files, FILE.size, 1)
    (nbytes,) = FILE.unpack(message)
    return File(descriptor, nbytes, map_shared(descriptor, nbytes, _PROT_READ))


def map_shared(descriptor: int, nbytes: int, protection: int) -> int:
    address = _libc.mmap(None, nbytes, protection, _MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(address)


def touch(file: File, offset: int, nbytes: int) -> int:
    """Map a range's pages in one call. 0 or errno; an old kernel's refusal is no error: the copy faults."""
    begin = offset // PAGE_NBYTES * PAGE_NBYTES
    if not _libc.madvise(file.address + begin, offset + nbytes - begin, _MADV_POPULATE_READ):
        return 0
    code = ctypes.get_errno()
    return 0 if code == errno.EINVAL else code


def read(file: File, way: int, offset: int, nbytes: int, address: int) -> int:
    """Read a range to `address`. Around the page cache whole pages are read, into the pages it lies in."""
    descriptor, end = file.descriptor, offset + nbytes
    if way == DIRECT:
        if file.direct < 0:
            try:
                file.direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                return error.errno or errno.EIO
        shift = offset % PAGE_NBYTES
        descriptor, offset, address = file.direct, offset - shift, address - shift
        nbytes = -(-(end - offset) // PAGE_NBYTES) * PAGE_NBYTES
    begin = offset
    while offset < end:
        count = _libc.pread64(descriptor, address + offset - begin, nbytes + begin - offset, offset)
        if count <= 0:
            return ctypes.get_errno() if count else errno.ENODATA
        offset += count
    if way == READ_DROP:
        first, last = -(-begin // PAGE_NBYTES) * PAGE_NBYTES, end // PAGE_NBYTES * PAGE_NBYTES
        if first < last:
            os.posix_fadvise(descriptor, first, last - first, os.POSIX_FADV_DONTNEED)
    return 0


def main() -> None:
    number, jobs, done, files, ring, nbytes = map(int, sys.argv[1:7])
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # the daemon says when it is over
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    address = map_shared(ring, nbytes, _PROT_READ | _PROT_WRITE)
    checksum: Checksum | None = None
    if sys.argv[7]:
        sys.path[:0] = sys.argv[7].split(os.pathsep)
        from streamer.device.checksum import checksum_reference

        checksum = checksum_reference
    work(number, jobs, done, socket.socket(fileno=files), address, checksum)


if __name__ == "__main__":
    main()
