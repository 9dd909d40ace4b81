"""The landing area: planned device memory where a weight's file bytes wait for their rearrangement.

Space is given in a ring, execution order. It is given again only behind the previous user's rearrangement:
the upload streams wait for its event on the device; the host waits only until that event exists.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from streamer.device.base import Buffer, Event, Stream
from streamer.errors import DeviceError, ResidencyError
from streamer.load.blame import name_weight
from streamer.load.channel import Aborted
from streamer.plan.plan import PlannedWeight

ALIGNMENT = 256


class Finisher(Protocol):
    """Brings file bytes into the plan's layout on the device (planes, dequantization). The caller's."""

    @property
    def landing_nbytes(self) -> int:
        """Size of the landing area: at least the largest weight that lands; the plan has counted it."""

    def finish(
        self,
        weight: PlannedWeight,
        source: Buffer,
        source_offset: int,
        target: Buffer,
        target_offset: int,
        *,
        stream: Stream,
    ) -> None:
        """Queue the rearrangement of `source[source_offset:]` (file bytes) to `target[target_offset:]`."""


@dataclass
class _Region:
    begin: int
    end: int
    weight: int
    event: Event | None = None  # after the rearrangement; None: not queued yet


class Landing:
    """A ring over one buffer. The allocating thread calls `reserve`, the settling thread `finished`."""

    def __init__(self, buffer: Buffer, streams: Sequence[Stream]) -> None:
        self.buffer = buffer
        self._streams = streams
        self._regions: deque[_Region] = deque()  # oldest first
        self._cursor = 0
        self._changed = threading.Condition()
        self._aborted = False

    def reserve(self, weight: PlannedWeight) -> int:
        """Offset of room for the weight's file bytes. ResidencyError if larger than the area; Aborted."""
        nbytes = -(-weight.tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if nbytes > self.buffer.nbytes:
            raise ResidencyError(
                f"{weight.name}: {nbytes} bytes do not fit the landing area of {self.buffer.nbytes} bytes"
            )
        begin = self._cursor if self._cursor + nbytes <= self.buffer.nbytes else 0
        end = begin + nbytes
        try:
            while (region := self._oldest_within(begin, end)) is not None:
                self._follow(region)
        except DeviceError as error:
            raise name_weight(error, weight, "") from error
        with self._changed:
            self._regions.append(_Region(begin, end, weight.index))
        self._cursor = end
        return begin

    def finished(self, weight: int, event: Event) -> None:
        """The weight's rearrangement is queued; `event` follows it."""
        with self._changed:
            next(region for region in self._regions if region.weight == weight).event = event
            self._changed.notify_all()

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def _oldest_within(self, begin: int, end: int) -> _Region | None:
        with self._changed:
            return next((r for r in self._regions if r.begin < end and begin < r.end), None)

    def _follow(self, region: _Region) -> None:
        """Later uploads start after the region's event; then its space is free to give."""
        with self._changed:
            while region.event is None and not self._aborted:
                self._changed.wait()
            if region.event is None:
                raise Aborted
            self._regions.remove(region)
        for stream in self._streams:
            stream.wait(region.event)
