"""Upload lanes of the trace: what can be known of copies from outside the device."""

import threading

from streamer.trace import SpanRecord, Tracer
from streamer.transfer.base import Move


class UploadTimings:
    """When each copy was queued and seen completed, for the trace. Told of copies only where one is made."""

    def __init__(self, tracer: Tracer, streams: int) -> None:
        self._tracer = tracer
        self._lock = threading.Lock()
        self._queued: dict[tuple[int, int], tuple[int, float]] = {}  # (weight, offset) -> (stream, time)
        self._copies: list[list[tuple[float, float, str, int]]] = [[] for _ in range(streams)]

    def submitted(self, move: Move, stream: int) -> None:
        with self._lock:
            self._queued[move.chunk.weight, move.chunk.offset] = stream, self._tracer.clock()

    def completed(self, move: Move) -> None:
        with self._lock:
            stream, queued_s = self._queued.pop((move.chunk.weight, move.chunk.offset))
            copy = (queued_s, self._tracer.clock(), str(move.chunk.weight), move.chunk.nbytes)
            self._copies[stream].append(copy)

    def export(self) -> None:
        """Add the upload lanes to the trace; after the load."""
        for stream, copies in enumerate(self._copies):
            for record in fifo_spans(f"upload {stream}", copies):
                self._tracer.add(record)


def fifo_spans(lane: str, copies: list[tuple[float, float, str, int]]) -> list[SpanRecord]:
    """Copies of one first-in-first-out stream, (queued, seen completed, name, nbytes), as disjoint spans.

    A copy ended at the latest when any later one was seen completed; it began when queued or when the one
    before it ended. Times between are not known from outside the device.
    """
    ordered = sorted(copies)
    ends: list[float] = []
    seen = float("inf")
    for copy in reversed(ordered):
        seen = min(seen, copy[1])
        ends.append(seen)
    ends.reverse()
    spans = []
    previous = float("-inf")
    for (queued_s, _, name, nbytes), end_s in zip(ordered, ends, strict=True):
        start_s = max(queued_s, previous)
        previous = max(start_s, end_s)
        spans.append(SpanRecord(lane, name, start_s, previous, details={"nbytes": nbytes}))
    return spans
