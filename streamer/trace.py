"""Spans of work on named lanes, started -> complete or failed; export for Chrome's and Perfetto's viewers.

A lane is what does the work ("touch 0", "stage 3", "allocate", "upload 1"); a span is a piece of it. Times
are seconds of the injected clock. Memory is bounded: after `capacity` spans later ones are only counted.
"""

import errno
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A finished span. `failed` names the exception that ended it."""

    lane: str
    name: str
    start_s: float
    end_s: float
    failed: str | None = None
    details: dict[str, object] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Span(Protocol):
    """A context manager around the work."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tracer(Protocol):
    @property
    def enabled(self) -> bool:
        """False: nothing is kept, so do not prepare what is only traced."""

    @property
    def clock(self) -> Clock: ...
    def span(self, lane: str, name: str, **details: object) -> Span: ...
    def add(self, record: SpanRecord) -> None:
        """Keep a span measured elsewhere (work of a device, known only afterwards)."""


class _NullSpan:
    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


_NULL_SPAN = _NullSpan()


class NullTracer:
    """Keeps nothing; a span is one shared object."""

    enabled = False
    clock: Clock = staticmethod(time.perf_counter)

    def span(self, lane: str, name: str, **details: object) -> _NullSpan:
        return _NULL_SPAN

    def add(self, record: SpanRecord) -> None:
        return None


class _LiveSpan:
    __slots__ = ("_details", "_lane", "_name", "_start_s", "_tracer")

    def __init__(self, tracer: "RecordingTracer", lane: str, name: str, details: dict[str, object]) -> None:
        self._tracer, self._lane, self._name, self._details = tracer, lane, name, details
        self._start_s = 0.0

    def __enter__(self) -> Self:
        self._start_s = self._tracer.clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = kind.__name__ if kind is not None else None
        end_s = self._tracer.clock()
        self._tracer.add(SpanRecord(self._lane, self._name, self._start_s, end_s, failed, self._details))


class RecordingTracer:
    """Keeps spans in memory, thread-safe. A span is some 200 bytes: 200,000 of them are 40 MB."""

    enabled = True

    def __init__(self, *, clock: Clock = time.perf_counter, capacity: int = 200_000) -> None:
        self.clock = clock
        self._capacity = capacity
        self._lock = threading.Lock()
        self._records: list[SpanRecord] = []
        self._dropped = 0

    def span(self, lane: str, name: str, **details: object) -> _LiveSpan:
        return _LiveSpan(self, lane, name, details)

    def add(self, record: SpanRecord) -> None:
        with self._lock:
            if len(self._records) < self._capacity:
                self._records.append(record)
            else:
                self._dropped += 1

    @property
    def dropped(self) -> int:
        """Spans that came after the capacity was used up."""
        return self._dropped

    def records(self) -> tuple[SpanRecord, ...]:
        with self._lock:
            return tuple(self._records)

    def write(self, path: Path) -> None:
        """Write the Chrome trace. OSError as from the file system."""
        path.write_text(json.dumps(chrome_trace(self.records(), dropped=self.dropped)))


def check_writable(path: str) -> None:
    """OSError when no trace can be written there: a load is long, and whoever asked should know before it.

    What lies there stays as it is; a pipe or a device is refused, since a trace has an end.
    """
    is_new = not os.path.lexists(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
    finally:
        os.close(descriptor)
    if is_new:
        os.unlink(path)


def chrome_trace(records: Iterable[SpanRecord], *, dropped: int = 0) -> dict[str, Any]:
    """The Trace Event Format (JSON object form): complete events in microseconds, one named thread a lane."""
    ordered = sorted(records, key=lambda r: r.start_s)
    lanes = {
        lane: index for index, lane in enumerate(sorted({r.lane for r in ordered}, key=lane_order), start=1)
    }
    origin = ordered[0].start_s if ordered else 0.0
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "ggufd"}}
    ]
    for lane, index in lanes.items():
        events.append({"ph": "M", "pid": 1, "tid": index, "name": "thread_name", "args": {"name": lane}})
        events.append(
            {"ph": "M", "pid": 1, "tid": index, "name": "thread_sort_index", "args": {"sort_index": index}}
        )
    for record in ordered:
        args = dict(record.details) | ({"failed": record.failed} if record.failed else {})
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": lanes[record.lane],
                "cat": lane_kind(record.lane),
                "name": record.name,
                "ts": (record.start_s - origin) * 1e6,
                "dur": record.duration_s * 1e6,
                "args": args,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"dropped_spans": dropped}}


LANE_KINDS = ("phase", "allocate", "touch", "stage", "upload", "finish")  # top to bottom in every picture


def lane_kind(lane: str) -> str:
    """ "stage 3" -> "stage"."""
    return lane.split(" ", 1)[0]


def lane_order(lane: str) -> tuple[int, int, str]:
    """Sort key: by kind as in LANE_KINDS, then by number, then by name."""
    kind, _, rest = lane.partition(" ")
    place = LANE_KINDS.index(kind) if kind in LANE_KINDS else len(LANE_KINDS)
    return place, int(rest) if rest.isdigit() else -1, lane


NULL_TRACER = NullTracer()
