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
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from streamer.transfer.base import PAGE_NBYTES, Source

_PROT_READ, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x1, 0x02, 0x10, 0x20
_MAP_FAILED = ctypes.c_void_p(-1).value

Handler = Callable[[int, FrameType | None], Any] | int | None  # as the signal module has them

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip


class MappingGuard:
    """`watch` and `close` belong to the main thread, `forget` to whoever closes the mappings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held by the main thread outside the handler
        self._sources: list[Source] = []
        self._previous: Handler = None
        self._is_installed = self._is_repairing = False

    def watch(self, sources: Sequence[Source]) -> bool:
        """From now on a mapping whose file shrinks is repaired. False outside the main thread: it is not."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._sources = list(sources)
        self._previous = signal.signal(signal.SIGBUS, self._handle)
        self._is_installed = True
        return True

    def forget(self) -> None:
        """The mappings are about to be closed; nothing copies from them any more."""
        with self._lock:
            self._sources.clear()

    def close(self) -> None:
        """Put back what handled the signal before; nothing copies from the mappings any more."""
        if self._is_installed:
            self._is_installed = False
            previous = self._previous if self._previous is not None else signal.SIG_DFL
            signal.signal(signal.SIGBUS, previous)

    def _handle(self, number: int, frame: object) -> None:
        if self._is_repairing:
            return  # the copying thread faults on until the repair is done: this call is inside it
        self._is_repairing = True
        try:
            with self._lock:
                repaired = [repair(source) for source in self._sources]
        finally:
            self._is_repairing = False
        if not any(repaired):
            self.close()  # not ours: the next turn of the faulting instruction meets what was there before


def repair(mapping: Source) -> bool:
    """Lay zero pages over what a mapping's file no longer has. True if something was lost."""
    kept = -(-os.fstat(mapping.descriptor).st_size // PAGE_NBYTES) * PAGE_NBYTES
    lost = -(-mapping.nbytes // PAGE_NBYTES) * PAGE_NBYTES - kept
    if lost <= 0:
        return False
    flags = _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS
    result = _libc.mmap(mapping.address + kept, lost, _PROT_READ, flags, -1, 0)
    return bool(result != _MAP_FAILED)
