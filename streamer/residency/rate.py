"""The rate of progress, smoothed over a short window. Not thread-safe: the ledger's lock guards it."""

from collections import deque

WINDOW_S = 2.0
SPACING_S = 0.02  # samples closer than this replace each other: at most WINDOW_S / SPACING_S + 2 are held


class Rate:
    """Samples of (time, bytes so far)."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None

    def start(self, now_s: float, nbytes: int) -> None:
        self._first = self._last = (now_s, nbytes)
        self._samples.append(self._first)

    def add(self, now_s: float, nbytes: int) -> None:
        self._last = (now_s, nbytes)
        if not self._samples or now_s - self._samples[-1][0] >= SPACING_S:
            self._samples.append(self._last)
        while len(self._samples) > 1 and now_s - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()

    def recent(self, now_s: float) -> float:
        """Bytes a second over the window that ends now: a stall lowers it."""
        if self._last is None or not self._samples:
            return 0.0
        begin_s, begin = self._samples[0]
        for at_s, nbytes in self._samples:  # the newest sample that is at least a window old
            if now_s - at_s < WINDOW_S:
                break
            begin_s, begin = at_s, nbytes
        return (self._last[1] - begin) / (now_s - begin_s) if now_s > begin_s else 0.0

    def average(self) -> float:
        """Bytes a second from the start to the last progress."""
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return 0.0
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
