"""Keeps the names of control tokens that a user wrote apart from those a template writes. Pure.

A template is a program: it may trim, slice, upper-case or cut what users wrote: places cannot be remembered.
Instead every character of a user's text with which a control token's name could begin is replaced by a
private stand-in, one for one; the template carries it wherever it likes, and what it wrote itself stands out.
Templates that look into the text (for `<think>`, say) may then decide differently, so the caller also renders
a second form in which only whole names are broken by a private mark, and takes that one when both show the
same control tokens.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PRIVATE_BASES = range(0x10F000, 0x10FF00, 0x100)  # the last private-use plane


class NameFinder:
    """Finds control tokens' names in text: from left to right, the longest first."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(n for n in names if n)
        self._folded = frozenset(map(_fold, self._names))
        self._lengths = sorted({len(n) for n in self._names}, reverse=True)
        self.first_characters = "".join(sorted({n[0] for n in self._names}))
        folded_first = {_fold(c) for c in self.first_characters} | set(self.first_characters)
        self._first = _any_of(
            "".join(sorted(folded_first | {c.upper() for c in folded_first if c.isascii()}))
        )

    def find(self, text: str, *, ignore_case: bool = False) -> Iterator[tuple[int, int]]:
        """Starts and ends of the names in `text`, none overlapping another."""
        if self._first is None:
            return
        names, subject = (self._folded, _fold(text)) if ignore_case else (self._names, text)
        end = 0
        for match in self._first.finditer(text):
            start = match.start()
            if start < end:
                continue
            for length in self._lengths:
                if subject[start : start + length] in names:
                    end = start + length
                    yield start, end
                    break

    def may_begin(self, text: str) -> bool:
        return self._first is not None and self._first.search(text) is not None


@dataclass(frozen=True)
class Marks:
    """The private characters of one rendering: `stand_ins` for first characters, `mark` to break a name."""

    stand_ins: Mapping[str, str]
    mark: str

    def strict(self, value: Any) -> Any:
        """`value` with every first character of a control token's name replaced in all its strings."""
        table = str.maketrans(dict(self.stand_ins))
        return map_strings(value, lambda text: text.translate(table))

    def lenient(self, value: Any, finder: NameFinder) -> Any:
        """`value` with a mark inside every whole name of a control token, upper or lower case."""
        return map_strings(value, lambda text: self._broken(text, finder))

    def restore(self, text: str) -> str:
        """The text as the user would have it: stand-ins and marks undone."""
        table = {ord(to): original for original, to in self.stand_ins.items()}
        return text.translate({**table, ord(self.mark): None})

    def _broken(self, text: str, finder: NameFinder) -> str:
        parts, end = [], 0
        for start, stop in finder.find(text, ignore_case=True):
            parts += [text[end : start + 1], self.mark, text[start + 1 : stop]]
            end = stop
        return "".join([*parts, text[end:]]) if parts else text


def choose_marks(finder: NameFinder, value: Any) -> Marks | None:
    """Private characters that occur nowhere in `value`; None when nothing in it could begin a name."""
    strings = list(each_string(value))
    if not any(map(finder.may_begin, strings)):
        return None
    n = len(finder.first_characters)
    for base in _PRIVATE_BASES:
        used = re.compile(f"[{chr(base)}-{chr(base + n)}]")
        if n < _PRIVATE_BASES.step and not any(map(used.search, strings)):
            stand_ins = {c: chr(base + 1 + i) for i, c in enumerate(finder.first_characters)}
            return Marks(stand_ins, chr(base))
    raise ValueError("the text uses every private character")


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON-like `value` with `change` applied to all strings, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(k) if isinstance(k, str) else k: map_strings(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(v, change) for v in value]
    return value


def each_string(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from each_string(key)
            yield from each_string(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from each_string(item)


def _fold(text: str) -> str:
    folded = text.lower()
    return folded if len(folded) == len(text) else text


def _any_of(characters: str) -> re.Pattern[str] | None:
    return re.compile("[" + re.escape(characters) + "]") if characters else None
