"""The picture of a serving benchmark: an SVG with throughput above and latencies below. Pure.

Over the number of streams (or the rate) when several were measured, else over the time of the one loop.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from streamer.bench.serve_client import Outcome
from streamer.bench.serve_results import Group

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 900, 220, 80, 150, 50, 50  # pixels
COLOURS = ("#e76f51", "#457b9d", "#2a9d8f", "#b8860b", "#6a4c93", "#8d99ae")
LATENCIES = (
    ("ttft_p50_ms", "first token, p50"),
    ("ttft_p99_ms", "first token, p99"),
    ("itl_p50_ms", "gap, p50"),
    ("itl_p99_ms", "gap, p99"),
)
BINS = 60
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    label: str
    points: Sequence[Point]
    joined: bool = True


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels, evenly or by their logarithm; `marks` are the values written beside it."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    marks: Sequence[float]

    def at(self, value: float) -> float:
        low, high, value = (
            (math.log(x) for x in (self.low, self.high, max(value, self.low)))
            if self.log
            else (self.low, self.high, value)
        )
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)


def picture_svg(groups: Sequence[Group], title: str) -> str:
    """An SVG document; an empty pair of axes when nothing was answered."""
    groups = [g for g in groups if "tok_s" in g.metrics]
    parts = _over_loops(groups) if len(groups) > 1 else _over_time(groups[0].outcomes if groups else [])
    height = TOP + 2 * PANEL + 2 * GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            _text(10, 22, title, size=14),
            *parts,
            "</svg>",
            "",
        ]
    )


def _over_loops(groups: Sequence[Group]) -> list[str]:
    sizes = sorted({g.size for g in groups})
    x = Axis(sizes[0], sizes[-1], LEFT, WIDTH - RIGHT, log=True, marks=sizes)
    unit = "streams" if all(g.name.startswith("streams") for g in groups) else "streams or requests/s"
    rates = [Line("tokens/s", [(g.size, g.metrics["tok_s"]) for g in groups])]
    times = [
        Line(label, [(g.size, g.metrics[name]) for g in groups if name in g.metrics])
        for name, label in LATENCIES
    ]
    return [*_panel(0, x, rates, "tokens/s", unit, log=False), *_panel(1, x, times, "ms", unit, log=True)]


def _over_time(outcomes: Sequence[Outcome]) -> list[str]:
    good = [o for o in outcomes if o.error is None]
    start = min((o.start_s for o in good), default=0.0)
    length = max((o.end_s for o in good), default=start) - start or 1.0
    x = Axis(0.0, length, LEFT, WIDTH - RIGHT, log=False, marks=_even_marks(length))
    arrivals = np.concatenate([np.asarray(o.arrivals) for o in good]) - start if good else np.zeros(0)
    share = sum(o.n_tokens for o in good) / max(1, len(arrivals))  # tokens an event
    counts, edges = np.histogram(arrivals, BINS, (0.0, length))
    rate = [
        (float(e + length / BINS / 2), float(c * share * BINS / length))
        for e, c in zip(edges, counts, strict=False)
        if good
    ]
    times = [
        Line("first token", [(o.start_s - start, 1e3 * o.ttft_s) for o in good], joined=False),
        Line("whole answer", [(o.start_s - start, 1e3 * o.e2e_s) for o in good], joined=False),
    ]
    return [
        *_panel(0, x, [Line("tokens/s", rate)], "tokens/s", "seconds", log=False),
        *_panel(1, x, times, "ms", "seconds, by the request's start", log=True),
    ]


def _panel(row: int, x: Axis, lines: Sequence[Line], unit: str, x_unit: str, *, log: bool) -> list[str]:
    """Axes, marks, lines and their legend."""
    top = TOP + row * (PANEL + GAP)
    y = _y_axis([v for line in lines for _, v in line.points], top, log)
    parts = [
        _text(LEFT - 8, top - 8, unit, anchor="end"),
        _text(WIDTH - RIGHT, top + PANEL + 30, x_unit, anchor="end"),
    ]
    for mark in x.marks:
        at = x.at(mark)
        parts.append(f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{top + PANEL}" stroke="#eeeeee"/>')
        parts.append(_text(at, top + PANEL + 15, f"{mark:g}", anchor="middle", fill="#555555"))
    for mark in y.marks:
        at = y.at(mark)
        parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#eeeeee"/>')
        parts.append(_text(LEFT - 8, at + 4, f"{mark:,g}", anchor="end", fill="#555555"))
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        parts += _drawn(line, x, y, colour)
        parts.append(
            f'<rect x="{WIDTH - RIGHT + 12}" y="{top + 16 * number}" width="10" height="10" fill="{colour}"/>'
        )
        parts.append(_text(WIDTH - RIGHT + 28, top + 16 * number + 9, line.label))
    return parts


def _drawn(line: Line, x: Axis, y: Axis, colour: str) -> list[str]:
    places = [(x.at(a), y.at(b), a, b) for a, b in line.points]
    parts = [
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{3 if line.joined else 2}" fill="{colour}">'
        f"<title>{escape(f'{line.label}: {b:.4g} at {a:.4g}')}</title></circle>"
        for px, py, a, b in places
    ]
    if line.joined and len(places) > 1:
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in places)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return parts


def _y_axis(values: Sequence[float], top: float, log: bool) -> Axis:
    high = max(values, default=1.0) or 1.0
    if not log:
        marks = _even_marks(high)
        return Axis(0.0, max(high, marks[-1]), top + PANEL, top, log=False, marks=marks)
    low = max(min(values, default=1.0), high * 1e-6, 1e-6)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [10.0**p for p in powers]
    if len(marks) < 2:
        marks.append(marks[0] * 10)
    return Axis(marks[0], marks[-1], top + PANEL, top, log=True, marks=marks)


def _even_marks(high: float) -> list[float]:
    """Round values from zero up to `high`, four to ten of them."""
    magnitude = 10.0 ** math.floor(math.log10(high))
    step = next(s for s in (0.1 * magnitude, 0.2 * magnitude, 0.5 * magnitude, magnitude) if high / s <= 10)
    return [round(i * step, 9) for i in range(int(high / step) + 1)]


def _text(
    x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", fill: str = "#111111"
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.0f}" {style}>{escape(text)}</text>'
