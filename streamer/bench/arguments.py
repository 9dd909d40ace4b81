"""Values of the benchmarks' options, for argparse: what measures nothing is a usage error, exit code 2."""

import argparse
import contextlib
from collections.abc import Callable
from typing import TypeVar

N = TypeVar("N", int, float)


def count(text: str) -> int:
    return number(text, int, 1, 1 << 20)


def number(text: str, read: Callable[[str], N], low: float, high: float) -> N:
    with contextlib.suppress(ValueError):
        value = read(text)
        if low <= value <= high:  # NaN is not
            return value
    what = "a whole number" if read is int else "a number"
    raise argparse.ArgumentTypeError(f"must be {what} from {low:g} to {high:.7g}, not {text!r}")
