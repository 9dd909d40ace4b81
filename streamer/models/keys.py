"""Typed reading of a file's metadata: defaults where there are any, refusals that name the key. Pure."""

import math
from collections.abc import Sequence
from typing import overload

import numpy as np

from streamer.errors import GGUFError
from streamer.gguf.directory import Directory

LARGEST = 2**31 - 1
MOST_LAYERS = 4096
_SMALLEST_REAL, _LARGEST_REAL = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # float32's normal numbers


class Keys:
    """The keys `{architecture}.*` of one file. Every default that was taken is a line in `notes`."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.prefix = directory.architecture
        self.notes: list[str] = []

    def full(self, key: str) -> str:
        return f"{self.prefix}.{key}"

    def has(self, key: str) -> bool:
        return self.full(key) in self.directory.metadata

    def is_array(self, key: str) -> bool:
        return self.has(key) and isinstance(self._value(key), np.ndarray | list | tuple)

    def refuse(self, key: str, reason: str) -> GGUFError:
        return GGUFError(self.directory.path, self.full(key), reason)

    def note(self, key: str, value: object) -> None:
        """Say that a default stands in for a missing key."""
        self.notes.append(f"key={self.full(key)} missing=true default={value}")

    def _value(self, key: str) -> object:
        length = self.directory.metadata.length(self.full(key))  # does not make the array
        if length is not None and length > MOST_LAYERS:
            raise self.refuse(key, f"has {length} entries, more than any model's layers ({MOST_LAYERS})")
        value = self.directory.metadata[self.full(key)]
        return value.item() if isinstance(value, np.generic) else value

    @overload
    def integer(self, key: str, default: int = ..., *, minimum: int = ..., maximum: int = ...) -> int: ...
    @overload
    def integer(self, key: str, default: None, *, minimum: int = ..., maximum: int = ...) -> int | None: ...
    def integer(
        self, key: str, default: int | None = -1, *, minimum: int = 1, maximum: int = LARGEST
    ) -> int | None:
        """An integer in [minimum, maximum]. `default` -1: the key is required; None: may be missing."""
        if not self.has(key):
            if default == -1:
                raise self.refuse(key, "missing")
            return default
        return self._checked_integer(key, self._value(key), minimum, maximum)

    def _checked_integer(self, key: str, value: object, minimum: int, maximum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(key, f"must be an integer, not {_kind(value)}")
        if not minimum <= value <= maximum:
            raise self.refuse(key, f"is {value}; must be {minimum} to {maximum}")
        return value

    @overload
    def real(self, key: str, default: float = ..., *, positive: bool = ...) -> float: ...
    @overload
    def real(self, key: str, default: None, *, positive: bool = ...) -> float | None: ...
    def real(self, key: str, default: float | None = -1.0, *, positive: bool = True) -> float | None:
        """A finite number, above zero if `positive`. `default` -1: required; None: may be missing.

        Devices compute in float32: what would be zero, subnormal or infinite there is refused.
        """
        if not self.has(key):
            if default == -1.0:
                raise self.refuse(key, "missing")
            return default
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, f"must be a number, not {_kind(value)}")
        if not math.isfinite(value) or (positive and value <= 0):
            raise self.refuse(key, f"is {value}; must be a finite number{' above zero' if positive else ''}")
        if value and not _SMALLEST_REAL <= abs(value) <= _LARGEST_REAL:
            raise self.refuse(key, f"is {value}; must be a normal float32 number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        if not self.has(key):
            return default
        value = self._value(key)
        if not isinstance(value, bool):
            raise self.refuse(key, f"must be a boolean, not {_kind(value)}")
        return value

    def text(self, key: str, default: str) -> str:
        if not self.has(key):
            return default
        value = self._value(key)
        if not isinstance(value, str):
            raise self.refuse(key, f"must be text, not {_kind(value)}")
        return value

    def per_layer(
        self, key: str, n: int, default: int | None = -1, *, minimum: int = 1, maximum: int = LARGEST
    ) -> tuple[int, ...]:
        """One integer a layer, from a scalar (the same for all) or an array of at least `n`."""
        if not self.has(key):
            return (self.integer(key, default, minimum=minimum) or 0,) * n
        value = self._value(key)
        if not isinstance(value, np.ndarray | list | tuple):
            return (self._checked_integer(key, value, minimum, maximum),) * n
        if len(value) < n:
            raise self.refuse(key, f"has {len(value)} entries for {n} layers")
        items: Sequence[object] = value[:n].tolist() if isinstance(value, np.ndarray) else value[:n]
        return tuple(self._checked_integer(key, item, minimum, maximum) for item in items)

    def flags(self, key: str, n: int) -> tuple[bool, ...]:
        """One flag a layer, from an array of booleans or integers."""
        value = self._value(key)
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "biu":
            raise self.refuse(key, f"must be an array of booleans, not {_kind(value)}")
        if len(value) < n:
            raise self.refuse(key, f"has {len(value)} entries for {n} layers")
        return tuple(bool(item) for item in value[:n])


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray | list | tuple):
        return "an array"
    return {bool: "a boolean", int: "an integer", float: "a float", str: "text"}.get(
        type(value), "something else"
    )
