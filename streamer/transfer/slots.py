"""Slots: pinned staging memory, each reusable only after the event behind its copy."""

import ctypes
import logging
import threading

import numpy as np

from streamer.device.base import Device, Event, PinnedBuffer
from streamer.device.checksum import checksum_reference
from streamer.errors import DeviceMemoryError, GgufdError
from streamer.transfer.base import PAGE_NBYTES, Move, Run

log = logging.getLogger("ggufd.transfer")


def slot_nbytes(chunk_nbytes: int) -> int:
    """Pinned bytes of a slot: a chunk, whole pages, and a page more for the shift of an O_DIRECT read."""
    return (-(-chunk_nbytes // PAGE_NBYTES) + 1) * PAGE_NBYTES


class Slot:
    """Owned by one worker. `settle` before every reuse: it waits for the copy and reports it completed."""

    __slots__ = ("address", "event", "move", "pinned")

    def __init__(self, pinned: PinnedBuffer) -> None:
        self.pinned = pinned
        self.address = pinned.address
        self.event: Event | None = None
        self.move: Move | None = None

    def settle(self, run: Run) -> Move | None:
        """Wait for the copy out of this slot, if one is in flight; returns its move."""
        move, event = self.move, self.event
        if move is None or event is None:
            return None
        try:
            event.sync()
        except GgufdError as error:
            raise run.hooks.blame(move, error) from error
        self.forget()
        run.hooks.completed(move)
        return move

    def forget(self) -> None:
        """After a drain: whatever was in flight is over."""
        self.move = self.event = None


class SlotPool:
    """The workers' slots: pinned at a worker's start or by `prepare`, kept until `close`."""

    def __init__(self, device: Device, *, workers: int, per_worker: int, chunk_nbytes: int) -> None:
        self._device, self._per_worker = device, per_worker
        self._slot_nbytes = slot_nbytes(chunk_nbytes)
        self._slots: list[list[Slot]] = [[] for _ in range(workers)]
        self._refused = False  # asked once too often: further workers do not ask again
        self._lock = threading.Lock()  # drivers pin one at a time anyhow

    def take(self, worker: int) -> list[Slot]:
        """This worker's slots. Fewer than planned, with a warning, where pinned memory cannot be had.

        Empty when none is left for this worker; DeviceMemoryError when no worker has any.
        """
        slots = self._slots[worker]
        for slot in slots:
            slot.forget()
        with self._lock:
            while len(slots) < self._per_worker and not self._refused:
                slot_or_none = self._pin()
                if slot_or_none is not None:
                    slots.append(slot_or_none)
        return slots

    def take_all(self) -> None:
        """Pin every worker's slots now."""
        for worker in range(len(self._slots)):
            self.take(worker)

    def _pin(self) -> Slot | None:
        try:
            return Slot(self._device.allocate_pinned(self._slot_nbytes))
        except DeviceMemoryError as error:
            if not self.count:
                raise
            self._refused = True
            log.warning("event=smaller_ring slots=%d asked=%d free=%d", self.count, error.asked, error.free)
            return None

    @property
    def count(self) -> int:
        return sum(len(slots) for slots in self._slots)

    @property
    def nbytes(self) -> int:
        return self.count * self._slot_nbytes

    def close(self) -> None:
        for slots in self._slots:
            while slots:
                slots.pop().pinned.close()
        self._refused = False


def checksum_at(address: int, nbytes: int) -> int:
    """Checksum of host memory, without a copy."""
    return checksum_reference(memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"))


def checksum_of_mapping(address: int, nbytes: int) -> int:
    """Checksum of mapped file bytes through a private copy of them.

    numpy may read with the interpreter lock held, and a page that a truncation took away would then never be
    repaired (load/guard.py); memmove runs without it.
    """
    copy = np.empty(nbytes, dtype=np.uint8)
    ctypes.memmove(copy.ctypes.data, address, nbytes)
    return checksum_reference(copy.data)
