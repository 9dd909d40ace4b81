"""Text out of a stream of ids: whole characters only, and nothing of a stop string. Pure."""

import codecs
from collections.abc import Collection, Iterable, Sequence

from streamer.text.tokenizer import Tokenizer


class Detokenizer:
    """Ids in, text out. A character split over tokens comes when it is whole; nothing is invented for it.

    Bytes that cannot be UTF-8 become U+FFFD as soon as that is certain, and unfinished ones at `flush`.
    `special`: control tokens are shown by name, else only those in `shown`. `at_start`: the ids are a whole
    text, not the continuation of one, so the space before an SPM text's first word is dropped as
    `Tokenizer.decode` does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        special: bool = False,
        shown: Collection[int] = (),
        at_start: bool = False,
    ) -> None:
        self._tokenizer, self._special, self._shown = tokenizer, special, shown
        self._drop_space = at_start and tokenizer.add_space_prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is certain after this id; may be empty."""
        if not (self._special or token_id in self._shown) and self._tokenizer.is_control(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def push_all(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        """What was held back: U+FFFD for a character that was never finished."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds the first of some strings to be completed, over any cutting of the text into pieces.

    `push` gives the text that is certainly no part of a stop string, and whether one was found; nothing of
    the stop string or after it is ever given. Of two completed by the same character the longer counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in dict.fromkeys(stops) if s]
        self._failures = [_failure_table(s) for s in self._stops]
        self._matched = [0] * len(self._stops)  # how many characters of each the text ends with
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        if self.stopped is not None:
            return "", True
        if not self._stops:
            return text, False
        pending = self._held + text
        for at, character in enumerate(text, start=len(self._held)):
            found = self._step(character)
            if found is not None:
                self.stopped, self._held = found, ""
                return pending[: at + 1 - len(found)], True
        keep = len(pending) - max(self._matched)
        self._held = pending[keep:]
        return pending[:keep], False

    def flush(self) -> str:
        """The text held back, once no more can come."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _step(self, character: str) -> str | None:
        """Knuth-Morris-Pratt, one automaton a stop string."""
        found: str | None = None
        for k, stop in enumerate(self._stops):
            n = self._matched[k]
            while n and stop[n] != character:
                n = self._failures[k][n - 1]
            n += stop[n] == character
            self._matched[k] = n
            if n == len(stop) and (found is None or n > len(found)):
                found = stop
        return found


def _failure_table(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    n = 0
    for i in range(1, len(pattern)):
        while n and pattern[i] != pattern[n]:
            n = table[n - 1]
        n += pattern[i] == pattern[n]
        table[i] = n
    return table
