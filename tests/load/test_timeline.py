"""The picture of a load: totals, merged bars, failures."""

from xml.etree import ElementTree

from pipeline_support import CHUNK, Piece, build, make_transfer, run_load

from streamer.bench.timeline import merge, timeline_svg
from streamer.device.host import HostDevice
from streamer.trace import RecordingTracer, SpanRecord

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_each_lane_shows_its_busy_time_and_share() -> None:
    records = [SpanRecord("stage 0", "a", 0.0, 1.0), SpanRecord("upload 0", "b", 1.0, 4.0)]
    found = texts(timeline_svg(records, "t"))
    assert "1 s, 25%, 1 spans" in found
    assert "3 s, 75%, 1 spans" in found
    assert "end 4 s" in found
    assert any(text.startswith("stage: ") for text in found)


def test_close_spans_become_one_bar_and_failed_ones_stay_alone() -> None:
    spans = [
        SpanRecord("a", "1", 0.0, 1.0),
        SpanRecord("a", "2", 1.01, 2.0),
        SpanRecord("a", "3", 2.0, 2.5, failed="OSError"),
        SpanRecord("a", "4", 2.5, 3.0),
        SpanRecord("a", "5", 9.0, 9.5),
    ]
    bars = merge(spans, 0.1)
    assert [(bar.count, bar.failed) for bar in bars] == [(2, None), (1, "OSError"), (1, None), (1, None)]
    assert round(bars[0].busy_s, 6) == 1.99


def test_a_real_load_is_drawn_small(tmp_path) -> None:
    model = build(tmp_path, [Piece(50 * CHUNK, layer=i) for i in range(10)], chunk_nbytes=CHUNK)
    device, tracer = HostDevice(), RecordingTracer()
    run_load(model, device, make_transfer("ring", device), tracer=tracer, verify=True)
    svg = timeline_svg(tracer.records(), "a load")
    found = texts(svg)
    assert {"allocate", "touch 0", "stage 0", "upload 0", "finish"} <= set(found)
    assert len(svg) < 400_000
    device.close()
