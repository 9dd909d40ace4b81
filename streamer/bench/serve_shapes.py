"""What a load generator asks for: lengths of prompts and answers, drawn from distributions. Pure and seeded.

Request i is a function of the seed and i alone, whoever sends it and whenever.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

WORDS = (
    "time",
    "water",
    "light",
    "house",
    "paper",
    "music",
    "river",
    "stone",
    "bread",
    "night",
    "garden",
    "road",
)


class Lengths(Protocol):
    """A distribution of token counts, at least 1."""

    def draw(self, rng: np.random.Generator) -> int: ...


@dataclass(frozen=True)
class Fixed:
    n: int

    def draw(self, rng: np.random.Generator) -> int:
        return self.n


@dataclass(frozen=True)
class Uniform:
    """All lengths from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high + 1))


@dataclass(frozen=True)
class LogNormal:
    """Half of all lengths lie below `median`; `sigma` is the deviation of their logarithm."""

    median: int
    sigma: float
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        return max(1, min(self.high, round(float(rng.lognormal(math.log(self.median), self.sigma)))))


def parse_lengths(text: str) -> Lengths:
    """`128`, `fixed:128`, `uniform:LOW:HIGH`, `lognormal:MEDIAN:SIGMA[:MAX]`; else ValueError."""
    kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
    try:
        if kind == "fixed" and len(numbers) == 1 and int(numbers[0]) >= 1:
            return Fixed(int(numbers[0]))
        if kind == "uniform" and len(numbers) == 2 and 1 <= int(numbers[0]) <= int(numbers[1]):
            return Uniform(int(numbers[0]), int(numbers[1]))
        if kind == "lognormal" and len(numbers) in (2, 3) and int(numbers[0]) >= 1 and float(numbers[1]) >= 0:
            return LogNormal(int(numbers[0]), float(numbers[1]), int(numbers[2]) if numbers[2:] else 1 << 20)
    except ValueError:
        pass
    raise ValueError(f"{text}: not N, fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MAX]")


class Line(msgspec.Struct):
    """A line of a request file. `prompt` (text) goes before `prompt_tokens` (that many random ids)."""

    output_tokens: int
    prompt_tokens: int = 0
    prompt: str = ""


def read_lines(path: Path) -> list[Line]:
    """A JSON object a line. ValueError naming the line that is none."""
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=Line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
        if line.output_tokens < 1 or not (line.prompt or line.prompt_tokens > 0):
            raise ValueError(f"{path}: line {number}: needs a prompt or prompt_tokens, and output_tokens")
        lines.append(line)
    if not lines:
        raise ValueError(f"{path}: no requests in it")
    return lines


@dataclass(frozen=True)
class Item:
    """One request to be sent."""

    prompt: str | list[int]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """`item(i)`: request number i. Lengths from `lines` (over and over) or else from the distributions."""

    prompt: Lengths
    output: Lengths
    seed: int = 0
    n_vocab: int = 0  # random ids are below this; 0: the prompts are words
    lines: Sequence[Line] = ()

    def item(self, index: int) -> Item:
        rng = np.random.default_rng((self.seed, index))
        if not self.lines:
            n_prompt, n_output = self.prompt.draw(rng), self.output.draw(rng)
            return Item(self._prompt(n_prompt, rng), n_output)
        line = self.lines[index % len(self.lines)]
        return Item(line.prompt or self._prompt(line.prompt_tokens, rng), line.output_tokens)

    def _prompt(self, n: int, rng: np.random.Generator) -> str | list[int]:
        if self.n_vocab:
            return [int(i) for i in rng.integers(0, self.n_vocab, n)]
        return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), n))


def arrival_times(rate: float, seed: int) -> "Arrivals":
    return Arrivals(rate, np.random.default_rng((seed, 1 << 32)))


class Arrivals:
    """Moments of a Poisson process of `rate` a second, from zero on; an endless iterator."""

    def __init__(self, rate: float, rng: np.random.Generator) -> None:
        self._mean_s, self._rng, self._now_s = 1.0 / rate, rng, 0.0

    def __iter__(self) -> "Arrivals":
        return self

    def __next__(self) -> float:
        self._now_s += float(self._rng.exponential(self._mean_s))
        return self._now_s
