"""Compiled kernels on disk: one file an entry, replaced atomically, checked when read; for several processes.

A file that is short, damaged or of an older format counts as absent; a directory that cannot be written only
costs the cache. The number of entries is bounded: the oldest go first.
"""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"ggufd-kernel-1\n"
MAX_ENTRIES = 1024


@dataclass(frozen=True)
class CompileCache:
    """`directory` is made by the first `put`, for its owner alone: its content runs on the GPU."""

    directory: Path

    def get(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        """(meta, machine code) of `key`, or None."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        return decode(content)

    def put(self, key: str, meta: dict[str, Any], code: bytes) -> None:
        """Store; a reader sees the whole old or the whole new file. Failing to write only loses the entry."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
        except OSError:
            return
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(encode(meta, code))
            os.replace(temporary, self._path(key))
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            return
        self._prune()

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.kernel"

    def _prune(self) -> None:
        ages: list[tuple[float, Path]] = []
        for path in self.directory.glob("*.kernel"):
            try:
                ages.append((path.stat().st_mtime, path))
            except OSError:  # another process took it
                continue
        for _, path in sorted(ages)[: max(0, len(ages) - MAX_ENTRIES)]:
            path.unlink(missing_ok=True)


def encode(meta: dict[str, Any], code: bytes) -> bytes:
    """MAGIC, SHA-256 of the rest, u64 length of the JSON meta, meta, code."""
    text = json.dumps(meta).encode()
    rest = len(text).to_bytes(8, "little") + text + code
    return MAGIC + hashlib.sha256(rest).digest() + rest


def decode(content: bytes) -> tuple[dict[str, Any], bytes] | None:
    """What `encode` was given; None when a byte is missing or different."""
    start = len(MAGIC) + 32
    rest = content[start:]
    if content[: len(MAGIC)] != MAGIC or hashlib.sha256(rest).digest() != content[len(MAGIC) : start]:
        return None
    end = 8 + int.from_bytes(rest[:8], "little")
    meta: dict[str, Any] = json.loads(rest[8:end])
    return meta, rest[end:]
