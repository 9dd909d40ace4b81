"""A file's key-value pairs: a mapping, lazy where long, with getters that refuse a wrong type by key."""

import math
from collections.abc import Iterator, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from streamer.errors import GGUFError
from streamer.gguf.cursor import shown
from streamer.gguf.values import NestedArray, NumberArray, StringArray, Text

_T = TypeVar("_T")
_ARRAYS = (NumberArray, StringArray, NestedArray)
_LAZY = (*_ARRAYS, Text)


class _Required:
    """Type of the marker for `no default: the key must be there`."""


REQUIRED = _Required()


class Metadata(Mapping[str, object]):
    """Values by key: int, float, bool, str, numpy arrays (read-only), lists of str; long ones made on use.

    Every getter raises GGUFError naming the key when it is absent without a default, or has another type.
    """

    def __init__(self, path: str, values: Mapping[str, object]) -> None:
        self.path = path
        self._values = dict(values)

    def __getitem__(self, key: str) -> object:
        value = self._values[key]
        return value.value() if isinstance(value, _LAZY) else value

    def __contains__(self, key: object) -> bool:  # Mapping's would make the array
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Metadata({len(self)} keys of {self.path})"

    def length(self, key: str) -> int | None:
        """Number of an array's elements without making them; None when absent or no array."""
        value = self._values.get(key)
        return len(value) if isinstance(value, (*_ARRAYS, list, np.ndarray)) else None

    def get_int(self, key: str, default: _T | _Required = REQUIRED) -> int | _T:
        value = self._get(key, default)
        if isinstance(value, _Found):
            if isinstance(value.it, bool) or not isinstance(value.it, int):
                raise self._wrong(key, "an integer")
            return value.it
        return value

    def get_float(self, key: str, default: _T | _Required = REQUIRED) -> float | _T:
        """A finite number; an integer is taken as one."""
        value = self._get(key, default)
        if isinstance(value, _Found):
            if isinstance(value.it, bool) or not isinstance(value.it, int | float):
                raise self._wrong(key, "a number")
            if not math.isfinite(value.it):
                raise self.error(key, f"is {value.it}, not a finite number")
            return float(value.it)
        return value

    def get_bool(self, key: str, default: _T | _Required = REQUIRED) -> bool | _T:
        value = self._get(key, default)
        if isinstance(value, _Found):
            if not isinstance(value.it, bool):
                raise self._wrong(key, "a boolean")
            return value.it
        return value

    def get_str(self, key: str, default: _T | _Required = REQUIRED) -> str | _T:
        value = self._get(key, default)
        if isinstance(value, _Found):
            made = value.made() if isinstance(value.it, Text) else value.it
            if not isinstance(made, str):
                raise self._wrong(key, "a string")
            return made
        return value

    def get_strings(self, key: str, default: _T | _Required = REQUIRED) -> list[str] | _T:
        """An array of strings. The list is kept and shared: do not change it."""
        value = self._get(key, default)
        if isinstance(value, _Found):
            made = value.made()
            if not isinstance(made, list) or not all(isinstance(item, str) for item in made):
                raise self._wrong(key, "an array of strings")
            return made
        return value

    def get_array(self, key: str, default: _T | _Required = REQUIRED) -> npt.NDArray[np.generic] | _T:
        """An array of numbers or booleans, (n,), read-only, in the file's own type."""
        value = self._get(key, default)
        if isinstance(value, _Found):
            made = value.made()
            if not isinstance(made, np.ndarray):
                raise self._wrong(key, "an array of numbers")
            return made
        return value

    def get_per_layer(self, key: str, n_layers: int, default: int | _Required = REQUIRED) -> tuple[int, ...]:
        """One integer a layer: the file has an array of at least that many, or one number for all."""
        value = self._get(key, default)
        if not isinstance(value, _Found):
            return (value,) * n_layers
        if isinstance(value.it, int) and not isinstance(value.it, bool):
            return (value.it,) * n_layers
        made = value.made()
        if not isinstance(made, np.ndarray) or made.dtype.kind not in "iub":
            raise self._wrong(key, "an integer or an array of integers")
        if len(made) < n_layers:
            raise self.error(key, f"has {len(made)} elements for {n_layers} layers")
        return tuple(int(x) for x in made[:n_layers])

    def error(self, key: str, reason: str) -> GGUFError:
        return GGUFError(self.path, shown(key), reason)

    def _get(self, key: str, default: _T | _Required) -> "_Found | _T":
        if key in self._values:
            return _Found(self._values[key])
        if isinstance(default, _Required):
            raise self.error(key, "key is missing")
        return default

    def _wrong(self, key: str, wanted: str) -> GGUFError:
        value = self._values[key]
        if isinstance(value, (*_ARRAYS, list, np.ndarray)):
            kind = "an array"
        else:
            kind = "a string" if isinstance(value, Text) else type(value).__name__
        return self.error(key, f"must be {wanted}, is {kind}")


class _Found:
    """A value that is there, apart from any default."""

    def __init__(self, it: object) -> None:
        self.it = it

    def made(self) -> object:
        return self.it.value() if isinstance(self.it, _LAZY) else self.it
