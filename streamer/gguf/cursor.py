"""A place in a file that may lie about its sizes: reads forward, believes no length before it is checked."""

import os
import struct

from streamer.errors import FileChangedError, GGUFError

FIRST_READ_NBYTES = 64 << 10  # most headers without a vocabulary fit; doubled whenever more is needed
MAX_HEADER_NBYTES = 256 << 20  # real ones with 260,000 tokens and merges take 15 MB
MAX_WORK = 4_000_000  # units of parsing a model may cost over all shards: about half a second

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def shown(text: str, limit: int = 80) -> str:
    """`text` from the file as it may stand in a one-line message: escaped and cut where needed."""
    plain = text if text.isprintable() and text else repr(text)
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."


def quoted(text: str, limit: int = 80) -> str:
    """`text` from the file in quotes, escaped and cut: a value that is named as what it says."""
    return shown(repr(text[:limit]), limit)


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
        self.data = b""  # the file's first len(data) bytes
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
        parts = [self.data]
        have = len(self.data)
        while have < target:
            part = os.pread(self._descriptor, target - have, have)
            if not part:
                lacking = self.file_nbytes - have
                raise FileChangedError(
                    self.path, "header", f"truncated while being read: {lacking} bytes lack"
                )
            parts.append(part)
            have += len(part)
        self.data = b"".join(parts)

    def take(self, nbytes: int, subject: str) -> bytes:
        self.need(nbytes, subject)
        start, self.position = self.position, self.position + nbytes
        return self.data[start : self.position]

    def u32(self, subject: str) -> int:
        value: int = _U32.unpack(self.take(4, subject))[0]
        return value

    def u64(self, subject: str) -> int:
        value: int = _U64.unpack(self.take(8, subject))[0]
        return value

    def text(self, subject: str, max_nbytes: int | None = None) -> str:
        """A length and that many bytes of UTF-8."""
        nbytes = self.u64(subject)
        if max_nbytes is not None and nbytes > max_nbytes:
            raise self.error(subject, f"length {nbytes} is over the {max_nbytes} bytes that are allowed")
        raw = self.take(nbytes, subject)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(subject, f"text is not UTF-8 (byte {error.start})") from None

    def string_starts(self, count: int, subject: str) -> list[int]:
        """Step over `count` strings without making them: the positions of their lengths in `data`."""
        if count * 8 > self.remaining:
            raise self.error(
                subject, f"{count} strings cannot fit in the {self.remaining} bytes that are left"
            )
        self.budget.charge(count, subject)
        starts: list[int] = []
        while len(starts) < count:
            self._step_over_loaded(count, starts)
            self.need(8 if len(starts) < count else 0, subject)
        return starts

    def _step_over_loaded(self, count: int, starts: list[int]) -> None:
        """The hot loop: as far as `data` reaches. Leaves the position behind the last string seen."""
        data, position, unpack, append = self.data, self.position, _U64.unpack_from, starts.append
        last = len(data) - 8
        for _ in range(count - len(starts)):
            if position > last:
                break
            append(position)
            position += 8 + unpack(data, position)[0]
        self.position = position
