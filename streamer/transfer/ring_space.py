"""Room in a ring, given in order and taken back in the same order. Pure."""

from collections import deque


class RingSpace:
    """Contiguous ranges of `nbytes` bytes. A range that does not fit before the end begins at 0 again."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._taken: deque[tuple[int, int]] = deque()  # (begin, end), oldest first

    def take(self, nbytes: int) -> int | None:
        """Where the next range begins; None while there is no room for it."""
        assert nbytes > 0, nbytes
        if not self._taken:
            begin, limit = 0, self.nbytes
        else:
            oldest, begin = self._taken[0][0], self._taken[-1][1]
            wraps = begin <= oldest  # the newest range lies before the oldest one
            limit = oldest if wraps else self.nbytes
            if not wraps and begin + nbytes > limit:
                begin, limit = 0, oldest
        if begin + nbytes > limit:
            return None
        self._taken.append((begin, begin + nbytes))
        return begin

    def give_back(self) -> None:
        """The oldest range is free."""
        self._taken.popleft()

    def __len__(self) -> int:
        return len(self._taken)
