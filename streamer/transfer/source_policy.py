"""How bytes leave the file: decided purely from residency and what the file system can do.

The page cache is asked with mincore on a probe of 64 KiB in the range's middle (4 MiB cost 60 us, a quarter
of copying them). A wrong guess is slower, never wrong: every way reads the same bytes.
"""

import ctypes
import enum
import errno
import os

from streamer.transfer.base import Origin, Source

PROBE_NBYTES = 64 << 10


class _Vector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))  # struct iovec


_quick = ctypes.PyDLL(None, use_errno=True)  # with the interpreter lock: it never waits
_quick.preadv64v2.argtypes = (
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int,
)  # fmt: skip
_quick.preadv64v2.restype = ctypes.c_ssize_t


class Way(enum.Enum):
    """`origin` is what the account says of it."""

    MAP = "touch the mapping, copy from it"
    READ = "read through the page cache"
    DIRECT = "read around the page cache"
    READ_DROP = "read through the page cache, then drop the pages"

    @property
    def origin(self) -> Origin:
        return Origin.PAGE_CACHE if self in (Way.MAP, Way.READ) else Origin.STORAGE


#       (cached, mapping is safe, has O_DIRECT) -> way
WAYS = {
    (True, True, True): Way.MAP,
    (True, True, False): Way.MAP,
    (True, False, True): Way.READ,
    (True, False, False): Way.READ,
    (False, True, True): Way.DIRECT,
    (False, False, True): Way.DIRECT,
    (False, True, False): Way.READ_DROP,
    (False, False, False): Way.READ_DROP,
}


def choose_way(source: Source, offset: int, nbytes: int, *, mapping_is_safe: bool) -> Way:
    """The way for a range of the file. Asks for O_DIRECT only when the range is cold."""
    cached = is_cached(source, offset, nbytes)
    return WAYS[cached, mapping_is_safe, cached or source.open_direct()]


def is_cached(source: Source, offset: int, nbytes: int) -> bool:
    """Whether the page cache holds the range, judged by its middle.

    To a process that neither owns nor may write the file, mincore calls everything resident (a daemon under
    DynamicUser is one). So a yes is confirmed by reading a byte that must not wait for storage.
    """
    probe = min(nbytes, PROBE_NBYTES)
    start = offset + (nbytes - probe) // 2
    if source.resident_bytes(start, probe) < probe:
        return False
    byte = ctypes.create_string_buffer(1)
    vector = _Vector(ctypes.addressof(byte), 1)
    if _quick.preadv64v2(source.descriptor, ctypes.byref(vector), 1, start, os.RWF_NOWAIT) >= 0:
        return True
    if ctypes.get_errno() == errno.EAGAIN:
        read_no_further(source)
        return False
    return True  # the file system has no such read: believe mincore


def fill(way: Way, source: Source, offset: int, nbytes: int, address: int) -> int:
    """Bring a range's bytes to host memory; returns where they begin, counted from `address`.

    For DIRECT `address` is page-aligned, with room for all pages that the range lies in. MAP wants the range
    touched before.
    """
    if way is Way.MAP:
        ctypes.memmove(address, source.address + offset, nbytes)  # without the interpreter lock
        return 0
    if way is Way.DIRECT:
        return source.read_direct(address, offset, nbytes)
    if way is Way.READ_DROP:
        read_no_further(source)
    source.read_into(address, offset, nbytes)
    if way is Way.READ_DROP:
        source.drop(offset, nbytes)
    return 0


def read_no_further(source: Source) -> None:
    """No readahead from now on: it would make the next chunks look cached, and nobody would drop them."""
    os.posix_fadvise(source.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
