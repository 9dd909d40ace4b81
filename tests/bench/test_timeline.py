"""The timeline picture."""

from xml.etree import ElementTree

from streamer.bench.timeline import timeline_svg
from streamer.trace import SpanRecord

SVG = "{http://www.w3.org/2000/svg}"


def test_lanes_are_rows_and_spans_are_rectangles_in_order_of_time() -> None:
    records = [
        SpanRecord("stage 0", "b", 2.0, 3.0),
        SpanRecord("touch 0", "a & <b>", 1.0, 2.0),
        SpanRecord("upload 0", "c", 3.0, 5.0, failed="DeviceError"),
    ]
    root = ElementTree.fromstring(timeline_svg(records, "title & more"))
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert texts[:4] == ["title & more", "touch 0", "stage 0", "upload 0"]
    rectangles = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    places = [float(r.attrib["x"]) for r in rectangles]
    assert places == sorted(places)
    widths = [float(r.attrib["width"]) for r in rectangles]
    assert abs(widths[2] / widths[0] - 2) < 0.01
    assert "failed: DeviceError" in (rectangles[2].find(f"{SVG}title").text or "")


def test_no_spans_make_a_picture_too() -> None:
    assert ElementTree.fromstring(timeline_svg([], "empty")) is not None
