"""Split files: `NAME-00001-of-00003.gguf` and the keys that say so (llama.cpp's gguf-split). Pure."""

import os
import re
from collections.abc import Mapping

from streamer.errors import GGUFError

SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def shard_paths(path: str, values: Mapping[str, object]) -> list[str]:
    """Paths of all shards of the model whose first shard is `path`, in order. GGUFError if it is not."""
    count = _number(path, values, SPLIT_COUNT, absent=1)
    number = _number(path, values, SPLIT_NO, absent=0)
    if count == 0 and number == 0:
        count = 1
    if number >= count:
        raise GGUFError(path, SPLIT_NO, f"is {number} of {count} shards")
    if count == 1:
        return [path]
    folder, name = os.path.split(path)
    match = _NAME.fullmatch(name)
    if match is None or int(match["count"]) != count or int(match["number"]) != number + 1:
        wanted = f"-{number + 1:05d}-of-{count:05d}.gguf"
        raise GGUFError(
            path, SPLIT_COUNT, f"is shard {number + 1} of {count}, so the name must end in {wanted}"
        )
    names = [f"{match['prefix']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    if number:
        raise GGUFError(path, SPLIT_NO, f"is shard {number + 1} of {count}: give the first, {names[0]}")
    return [path, *(os.path.join(folder, other) for other in names[1:])]


def check_shard(path: str, values: Mapping[str, object], number: int, count: int) -> None:
    """Shard `number` (from 0) says of itself what its name says."""
    found = _number(path, values, SPLIT_NO, absent=0), _number(path, values, SPLIT_COUNT, absent=1)
    if found != (number, count):
        raise GGUFError(
            path, SPLIT_NO, f"says shard {found[0] + 1} of {found[1]}, expected {number + 1} of {count}"
        )


def check_tensor_count(path: str, values: Mapping[str, object], n_tensors: int) -> None:
    expected = _number(path, values, SPLIT_TENSORS, absent=n_tensors)
    if expected != n_tensors:
        raise GGUFError(path, SPLIT_TENSORS, f"is {expected}, the shards hold {n_tensors} tensors")


def _number(path: str, values: Mapping[str, object], key: str, absent: int) -> int:
    value = values.get(key, absent)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise GGUFError(path, key, "must be an integer of at least 0")
    return value
