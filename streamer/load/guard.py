"""Keeps a truncated file from killing the process while threads copy from its mapping.

A page cut off between `touch` and the copy raises SIGBUS in the copying thread, which runs without the
interpreter lock. The signal's Python handler runs in the main thread: it lays zero pages over what the file
has lost, so that the copy ends, and the load then fails at `check_unchanged`, with the file's name. The loop
must turn meanwhile (the pipeline ticks): handlers run only when the main thread executes Python.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from streamer.transfer.base import PAGE_NBYTES, Source

_PROT_READ, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x1, 0x02, 0x10, 0x20
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip


@contextmanager
def guard_mappings(mappings: Sequence[Source]) -> Iterator[bool]:
    """While inside, a mapping whose file shrinks is repaired. Yields whether so: only in the main thread."""
    if threading.current_thread() is not threading.main_thread() or not mappings:
        yield False
        return
    previous = signal.getsignal(signal.SIGBUS)

    def handle(number: int, frame: object) -> None:
        if not any([repair(mapping) for mapping in mappings]):
            # not ours: the next turn of the faulting instruction gets whatever was there before
            signal.signal(signal.SIGBUS, previous if previous is not None else signal.SIG_DFL)

    signal.signal(signal.SIGBUS, handle)
    try:
        yield True
    finally:
        signal.signal(signal.SIGBUS, previous if previous is not None else signal.SIG_DFL)


def repair(mapping: Source) -> bool:
    """Lay zero pages over what a mapping's file no longer has. True if something was lost."""
    kept = -(-os.fstat(mapping.descriptor).st_size // PAGE_NBYTES) * PAGE_NBYTES
    lost = -(-mapping.nbytes // PAGE_NBYTES) * PAGE_NBYTES - kept
    if lost <= 0:
        return False
    flags = _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS
    result = _libc.mmap(mapping.address + kept, lost, _PROT_READ, flags, -1, 0)
    return bool(result != _MAP_FAILED)
