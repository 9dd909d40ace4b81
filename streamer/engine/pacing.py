"""How many prefill rows a step may carry so that running streams do not notice. Pure; learns from step times.

Model: a step takes `base` (decode rows alone: it reads the weights once, whatever the batch) plus `row_cost`
for each prefill row. While streams decode, a step may last `slack` x base; with many short prompts waiting it
may last longer, because then first tokens are what people wait for. A step of prefill alone costs a `base` of
its own, so that where steps alternate a stream's token can come (1 + slack) x base after the last one.
"""

SHORT_PROMPT = 512  # rows: prompts of at most this length count one each, all longer ones together as one
CROWD = 8  # the most times `base` that short prompts may stretch a step by
SMOOTHING = 0.2


class Pacer:
    def __init__(self, *, slack: float, min_rows: int, max_rows: int) -> None:
        """`slack` > 1; `min_rows` are granted whatever the clock says, so that prefill always advances."""
        self._slack, self._min_rows, self._max_rows = slack, min_rows, max_rows
        self.base_s: float | None = None
        self.row_cost_s: float | None = None

    def observe(self, n_decode: int, n_prefill: int, duration_s: float) -> None:
        """A step with so many rows of each kind kept the device busy for `duration_s`."""
        if not n_prefill:
            self.base_s = _smooth(self.base_s, duration_s)
        elif n_decode and self.base_s is None:
            if n_prefill <= self._min_rows:  # nearly a decode step
                self.base_s = duration_s
        else:
            beyond_s = max(0.0, duration_s - self.base_s) if self.base_s is not None else duration_s
            self.row_cost_s = _smooth(self.row_cost_s, beyond_s / n_prefill)

    def prefill_rows(self, n_decode: int, n_short: int) -> int:
        """Rows for prefill beside `n_decode` rows in the next step; `n_short`: short prompts not done."""
        if not n_decode:
            return self._max_rows
        if self.base_s is None or self.row_cost_s is None:
            return self._min_rows
        stretch = (self._slack - 1.0) * max(1, min(n_short, CROWD))
        rows = stretch * self.base_s / max(self.row_cost_s, 1e-9)
        return max(self._min_rows, min(self._max_rows, int(rows)))


def _smooth(old: float | None, new: float) -> float:
    """Moving average; one outlier (a page fault, a noisy neighbour) moves it by little."""
    if old is None:
        return new
    return old + SMOOTHING * (min(new, 4.0 * old) - old)
