"""From outcomes to numbers: percentiles, throughput, errors by kind; what the server says of itself. Pure."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from streamer.bench.serve_client import Outcome

PERCENTILES = (50, 90, 99)
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Group:
    """What was measured with one number of streams, or at one rate."""

    name: str  # "streams_64", "rate_8"
    label: str  # for people
    size: float  # streams, or requests a second
    outcomes: Sequence[Outcome]
    peak_in_flight: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)


def make_group(name: str, label: str, size: float, outcomes: Sequence[Outcome], peak_in_flight: int) -> Group:
    return Group(
        name,
        label,
        size,
        outcomes,
        peak_in_flight,
        summarize(outcomes),
        Counter(o.error for o in outcomes if o.error),
    )


def summarize(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Rates over the time from the first request to the last end; latencies of answered requests only.

    Inter-token times are the gaps between events with text of one answer, as they arrived: a server that puts
    several tokens into an event has fewer and longer gaps.
    """
    good = [o for o in outcomes if o.error is None]
    metrics = {"requests": float(len(outcomes)), "errors": float(len(outcomes) - len(good))}
    if not good:
        return metrics
    wall_s = max(o.end_s for o in outcomes) - min(o.start_s for o in outcomes)
    n_tokens = sum(o.n_tokens for o in good)
    metrics |= {
        "wall_s": wall_s,
        "tok_s": n_tokens / wall_s,
        "total_tok_s": (n_tokens + sum(o.n_prompt for o in good)) / wall_s,
        "requests_s": len(good) / wall_s,
        "tokens_an_event": n_tokens / max(1, sum(len(o.arrivals) for o in good)),
    }
    gaps = [np.diff(np.asarray(o.arrivals)) for o in good if len(o.arrivals) > 1]
    times = {
        "ttft": np.array([o.ttft_s for o in good]),
        "itl": np.concatenate(gaps) if gaps else np.zeros(0),
        "e2e": np.array([o.e2e_s for o in good]),
    }
    for name, values in times.items():
        if len(values):
            found = np.percentile(values, PERCENTILES)
            metrics |= {f"{name}_p{p}_ms": 1e3 * float(v) for p, v in zip(PERCENTILES, found, strict=True)}
            metrics[f"{name}_mean_ms"] = 1e3 * float(values.mean())
    return metrics


def probe_metrics(latencies: Mapping[str, Sequence[float]], failures: int) -> dict[str, float]:
    """livez_p999_ms, livez_p50_ms, livez_probes and the like."""
    metrics = {"probe_failures": float(failures)}
    for route, values in latencies.items():
        name = route.strip("/")
        metrics[f"{name}_probes"] = float(len(values))
        if values:
            p50, p999 = np.percentile(np.asarray(values), (50, 99.9))
            metrics |= {f"{name}_p50_ms": 1e3 * float(p50), f"{name}_p999_ms": 1e3 * float(p999)}
    return metrics


# ---- the server's own account ------------------------------------------------------------------------------

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read_samples(text: str) -> Samples:
    """Prometheus text by name and labels."""
    samples: Samples = {}
    for line in text.splitlines():
        if (match := _SAMPLE.match(line)) is not None:
            labels = frozenset(_LABEL.findall(match[2] or ""))
            samples[match[1], labels] = float(match[3])
    return samples


def histogram_median(before: Samples, after: Samples, name: str, **labels: str) -> float | None:
    """Median of what a histogram took in between two readings, linear within a bucket; None if nothing."""
    wanted = set(labels.items())
    counts = {
        float(dict(key)["le"]): value - before.get((found, key), 0.0)
        for (found, key), value in after.items()
        if found == f"{name}_bucket" and wanted <= key
    }
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return None
    half, low, below = counts[bounds[-1]] / 2, 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= half:
            return (
                low
                if bound == float("inf")
                else low + (bound - low) * (half - below) / (counts[bound] - below)
            )
        low, below = bound, counts[bound]
    return None


def server_metrics(before: Samples, after: Samples) -> dict[str, float]:
    """What ggufd says of the time between: medians of its steps and of their host work; weight bytes."""
    found: dict[str, float] = {}
    for metric, phase in (("host_step_ms_p50", "host"), ("decode_step_ms_p50", "decode")):
        median = histogram_median(before, after, "ggufd_step_seconds", phase=phase)
        if median is not None:
            found[metric] = 1e3 * median
    key = ("ggufd_h2d_bytes_total", frozenset({("phase", "serve"), ("kind", "weights")}))
    if key in after:
        found["weight_h2d_bytes_serve"] = after[key]
    return found
