"""Metadata values: the types a key may have, and arrays that become Python objects on first use only."""

import enum
import itertools
import struct
from typing import Protocol

import numpy as np
import numpy.typing as npt

from streamer.gguf.cursor import Cursor, utf8_fault

MAX_NESTING = 8  # arrays of arrays occur in no known model; honest ones are shallow
MAX_TEXT_NBYTES = 64 << 20  # of one value; a whole tokenizer as JSON, the longest known, takes 33 MB
LONG_TEXT_NBYTES = 64 << 10  # decoded on use only: text with one emoji takes four bytes a character
_BLOCK_NBYTES = 1 << 20  # of strings proved at once
NESTED_COST = 64  # work units an inner array is charged: it becomes an object at once


class ValueType(enum.IntEnum):
    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


_SCALARS: dict[ValueType, tuple[struct.Struct, np.dtype[np.generic]]] = {  # type: (struct, numpy)
    ValueType.U8: (struct.Struct("<B"), np.dtype("<u1")),
    ValueType.I8: (struct.Struct("<b"), np.dtype("<i1")),
    ValueType.U16: (struct.Struct("<H"), np.dtype("<u2")),
    ValueType.I16: (struct.Struct("<h"), np.dtype("<i2")),
    ValueType.U32: (struct.Struct("<I"), np.dtype("<u4")),
    ValueType.I32: (struct.Struct("<i"), np.dtype("<i4")),
    ValueType.F32: (struct.Struct("<f"), np.dtype("<f4")),
    ValueType.BOOL: (struct.Struct("<B"), np.dtype("<u1")),
    ValueType.U64: (struct.Struct("<Q"), np.dtype("<u8")),
    ValueType.I64: (struct.Struct("<q"), np.dtype("<i8")),
    ValueType.F64: (struct.Struct("<d"), np.dtype("<f8")),
}


class LazyArray(Protocol):
    """An array whose place and length are checked and whose objects are not made yet."""

    def __len__(self) -> int: ...
    def value(self) -> object: ...


class NumberArray:
    """Numbers or booleans; `value()` is a read-only numpy view of the header's bytes."""

    def __init__(self, type: ValueType, raw: bytes) -> None:
        self._type, self._raw = type, raw

    def __len__(self) -> int:
        return len(self._raw) // _SCALARS[self._type][1].itemsize

    def value(self) -> npt.NDArray[np.generic]:
        numbers: npt.NDArray[np.generic] = np.frombuffer(self._raw, dtype=_SCALARS[self._type][1])
        return numbers.view(np.bool_) if self._type is ValueType.BOOL else numbers


class StringArray:
    """Strings as they lie in the header, proved to be UTF-8; `value()` makes the list once and keeps it."""

    def __init__(self, raw: bytes, starts: npt.NDArray[np.int64]) -> None:
        self._raw, self._starts = raw, starts  # starts (n,): where in raw each string's length stands
        self._made: list[str] | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def first_not_utf8(self) -> int | None:
        """Index of a string that is not UTF-8, found in bulk, a block of strings at a time."""
        begin = 0
        while begin < len(self):
            end = int(np.searchsorted(self._starts, self._starts[begin] + _BLOCK_NBYTES))
            end = max(begin + 1, end)  # one longer string is a block by itself
            if end == begin + 1 or not self._is_joined_utf8(begin, end):
                fault = (i for i in range(begin, end) if utf8_fault(self._bytes(i)) is not None)
                if (index := next(fault, None)) is not None:
                    return index
            begin = end
        return None

    def _is_joined_utf8(self, begin: int, end: int) -> bool:
        """One decode over strings [begin, end), lengths cut out.

        Joined text is valid exactly when each part is, if no part begins inside a character.
        """
        base, stop = self._end(begin - 1), self._end(end - 1)
        text = np.frombuffer(self._raw, dtype=np.uint8, count=stop - base, offset=base)
        starts = self._starts[begin:end] - base
        lengths = np.zeros(len(text), dtype=np.bool_)  # True where a byte belongs to a length
        for byte in range(8):
            lengths[starts + byte] = True
        begins_inside = (text[np.minimum(starts + 8, len(text) - 1)] & 0xC0) == 0x80
        empty = np.diff(starts, append=len(text)) == 8
        return not (begins_inside & ~empty).any() and utf8_fault(text[~lengths].tobytes()) is None

    def _end(self, index: int) -> int:
        """Where string `index` ends, and the length of the next one stands."""
        return int(self._starts[index + 1]) if index + 1 < len(self) else len(self._raw)

    def _bytes(self, index: int) -> bytes:
        return self._raw[self._end(index - 1) + 8 : self._end(index)]

    def value(self) -> list[str]:
        if self._made is None:
            starts = [*self._starts.tolist(), len(self._raw)]
            raw = self._raw
            self._made = [str(raw[start + 8 : end], "utf-8") for start, end in itertools.pairwise(starts)]
        return self._made


class Text:
    """A long string as it lies in the header, proved to be UTF-8; `value()` decodes it."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def value(self) -> str:
        return str(self._raw, "utf-8")


class NestedArray:
    """Arrays in an array; `value()` is a list of their values."""

    def __init__(self, inner: list[LazyArray]) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def value(self) -> list[object]:
        return [array.value() for array in self._inner]


def read_value(cursor: Cursor, key: str) -> object:
    """The value at the cursor (u32 type, then the value): a scalar, a str, a Text or a LazyArray."""
    type = _read_type(cursor, key)
    if type is ValueType.ARRAY:
        return _read_array(cursor, key, depth=1)
    if type is ValueType.STRING:
        raw = cursor.text_bytes(key, MAX_TEXT_NBYTES)
        return Text(raw) if len(raw) > LONG_TEXT_NBYTES else str(raw, "utf-8")
    packing = _SCALARS[type][0]
    value = packing.unpack(cursor.take(packing.size, key))[0]
    if type is not ValueType.BOOL:
        return value
    if value > 1:
        raise cursor.error(key, f"boolean has the value {value}")
    return bool(value)


def _read_type(cursor: Cursor, key: str) -> ValueType:
    number = cursor.u32(key)
    try:
        return ValueType(number)
    except ValueError:
        raise cursor.error(key, f"unknown value type {number}") from None


def _read_array(cursor: Cursor, key: str, depth: int) -> LazyArray:
    if depth > MAX_NESTING:
        raise cursor.error(key, f"arrays are nested more than {MAX_NESTING} deep")
    type = _read_type(cursor, key)
    count = cursor.u64(key)
    match type:
        case ValueType.STRING:
            return _read_strings(cursor, key, count)
        case ValueType.ARRAY:
            if count * 12 > cursor.remaining:
                raise cursor.error(
                    key, f"{count} arrays cannot fit in the {cursor.remaining} bytes that are left"
                )
            cursor.budget.charge(count * NESTED_COST, key)
            return NestedArray([_read_array(cursor, key, depth + 1) for _ in range(count)])
    raw = cursor.take(count * _SCALARS[type][1].itemsize, key)
    if type is ValueType.BOOL and raw.strip(b"\0\1"):
        raise cursor.error(key, "boolean array holds other bytes than 0 and 1")
    return NumberArray(type, raw)


def _read_strings(cursor: Cursor, key: str, count: int) -> StringArray:
    begin = cursor.position
    starts = np.frombuffer(cursor.string_starts(count, key), dtype=np.int64) - begin
    strings = StringArray(cursor.since(begin), starts)
    if count and (index := strings.first_not_utf8()) is not None:
        raise cursor.error(key, f"string {index} is not UTF-8")
    return strings
