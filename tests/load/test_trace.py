"""Spans, their bound, their Chrome form, and the upload lanes made from what the host saw."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from pipeline_support import CHUNK, STRATEGIES, Piece, build, make_transfer, run_load

from streamer.device.host import HostDevice
from streamer.load.timings import fifo_spans
from streamer.trace import NULL_TRACER, RecordingTracer, SpanRecord, check_writable, chrome_trace, lane_order


class Clock:
    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_a_span_is_complete_or_failed() -> None:
    tracer = RecordingTracer(clock=Clock())
    with tracer.span("stage 0", "good", nbytes=7):
        pass
    with pytest.raises(KeyError), tracer.span("stage 0", "bad"):
        raise KeyError
    good, bad = tracer.records()
    assert good == SpanRecord("stage 0", "good", 6.0, 7.0, None, {"nbytes": 7})
    assert (bad.name, bad.failed, bad.duration_s) == ("bad", "KeyError", 1.0)


def test_memory_is_bounded_and_what_is_lost_is_counted() -> None:
    tracer = RecordingTracer(clock=Clock(), capacity=3)
    for i in range(10):
        with tracer.span("a", str(i)):
            pass
    assert [r.name for r in tracer.records()] == ["0", "1", "2"]
    assert tracer.dropped == 7
    assert chrome_trace(tracer.records(), dropped=tracer.dropped)["otherData"] == {"dropped_spans": 7}


def test_the_null_tracer_hands_out_one_object() -> None:
    assert NULL_TRACER.span("a", "b", x=1) is NULL_TRACER.span("c", "d")
    assert not NULL_TRACER.enabled
    with NULL_TRACER.span("a", "b"):
        pass


def test_chrome_form_has_named_lanes_in_order_and_microseconds(tmp_path) -> None:
    tracer = RecordingTracer(clock=Clock())
    for lane in ("upload 0", "touch 10", "touch 2", "allocate"):
        with tracer.span(lane, "x"):
            pass
    tracer.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["allocate", "touch 2", "touch 10", "upload 0"]
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in spans] == [(0.0, 1e6), (2e6, 1e6), (4e6, 1e6), (6e6, 1e6)]
    assert {e["tid"] for e in spans} == {1, 2, 3, 4}


def test_lanes_sort_by_stage_then_number() -> None:
    lanes = ["upload 1", "stage 10", "stage 9", "touch 0", "other", "phase"]
    assert sorted(lanes, key=lane_order) == ["phase", "touch 0", "stage 9", "stage 10", "upload 1", "other"]


def test_copies_of_a_stream_become_spans_without_overlap() -> None:
    """Seen completed late and out of order, but the stream is first-in-first-out."""
    copies = [(0.0, 5.0, "a", 1), (1.0, 3.0, "b", 1), (4.0, 6.0, "c", 1)]
    spans = fifo_spans("upload 0", copies)
    assert [(s.name, s.start_s, s.end_s) for s in spans] == [
        ("a", 0.0, 3.0),
        ("b", 3.0, 3.0),
        ("c", 4.0, 6.0),
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_load_leaves_its_lanes(tmp_path, strategy: str) -> None:
    model = build(tmp_path, [Piece(3 * CHUNK, layer=i) for i in range(4)])
    device, tracer = HostDevice(), RecordingTracer()
    run_load(model, device, make_transfer(strategy, device), tracer=tracer, verify=True)
    kinds = {record.lane.split(" ")[0] for record in tracer.records()}
    assert kinds == {"allocate", "touch", "stage", "upload", "finish"}
    uploads = [r for r in tracer.records() if r.lane == "upload 0"]
    assert sum(int(str(r.details["nbytes"])) for r in uploads) == model.plan.nbytes
    for before, after in pairwise(uploads):
        assert after.start_s >= before.end_s
    device.close()


def test_a_place_is_tried_before_the_load_and_left_as_it_was(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").write_text("kept")
    check_writable(str(tmp_path / "old"))
    assert (tmp_path / "old").read_text() == "kept"
    for place in (tmp_path, tmp_path / "nowhere" / "x", "/dev/null"):
        with pytest.raises(OSError, match=r"directory|regular"):
            check_writable(str(place))
