"""Headers packed by hand, so that every field can lie."""

import os
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from streamer.errors import GGUFError, one_line
from streamer.gguf.directory import Directory
from streamer.gguf.reader import read_directory

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "B",
    U64: "Q",
    I64: "q",
    F64: "d",
}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pack(type: int, value: object) -> bytes:
    """A value's bytes without its type; an array is (element type, list of values)."""
    if type == STRING:
        return text(value)
    if type == ARRAY:
        element, items = value
        return struct.pack("<IQ", element, len(items)) + b"".join(pack(element, item) for item in items)
    return struct.pack("<" + FORMATS[type], value)


def key(name: str | bytes, type: int, value: object) -> bytes:
    return raw_key(name, type, pack(type, value))


def raw_key(name: str | bytes, type: int, raw: bytes) -> bytes:
    return text(name) + struct.pack("<I", type) + raw


def tensor(name: str | bytes, shape: tuple[int, ...] = (8,), type: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", type, offset)


@dataclass
class Header:
    """A file under construction. `n_keys`, `n_tensors` are what it claims; None: the truth."""

    keys: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data: bytes = b""
    version: int = 3
    n_keys: int | None = None
    n_tensors: int | None = None
    alignment: int = 32
    magic: bytes = b"GGUF"

    def build(self) -> bytes:
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        head = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_keys)
        head += b"".join(self.keys) + b"".join(self.tensors)
        if not self.data:
            return head
        return head + bytes(-len(head) % self.alignment) + self.data


ARCHITECTURE = key("general.architecture", STRING, "llama")


@pytest.fixture
def write(tmp_path: Path):
    """write(header or bytes, name) -> path"""

    def write_file(content: Header | bytes, name: str = "model.gguf") -> str:
        path = tmp_path / name
        path.write_bytes(content.build() if isinstance(content, Header) else content)
        return os.fspath(path)

    return write_file


@pytest.fixture
def load(write):
    def load_content(content: Header | bytes) -> Directory:
        return read_directory(write(content))

    return load_content


@pytest.fixture
def refuse(write):
    """refuse(content or path) -> the GGUFError, which took under 2 s and is one line naming the file."""

    def refuse_content(content: Header | bytes | str) -> GGUFError:
        path = content if isinstance(content, str) else write(content)
        begin = time.thread_time()
        with pytest.raises(GGUFError) as caught:
            read_directory(path)
        assert time.thread_time() - begin < 2
        assert len(str(caught.value).splitlines()) == 1
        assert len(str(caught.value)) < 600
        assert str(caught.value).startswith(one_line(caught.value.path))
        return caught.value

    return refuse_content


class Pack:
    """The builders above for test modules, which cannot import this file: the fixture `p`."""

    U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY = (
        U8,
        I8,
        U16,
        I16,
        U32,
        I32,
        F32,
        BOOL,
        STRING,
        ARRAY,
    )
    U64, I64, F64 = U64, I64, F64
    Header = Header
    text, pack, key, raw_key, tensor = map(staticmethod, (text, pack, key, raw_key, tensor))
    ARCHITECTURE = ARCHITECTURE


@pytest.fixture(scope="session")
def p() -> type[Pack]:
    return Pack
