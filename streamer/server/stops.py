"""Stop strings over token boundaries. Pure.

Text that may be the beginning of a stop string is held back until it is known; no byte of a stop string
leaks and no other byte is lost. The stop that is complete first wins, whatever the pieces the text came in.
"""


class StopMatcher:
    """Feed text with `push`; it returns what is safe to send. `matched` is the stop string found, if any."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max((len(s) for s in stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        pending = self._held + text
        found = self._first_complete(pending, len(self._held))
        if found is not None:
            start, self.matched = found
            self._held = ""
            return pending[:start]
        keep = self._possible_beginning(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """The end came: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, pending: str, n_old: int) -> tuple[int, str] | None:
        """(start, stop) of the match that ends first; of two that end together, the longer.

        It ends in the new text.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = pending.find(stop, max(0, n_old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _possible_beginning(self, pending: str) -> int:
        """Length of the longest end of `pending` that begins a stop string."""
        for length in range(min(self._longest - 1, len(pending)), 0, -1):
            end = pending[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
