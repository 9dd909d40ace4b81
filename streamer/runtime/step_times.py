"""How long steps take, as histograms for /metrics. Written by the engine's thread, read by any."""

from bisect import bisect_left

# fine below a millisecond, where the host's own share of a step lies
BOUNDS_S = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, float("inf")),
)


class StepTimes:
    """By phase of the step: counts in BOUNDS_S and the sum. Readers may see numbers a step apart."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, phase: str, seconds: float) -> None:
        counts = self._counts.setdefault(phase, [0] * len(BOUNDS_S))
        counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sums[phase] = self._sums.get(phase, 0.0) + seconds

    def statistics(self) -> dict[str, tuple[dict[float, int], float]]:
        """phase -> ({upper bound: steps in this bucket}, seconds in all)."""
        return {
            phase: (dict(zip(BOUNDS_S, counts, strict=True)), self._sums.get(phase, 0.0))
            for phase, counts in list(self._counts.items())
        }
