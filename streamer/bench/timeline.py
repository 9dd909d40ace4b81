"""The timeline picture of a load: an SVG with one row a lane, from the tracer's spans. Pure."""

from collections.abc import Iterable
from html import escape

from streamer.trace import SpanRecord, lane_kind, lane_order

WIDTH, LEFT, ROW, TOP, BOTTOM = 1100, 130, 18, 28, 24  # pixels
MAX_RECTANGLES = 20_000  # a browser still scrolls
_COLOURS = {
    "phase": "#8d99ae",
    "allocate": "#b8860b",
    "touch": "#2a9d8f",
    "stage": "#457b9d",
    "upload": "#e76f51",
    "finish": "#6a4c93",
}


def timeline_svg(records: Iterable[SpanRecord], title: str) -> str:
    """An SVG document: time to the right, lanes downwards; a span's name and length show under the mouse."""
    spans = sorted(records, key=lambda r: r.start_s)[:MAX_RECTANGLES]
    lanes = sorted({span.lane for span in spans}, key=lane_order)
    origin = spans[0].start_s if spans else 0.0
    length = max((span.end_s for span in spans), default=origin) - origin or 1.0
    scale = (WIDTH - LEFT - 10) / length  # pixels a second
    height = TOP + ROW * len(lanes) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="17" font-size="13">{escape(title)}</text>',
    ]
    for row, lane in enumerate(lanes):
        parts.append(f'<text x="8" y="{TOP + row * ROW + 13}">{escape(lane)}</text>')
    rows = {lane: row for row, lane in enumerate(lanes)}
    parts += [_rectangle(span, rows[span.lane], origin, scale) for span in spans]
    parts += _axis(length, scale, height)
    return "\n".join([*parts, "</svg>", ""])


def _rectangle(span: SpanRecord, row: int, origin: float, scale: float) -> str:
    x = LEFT + (span.start_s - origin) * scale
    width = max(span.duration_s * scale, 0.4)
    colour = "#d00000" if span.failed else _COLOURS.get(lane_kind(span.lane), "#adb5bd")
    label = f"{span.name} {span.duration_s * 1e3:.2f} ms" + (f" failed: {span.failed}" if span.failed else "")
    return (
        f'<rect x="{x:.1f}" y="{TOP + row * ROW + 2}" width="{width:.1f}" height="{ROW - 5}" fill="{colour}">'
        f"<title>{escape(label)}</title></rect>"
    )


def _axis(length: float, scale: float, height: int) -> list[str]:
    """Six marks at even times."""
    marks = []
    for i in range(6):
        x = LEFT + length * scale * i / 5
        marks.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{height - BOTTOM}" stroke="#dddddd"/>')
        text = f"{length * i / 5 * 1e3:.0f} ms"
        anchor = "end" if i == 5 else "middle"
        marks.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="{anchor}">{text}</text>')
    return marks
