"""Prometheus text under an own registry.

Gauges are rendered from statistics when asked; only requests count here.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from streamer.runtime.account import Snapshot

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 15, 30, 60)
GAP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 5)
ROUTES_OTHER = "other"


class Metrics:
    """The registry and the counters of the HTTP side. `snapshot` is set by the service."""

    def __init__(self, snapshot: Callable[[], Snapshot], connections: Callable[[], tuple[int, int]]) -> None:
        """`connections`: open now, and turned away so far."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_SnapshotCollector(snapshot, connections))
        self._requests = Counter(
            "ggufd_requests", "Requests answered", ["route", "code"], registry=self.registry
        )
        self._first = Histogram(
            "ggufd_time_to_first_token_seconds",
            "Arrival to first token",
            buckets=TTFT_BUCKETS,
            registry=self.registry,
        )
        self._gaps = Histogram(
            "ggufd_inter_token_seconds", "Mean time between tokens of a request", buckets=GAP_BUCKETS,
            registry=self.registry,
        )  # fmt: skip

    def count_request(self, route: str, code: int) -> None:
        self._requests.labels(route, str(code)).inc()

    def observe_times(self, ttft_ms: float, decode_ms: float, n_generated: int) -> None:
        """Of a finished sequence."""
        if n_generated > 0:
            self._first.observe(ttft_ms / 1e3)
        if n_generated > 1:
            self._gaps.observe(decode_ms / 1e3 / (n_generated - 1))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot], connections: Callable[[], tuple[int, int]]) -> None:
        self._snapshot, self._connections = snapshot, connections

    def collect(self) -> Iterable[Metric]:
        s = self._snapshot()
        yield _gauge("residency_bytes", "Weight bytes by state", ["state"], s.residency_bytes)
        yield _gauge("residency_ratio", "Resident share of planned bytes", [], {(): s.residency_ratio})
        yield _gauge("load_seconds", "From start to ready, or until now", [], {(): s.load_seconds})
        yield _gauge("load_phase_seconds", "Seconds spent in each phase", ["phase"], s.load_phase_seconds)
        yield _counter("h2d_bytes", "Bytes sent to the device", ["phase", "kind"], s.h2d_bytes)
        yield _gauge("request_queue", "Requests waiting", [], {(): s.queue})
        yield _gauge("sequences", "Sequences by state", ["state"], s.sequences)
        yield _gauge("kv_pages", "Pages of the cache by state", ["state"], s.kv_pages)
        yield _counter("prompt_tokens", "Prompt tokens processed", [], {(): s.prompt_tokens})
        yield _counter("generated_tokens", "Tokens generated", [], {(): s.generated_tokens})
        yield _counter(
            "prompt_cache_tokens", "Prompt tokens taken from the cache", [], {(): s.cached_prompt_tokens}
        )
        yield _steps(s.step_seconds)
        yield _gauge("device_bytes", "Device memory by use", ["use"], s.device_bytes)
        yield _gauge("pinned_bytes", "Page-locked host memory", [], {(): s.pinned_bytes})
        n_open, n_refused = self._connections()
        yield _gauge("connections", "Open connections", [], {(): n_open})
        yield _counter("connections_refused", "Connections turned away", [], {(): n_refused})


Values = Mapping[str, float] | Mapping[tuple[str, str], int] | Mapping[tuple[()], float]


def _labels(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _gauge(name: str, text: str, labels: list[str], values: Values) -> Metric:
    family = GaugeMetricFamily("ggufd_" + name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(_labels(key), value)
    return family


def _counter(name: str, text: str, labels: list[str], values: Values) -> Metric:
    family = CounterMetricFamily("ggufd_" + name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(_labels(key), value)
    return family


def _steps(steps: Mapping[str, tuple[Mapping[float, int], float]]) -> Metric:
    family = HistogramMetricFamily("ggufd_step_seconds", "Time of a step of the engine", labels=["phase"])
    for phase, (buckets, total) in steps.items():
        running, cumulative = 0, []
        for bound, count in sorted(buckets.items()):
            running += count
            cumulative.append(("+Inf" if bound == float("inf") else repr(bound), running))
        family.add_metric([phase], cumulative, total)
    return family
