"""The strict reader: a path becomes a Directory, or a GGUFError that names key or tensor.

Layout (versions 2 and 3, little-endian): magic, u32 version, u64 tensors, u64 keys; keys (text, u32 type,
value); tensors (text, u32 n_dims, u64 dims, u32 type, u64 offset); padding to the alignment; data.
"""

import itertools
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace

from streamer.errors import GGUFError
from streamer.gguf.cursor import Budget, Cursor, shown
from streamer.gguf.directory import Directory, Shard, TensorInfo
from streamer.gguf.metadata import Metadata
from streamer.gguf.quants import QuantType
from streamer.gguf.shards import check_shard, check_tensor_count, shard_paths
from streamer.gguf.values import ValueType, read_value

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT, DEFAULT_ALIGNMENT = "general.alignment", 32
MAX_KEY_NBYTES = 65_535  # the specification's limit
MAX_NAME_NBYTES = 255  # ggml allows 64
MAX_DIMENSIONS = 4
MAX_ELEMENTS = (1 << 63) - 1
KEY_MIN_NBYTES, KEY_COST = 13, 16  # smallest key in the file; work units of parsing one
TENSOR_MIN_NBYTES, TENSOR_COST = 32, 30
REMOVED_TYPES = frozenset({4, 5, 31, 32, 33, 36, 37, 38})


@dataclass(frozen=True)
class _Part:
    """What one file says."""

    shard: Shard
    version: int
    alignment: int
    values: dict[str, object]
    tensors: list[TensorInfo]  # file order; shard index 0


def read_directory(path: str | os.PathLike[str]) -> Directory:
    """Read the header of a GGUF file, or of all shards when `path` is the first of a split model.

    Reads headers only, with bounded time and memory (cursor.py). GGUFError for any fault.
    """
    first_path = os.fspath(path)
    budget = Budget(first_path)
    first = _read_part(first_path, budget)
    paths = shard_paths(first_path, first.values)
    parts = [first]
    for number, other_path in enumerate(paths[1:], start=1):
        part = _read_part(other_path, budget)
        check_shard(other_path, part.values, number, len(paths))
        parts.append(part)
    tensors = _merge(parts)
    check_tensor_count(first_path, first.values, len(tensors))
    return Directory(
        path=first_path,
        version=first.version,
        alignment=first.alignment,
        metadata=Metadata(first_path, first.values),
        tensors=tensors,
        shards=tuple(part.shard for part in parts),
    )


def _merge(parts: list[_Part]) -> dict[str, TensorInfo]:
    if len(parts) == 1:
        return {tensor.name: tensor for tensor in parts[0].tensors}
    merged: dict[str, TensorInfo] = {}
    for index, part in enumerate(parts):
        for tensor in part.tensors:
            if tensor.name in merged:
                other = parts[merged[tensor.name].shard].shard.path
                raise GGUFError(
                    part.shard.path, shown(tensor.name), f"tensor is also in {os.path.basename(other)}"
                )
            merged[tensor.name] = replace(tensor, shard=index)
    return merged


def _read_part(path: str, budget: Budget) -> _Part:
    try:
        # O_NONBLOCK: a FIFO given as a model must not hang the open
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise GGUFError(path, "file", _why(error)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise GGUFError(path, "file", f"is {kind}")
        shard = Shard(path, status.st_size, status.st_mtime_ns, status.st_ino)
        return _parse(Cursor(path, descriptor, status.st_size, budget), shard)
    except OSError as error:
        raise GGUFError(path, "header", f"cannot be read: {_why(error)}") from None
    finally:
        os.close(descriptor)


def _why(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _parse(cursor: Cursor, shard: Shard) -> _Part:
    version = _read_version(cursor)
    n_tensors = _read_count(cursor, "tensors", TENSOR_MIN_NBYTES, TENSOR_COST)
    n_keys = _read_count(cursor, "keys", KEY_MIN_NBYTES, KEY_COST)
    values = _read_values(cursor, n_keys)
    alignment = _alignment(cursor, values)
    infos = _read_tensors(cursor, n_tensors)
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = [_place(cursor, info, data_offset, alignment) for info in infos]
    _check_overlaps(cursor, tensors)
    return _Part(shard, version, alignment, values, tensors)


def _read_version(cursor: Cursor) -> int:
    if not cursor.file_nbytes:
        raise cursor.error("header", "file is empty")
    magic = cursor.take(min(4, cursor.file_nbytes), "header")
    if magic != MAGIC:
        raise cursor.error("header", f"not a GGUF file (begins with {magic!r})")
    version = cursor.u32("header")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (1, *VERSIONS):
            raise cursor.error("header", f"big-endian file (version {swapped}); only little-endian is read")
        raise cursor.error("header", f"version {version} is not supported, only 2 and 3 are")
    return version


def _read_count(cursor: Cursor, what: str, min_nbytes: int, cost: int) -> int:
    count = cursor.u64("header")
    if count * min_nbytes > cursor.remaining:
        raise cursor.error(
            "header", f"{count} {what} cannot fit in the {cursor.remaining} bytes that are left"
        )
    cursor.budget.charge(count * cost, "header")
    return count


def _read_values(cursor: Cursor, n_keys: int) -> dict[str, object]:
    values: dict[str, object] = {}
    for index in range(n_keys):
        key = cursor.text(f"key {index}", MAX_KEY_NBYTES)
        if key in values:
            raise cursor.error(shown(key), "key occurs twice")
        if key == ALIGNMENT:
            _require_u32(cursor)
        values[key] = read_value(cursor, shown(key))
    return values


def _require_u32(cursor: Cursor) -> None:
    """The alignment is the one key whose type the specification fixes; others take any integer."""
    type = cursor.u32(ALIGNMENT)
    cursor.position -= 4
    if type != ValueType.U32:
        raise cursor.error(ALIGNMENT, f"must be of type u32 ({ValueType.U32}), is of type {type}")


def _alignment(cursor: Cursor, values: Mapping[str, object]) -> int:
    value = values.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    assert isinstance(value, int)
    if value < 8 or value & (value - 1):
        raise cursor.error(ALIGNMENT, f"is {value}, must be a power of two of at least 8")
    return value


def _read_tensors(cursor: Cursor, n_tensors: int) -> list[TensorInfo]:
    """Tensor entries, each checked by itself; offsets still relative to the data's start."""
    seen: set[str] = set()
    infos = []
    for index in range(n_tensors):
        name = cursor.text(f"tensor {index}", MAX_NAME_NBYTES)
        if name in seen:
            raise cursor.error(shown(name), "tensor occurs twice")
        seen.add(name)
        infos.append(_read_tensor(cursor, name))
    return infos


def _read_tensor(cursor: Cursor, name: str) -> TensorInfo:
    subject = shown(name)
    n_dimensions = cursor.u32(subject)
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise cursor.error(subject, f"has {n_dimensions} dimensions, must have 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.u64(subject) for _ in range(n_dimensions))
    if 0 in shape:
        raise cursor.error(subject, f"has a zero dimension: {list(shape)}")
    n_elements = 1
    for dimension in shape:
        n_elements *= dimension
    type_id = cursor.u32(subject)
    type = _quant_type(cursor, subject, type_id)
    if shape[0] % type.block_elements:
        block = f"quant block of {type.block_elements}"
        raise cursor.error(
            subject, f"rows of {shape[0]} are no multiple of the {block} of {type.name} ({type_id})"
        )
    nbytes = n_elements // type.block_elements * type.block_nbytes
    if n_elements > MAX_ELEMENTS or nbytes > MAX_ELEMENTS:
        raise cursor.error(subject, f"size of {list(shape)} does not fit in 64 bits")
    return TensorInfo(name, shape, type, nbytes, shard=0, offset=cursor.u64(subject))


def _quant_type(cursor: Cursor, subject: str, type_id: int) -> QuantType:
    try:
        return QuantType(type_id)
    except ValueError:
        kind = "was removed from the format" if type_id in REMOVED_TYPES else "is not known"
        raise cursor.error(subject, f"tensor type {type_id} {kind}") from None


def _place(cursor: Cursor, info: TensorInfo, data_offset: int, alignment: int) -> TensorInfo:
    """`info` with its absolute offset, proved to lie inside the file."""
    if info.offset % alignment:
        raise cursor.error(
            shown(info.name), f"offset {info.offset} is no multiple of the alignment {alignment}"
        )
    begin = data_offset + info.offset
    lacking = begin + info.nbytes - cursor.file_nbytes
    if lacking > 0:
        where = f"offset {begin}, {info.nbytes} bytes, file of {cursor.file_nbytes}"
        raise cursor.error(
            shown(info.name), f"data runs past the end of the file: {lacking} bytes lack ({where})"
        )
    return replace(info, offset=begin)


def _check_overlaps(cursor: Cursor, tensors: list[TensorInfo]) -> None:
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise cursor.error(shown(after.name), f"data overlaps that of {shown(before.name)}")
