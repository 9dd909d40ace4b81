"""The timeline picture of a load: an SVG with one row a lane, from the tracer's spans. Pure.

Lanes go downwards by stage, time to the right; beside each lane its busy seconds and their share of the
whole, below a legend with what each stage does. Neighbouring spans closer than half a pixel are drawn as one,
so that a load of ten thousand chunks stays a small file.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from streamer.trace import SpanRecord, lane_kind, lane_order

WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 1200, 100, 190, 18, 54, 64  # pixels
STAGES = {
    "phase": ("#8d99ae", "phase of the start"),
    "allocate": ("#b8860b", "device memory is taken, one segment ahead"),
    "touch": ("#2a9d8f", "pages are faulted in"),
    "stage": ("#457b9d", "bytes are copied to pinned memory, or registered"),
    "upload": ("#e76f51", "host to device"),
    "finish": ("#6a4c93", "proofs and layout changes are waited for"),
}
OTHER, FAILED = ("#adb5bd", "other work"), "#d00000"
STEPS_S = tuple(m * 10.0**e for e in range(-6, 4) for m in (1, 2, 5))


@dataclass(frozen=True)
class Bar:
    """Spans of a lane drawn as one rectangle."""

    start_s: float
    end_s: float
    busy_s: float
    count: int
    name: str  # of the first
    failed: str | None


def timeline_svg(records: Iterable[SpanRecord], title: str) -> str:
    """An SVG document. A span's name and duration show under the mouse."""
    spans = sorted(records, key=lambda r: r.start_s)
    origin = spans[0].start_s if spans else 0.0
    length = max((span.end_s for span in spans), default=origin) - origin or 1e-6
    scale = (WIDTH - LEFT - RIGHT) / length  # pixels a second
    lanes = sorted({span.lane for span in spans}, key=lane_order)
    bottom = TOP + ROW * len(lanes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + BOTTOM}" '
        f'viewBox="0 0 {WIDTH} {bottom + BOTTOM}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(10, 20, title, size=14),
        *(_text(10, TOP + row * ROW + 13, lane) for row, lane in enumerate(lanes)),
        _text(WIDTH - RIGHT + 12, TOP - 8, "busy, share of the whole", fill="#555555"),
        *_axis(length, scale, bottom),
    ]
    for row, lane in enumerate(lanes):
        parts += _lane(
            lane, [span for span in spans if span.lane == lane], TOP + row * ROW, origin, scale, length
        )
    parts += _legend(lanes, bottom + 44)
    return "\n".join([*parts, "</svg>", ""])


def merge(spans: Sequence[SpanRecord], gap_s: float) -> list[Bar]:
    """Spans in order of their start as bars: gaps under `gap_s` vanish; failed spans stay alone."""
    bars: list[Bar] = []
    for span in spans:
        last = bars[-1] if bars else None
        if last and not last.failed and not span.failed and span.start_s - last.end_s < gap_s:
            end_s = max(last.end_s, span.end_s)
            busy_s = last.busy_s + span.duration_s
            bars[-1] = Bar(last.start_s, end_s, busy_s, last.count + 1, last.name, None)
        else:
            bars.append(Bar(span.start_s, span.end_s, span.duration_s, 1, span.name, span.failed))
    return bars


def _lane(
    lane: str, spans: Sequence[SpanRecord], top: int, origin: float, scale: float, length: float
) -> list[str]:
    """The lane's bars and its total."""
    colour = STAGES.get(lane_kind(lane), OTHER)[0]
    busy_s = sum(span.duration_s for span in spans)
    parts = []
    for bar in merge(spans, 0.5 / scale):
        x, width = LEFT + (bar.start_s - origin) * scale, max((bar.end_s - bar.start_s) * scale, 0.5)
        label = bar.name if bar.count == 1 else f"{bar.count} spans from {bar.name}"
        label += f", {_seconds(bar.busy_s)}" + (f", failed: {bar.failed}" if bar.failed else "")
        parts.append(
            f'<rect x="{x:.1f}" y="{top + 3}" width="{width:.1f}" height="{ROW - 6}" '
            f'fill="{FAILED if bar.failed else colour}"><title>{escape(label)}</title></rect>'
        )
    total = f"{_seconds(busy_s)}, {busy_s / length:.0%}, {len(spans)} spans"
    parts.append(_text(WIDTH - RIGHT + 12, top + 13, total, fill="#555555"))
    return parts


def _axis(length: float, scale: float, bottom: int) -> list[str]:
    """Lines at round times, four to ten of them."""
    step = next((s for s in STEPS_S if length / s <= 10), length)
    marks = []
    for i in range(int(length / step) + 1):
        x = LEFT + i * step * scale
        marks.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>')
        marks.append(_text(x, bottom + 14, _seconds(i * step), anchor="middle", fill="#555555"))
    end = LEFT + length * scale
    marks.append(f'<line x1="{end:.1f}" y1="{TOP}" x2="{end:.1f}" y2="{bottom}" stroke="#888888"/>')
    marks.append(_text(end, TOP - 8, f"end {_seconds(length)}", anchor="end", fill="#555555"))
    return marks


def _legend(lanes: Sequence[str], top: int) -> list[str]:
    """A colour and a sentence for each stage that is there, in rows of three."""
    kinds = list(dict.fromkeys(lane_kind(lane) for lane in lanes))
    parts = []
    for i, kind in enumerate(kinds):
        colour, meaning = STAGES.get(kind, OTHER)
        x, y = 10 + (i % 3) * 390, top + (i // 3) * 16 - 9
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 16, y + 9, f"{kind}: {meaning}"))
    return parts


def _text(
    x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", fill: str = "#111111"
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.0f}" {style}>{escape(text)}</text>'


def _seconds(seconds: float) -> str:
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
