"""A place in a file that may lie about its sizes: reads forward, believes no length before it is checked."""

import codecs
import os
import struct
from array import array

from streamer.errors import FileChangedError, GGUFError

FIRST_READ_NBYTES = 64 << 10  # most headers without a vocabulary fit; doubled whenever more is needed
MAX_HEADER_NBYTES = 256 << 20  # real ones with 260,000 tokens and merges take 15 MB
MAX_WORK = 4_000_000  # units of parsing a model may cost over all shards: about half a second

_PIECE_NBYTES = 1 << 20
_READ_NBYTES = 8 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def shown(text: str, limit: int = 80) -> str:
    """`text` from the file as it may stand in a one-line message: escaped and cut where needed."""
    plain = text if text.isprintable() and text else repr(text)
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."


def quoted(text: str, limit: int = 80) -> str:
    """`text` from the file in quotes, escaped and cut: a value that is named as what it says."""
    return shown(repr(text[:limit]), limit)


def utf8_fault(raw: bytes) -> int | None:
    """Where `raw` stops being UTF-8. Piece by piece: a whole text can take four times its bytes."""
    start = 0
    while start < len(raw):
        piece = raw[start : start + _PIECE_NBYTES]
        try:
            start += codecs.utf_8_decode(piece, "strict", start + len(piece) == len(raw))[1]
        except UnicodeDecodeError as error:
            return start + error.start
    return None


class Budget:
    """Parsing work left for one model. Bounds time where sizes alone do not (millions of empty strings)."""

    def __init__(self, path: str, units: int = MAX_WORK) -> None:
        self._path, self._left = path, units

    def charge(self, units: int, subject: str) -> None:
        self._left -= units
        if self._left < 0:
            raise GGUFError(self._path, subject, "header holds millions of values, more than any model's")


class Cursor:
    """Reads the front of an open file with pread (no mapping, so truncation cannot kill the process).

    Memory: at most twice what has been read, which is at most the file's size and MAX_HEADER_NBYTES.
    The descriptor stays the caller's.
    """

    def __init__(self, path: str, descriptor: int, file_nbytes: int, budget: Budget) -> None:
        self.path, self.file_nbytes, self.budget = path, file_nbytes, budget
        self.position = 0
        self.data = bytearray()  # the file's first bytes; grows in place
        self._descriptor = descriptor

    @property
    def remaining(self) -> int:
        """Bytes of the file after the position."""
        return self.file_nbytes - self.position

    def error(self, subject: str, reason: str) -> GGUFError:
        return GGUFError(self.path, subject, reason)

    def need(self, nbytes: int, subject: str) -> None:
        """Make `nbytes` from the position on available in `data`; GGUFError where the file ends before."""
        end = self.position + nbytes
        if end <= len(self.data):
            return
        if end > self.file_nbytes:
            lacking = end - self.file_nbytes
            raise self.error(
                subject, f"runs past the end of the file ({self.file_nbytes} bytes) by {lacking} bytes"
            )
        if end > MAX_HEADER_NBYTES:
            raise self.error(subject, f"header is larger than {MAX_HEADER_NBYTES >> 20} MiB")
        self._grow(max(end, 2 * len(self.data), FIRST_READ_NBYTES))

    def _grow(self, target: int) -> None:
        target = min(target, self.file_nbytes)
        while (have := len(self.data)) < target:
            part = os.pread(self._descriptor, min(target - have, _READ_NBYTES), have)
            if not part:
                lacking = self.file_nbytes - have
                raise FileChangedError(
                    self.path, "header", f"truncated while being read: {lacking} bytes lack"
                )
            self.data += part

    def take(self, nbytes: int, subject: str) -> bytes:
        self.need(nbytes, subject)
        self.position += nbytes
        return self.since(self.position - nbytes)

    def since(self, begin: int) -> bytes:
        """A copy of what lies between `begin` and the position."""
        return bytes(memoryview(self.data)[begin : self.position])

    def u32(self, subject: str) -> int:
        return self._number(_U32, subject)

    def u64(self, subject: str) -> int:
        return self._number(_U64, subject)

    def _number(self, packing: struct.Struct, subject: str) -> int:
        self.need(packing.size, subject)
        value: int = packing.unpack_from(self.data, self.position)[0]
        self.position += packing.size
        return value

    def text_bytes(self, subject: str, max_nbytes: int) -> bytes:
        """A length and that many bytes, proved to be UTF-8."""
        nbytes = self.u64(subject)
        if max_nbytes < nbytes <= self.remaining:
            raise self.error(subject, f"length {nbytes} is over the {max_nbytes} bytes that are allowed")
        raw = self.take(nbytes, subject)
        if (fault := utf8_fault(raw)) is not None:
            raise self.error(subject, f"text is not UTF-8 (byte {fault})")
        return raw

    def text(self, subject: str, max_nbytes: int) -> str:
        return str(self.text_bytes(subject, max_nbytes), "utf-8")

    def string_starts(self, count: int, subject: str) -> "array[int]":
        """Step over `count` strings without making them: the positions of their lengths in `data`."""
        if count * 8 > self.remaining:
            raise self.error(
                subject, f"{count} strings cannot fit in the {self.remaining} bytes that are left"
            )
        self.budget.charge(count, subject)
        starts = array("q")  # a list would take five times as much
        while len(starts) < count:
            self._step_over_loaded(count, starts)
            self.need(8 if len(starts) < count else 0, subject)
        return starts

    def _step_over_loaded(self, count: int, starts: "array[int]") -> None:
        """The hot loop: as far as `data` reaches. Leaves the position behind the last string seen."""
        data, position, unpack, append = self.data, self.position, _U64.unpack_from, starts.append
        last = len(data) - 8
        for _ in range(count - len(starts)):
            if position > last:
                break
            append(position)
            position += 8 + unpack(data, position)[0]
        self.position = position
