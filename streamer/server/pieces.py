"""From token events to text: detokenize, match stop strings, pair text with log-probabilities.

Pure; one a sequence.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from streamer.engine.request import TokenEvent, TokenLogprobs
from streamer.server.api.results import Entry, Ranked
from streamer.text.detokenizer import StopMatcher


class Detokenizing(Protocol):
    """text/detokenizer.py: whole characters only; `flush` gives what is left."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class Vocabulary(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True)
class Piece:
    """Text that may be sent now, with the entries of the tokens it came from (empty when none were asked
    for).
    """

    text: str = ""
    entries: tuple[Entry, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.entries)


def make_entry(vocabulary: Vocabulary, token_id: int, logprobs: TokenLogprobs | None, offset: int) -> Entry:
    """None: the first id of an echoed prompt has no log-probability."""
    raw = vocabulary.token_bytes(token_id)
    if logprobs is None:
        return Entry(token_id, raw.decode("utf-8", "replace"), raw, None, (), offset)
    top = []
    for ranked_id, logprob in logprobs.top:
        ranked = vocabulary.token_bytes(ranked_id)
        top.append(Ranked(ranked_id, ranked.decode("utf-8", "replace"), ranked, logprob))
    return Entry(token_id, raw.decode("utf-8", "replace"), raw, logprobs.logprob, tuple(top), offset)


@dataclass
class TokenText:
    """One sequence's text as it grows. After `stopped` is set nothing more comes out."""

    detokenizer: Detokenizing
    vocabulary: Vocabulary
    stops: StopMatcher
    with_logprobs: bool
    n_before: int = 0  # characters of an echoed prompt
    n_tokens: int = 0  # up to the one that completed a stop string
    n_decoded: int = 0  # characters that came out of the detokenizer
    n_sent: int = 0  # characters given out as pieces
    _waiting: list[tuple[int, Entry]] = field(
        default_factory=list
    )  # (first character of the token's text, entry)

    @property
    def stopped(self) -> str | None:
        return self.stops.stopped

    def push(self, events: Iterable[TokenEvent]) -> Piece:
        """Several tokens at once, when several have come. Ids after a stop string are ignored."""
        text = []
        for event in events:
            if self.stops.stopped is not None:
                break
            self.n_tokens += 1
            if self.with_logprobs:
                offset = self.n_before + self.n_decoded
                entry = make_entry(self.vocabulary, event.token_id, event.logprobs, offset)
                self._waiting.append((self.n_decoded, entry))
            decoded = self.detokenizer.push(event.token_id)
            self.n_decoded += len(decoded)
            text.append(self.stops.push(decoded)[0])
        return self._piece("".join(text), last=False)

    def finish(self) -> Piece:
        """The sequence ended: an incomplete character and a held beginning of a stop string come out."""
        if self.stops.stopped is not None:
            return Piece()
        decoded = self.detokenizer.flush()
        self.n_decoded += len(decoded)
        text, is_stopped = self.stops.push(decoded)
        if not is_stopped:
            text += self.stops.flush()
        return self._piece(text, last=not is_stopped)

    def _piece(self, text: str, *, last: bool) -> Piece:
        """Entries whose text begins in what has been given out by now; all of them at the end."""
        self.n_sent += len(text)
        ready = 0
        while ready < len(self._waiting) and (last or self._waiting[ready][0] < self.n_sent):
            ready += 1
        entries = tuple(entry for _, entry in self._waiting[:ready])
        del self._waiting[:ready]
        return Piece(text, entries)
