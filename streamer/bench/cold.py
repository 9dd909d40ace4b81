"""Cold files: eviction with proof, and what storage gives without us (plain O_DIRECT reads)."""

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

from streamer.gguf.mapping import DIRECT_ALIGNMENT, Mapping

MIB = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.pread64.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_libc.pread64.restype = ctypes.c_ssize_t


@dataclass(frozen=True)
class DirectShape:
    """How a plain reader reads: threads, each with one aligned buffer."""

    threads: int
    block_nbytes: int


SHAPES = tuple(DirectShape(threads, block * MIB) for threads, block in product((1, 2, 4), (4, 16)))


class StillCachedError(RuntimeError):
    """Pages stayed in the cache after eviction: a cold run would not be cold."""


def evict(mappings: Sequence[Mapping], *, patience_s: float = 5.0) -> None:
    """Drop the files' pages and prove with mincore that none is left; StillCachedError otherwise."""
    deadline_s = time.monotonic() + patience_s
    for mapping in mappings:
        os.fsync(mapping.descriptor)  # a dirty page cannot be dropped
        mapping.drop(0, mapping.nbytes)
        while left := mapping.resident_bytes():
            if time.monotonic() > deadline_s:
                raise StillCachedError(f"{mapping.shard.path}: {left} bytes stay in the page cache")
            mapping.drop(0, mapping.nbytes)


def warm(mappings: Sequence[Mapping]) -> None:
    """Bring the files into the page cache."""
    for mapping in mappings:
        mapping.touch(0, mapping.nbytes)


def direct_gbps(path: str, shape: DirectShape, *, nbytes: int | None = None) -> float:
    """GB/s of reading a file (its first `nbytes`) around the page cache. OSError where that cannot be."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        total = os.fstat(descriptor).st_size if nbytes is None else min(nbytes, os.fstat(descriptor).st_size)
        n_blocks = -(-total // shape.block_nbytes)
        started_s = time.perf_counter()
        with ThreadPoolExecutor(shape.threads) as pool:
            done = list(
                pool.map(lambda w: _read_blocks(descriptor, shape, w, n_blocks), range(shape.threads))
            )
        elapsed_s = time.perf_counter() - started_s
        return min(sum(done), total) / elapsed_s / 1e9
    finally:
        os.close(descriptor)


def best_shape(path: str, *, nbytes: int, shapes: Sequence[DirectShape] = SHAPES) -> DirectShape:
    """The shape that reads a piece of the file fastest."""
    return max(shapes, key=lambda shape: direct_gbps(path, shape, nbytes=nbytes))


def _read_blocks(descriptor: int, shape: DirectShape, worker: int, n_blocks: int) -> int:
    """A worker's share: every `threads`-th block, so the file is read about in order. Returns bytes read."""
    assert shape.block_nbytes % DIRECT_ALIGNMENT == 0
    done = 0
    with mmap.mmap(-1, shape.block_nbytes) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for block in range(worker, n_blocks, shape.threads):
            count = _libc.pread64(descriptor, address, shape.block_nbytes, block * shape.block_nbytes)
            if count < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            done += count
    return done
