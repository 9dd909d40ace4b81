"""How many prefill rows a step may carry so that running streams do not notice. Pure; learns from step times.

Model: a step of decode rows alone takes `base` (it reads the weights once, whatever the batch); one with r
prefill rows takes `fixed + cost * r`. Both are learnt: on one device `fixed` is `base`, on another a step
with prefill rows has costs of its own (launches that no graph holds). While streams decode, a step may last
`slack` x base; with many short prompts waiting longer, because then first tokens are what people wait for.
Where `fixed` alone breaks that promise, rows for half as much again are granted: the step is paid for anyway.

Where decode and prefill steps alternate, a stream waits for one of each: up to (1 + slack) x base.
"""

SHORT_PROMPT = 512  # rows: prompts of at most this length count one each, all longer ones together as one
CROWD = 8  # the most times the promise that short prompts may stretch a step by
SMOOTHING = 0.2
OUTLIER = 1.5  # times what was expected: what is beyond was a page fault or a noisy neighbour, and is cut
MEMORY = 0.98  # weight of a prefill step's time after one more of them
SPREAD = 0.15  # relative deviation of row counts that is kept up, so that there is a slope to see
DOUBT = 0.03  # relative deviation at which the slope seen and the one expected count alike


class Pacer:
    def __init__(self, *, slack: float, min_rows: int, max_rows: int) -> None:
        """`slack` > 1; `min_rows` are granted whatever the clock says, so that prefill always advances."""
        self._slack, self._min_rows, self._max_rows = slack, min_rows, max_rows
        self._line = _Line()
        self._base_is_a_guess = True
        self.base_s: float | None = None

    def observe(self, n_decode: int, n_prefill: int, duration_s: float) -> None:
        """A step with so many rows of each kind kept the device busy for `duration_s`."""
        duration_s = max(duration_s, 1e-9)  # a coarse clock may not have moved
        if n_prefill:
            if n_decode and self._base_is_a_guess and n_prefill <= self._min_rows:
                self.base_s = duration_s  # nearly a decode step
            if self.base_s is not None:
                self._line.add(n_prefill, duration_s, self.base_s)
            else:
                self._line.add(n_prefill, duration_s, duration_s)
        elif self.base_s is None or self._base_is_a_guess:
            self.base_s, self._base_is_a_guess = duration_s, False
        else:
            self.base_s += SMOOTHING * (min(duration_s, OUTLIER * self.base_s) - self.base_s)

    def prefill_rows(self, n_decode: int, n_short: int) -> int:
        """Rows for prefill beside `n_decode` rows in the next step; `n_short`: short prompts not done."""
        if not n_decode:
            return self._max_rows
        if self.base_s is None or not self._line.is_known:
            return self._min_rows
        fixed_s, cost_s = self._line.fit(self.base_s)
        allowed_s = self.base_s * (1.0 + (self._slack - 1.0) * max(1, min(n_short, CROWD)))
        rows = max(allowed_s - fixed_s, 0.5 * fixed_s) / cost_s
        granted = max(self._min_rows, min(self._max_rows, int(rows)))
        # now and then a smaller step, or the slope would be lost
        return granted if self._line.is_spread else max(1, granted // 2)


class _Line:
    """seconds = fixed + cost * rows by least squares; old steps fade, a slope of few rows is doubted."""

    def __init__(self) -> None:
        self._n = self._r = self._d = self._rr = self._rd = 0.0

    @property
    def is_known(self) -> bool:
        return self._n > 0.0

    @property
    def is_spread(self) -> bool:
        return self._variance() > (SPREAD * self._r / self._n) ** 2

    def _variance(self) -> float:
        return max(0.0, self._rr / self._n - (self._r / self._n) ** 2)

    def add(self, rows: int, seconds: float, base_s: float) -> None:
        if self.is_known:
            fixed_s, cost_s = self.fit(base_s)
            seconds = min(seconds, OUTLIER * (fixed_s + cost_s * rows))
        self._n = MEMORY * self._n + 1.0
        self._r = MEMORY * self._r + rows
        self._d = MEMORY * self._d + seconds
        self._rr = MEMORY * self._rr + rows * rows
        self._rd = MEMORY * self._rd + rows * seconds

    def fit(self, base_s: float) -> tuple[float, float]:
        """(fixed, cost of a row) in seconds, cost > 0. `fixed` is taken for `base_s` without evidence."""
        rows, seconds = self._r / self._n, self._d / self._n
        expected_s = max(seconds - base_s, 1e-3 * seconds) / rows  # of a row, if `fixed` were `base_s`
        doubt = (DOUBT * rows) ** 2
        covariance = self._rd / self._n - rows * seconds
        cost_s = (covariance + doubt * expected_s) / (self._variance() + doubt)
        cost_s = min(max(cost_s, 0.1 * expected_s), seconds / rows)
        return max(0.0, seconds - cost_s * rows), cost_s
