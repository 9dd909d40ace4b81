"""Case 14: a model in several files, given by its first."""

import struct

import pytest

from streamer.gguf.reader import read_directory


@pytest.fixture
def shards(p, write):
    """shards(count, leave_out, **changed keys of a shard) -> path of the first shard"""

    def write_shards(count=3, leave_out=(), changes=None, same_name=False, total=None):
        paths = []
        for i in range(count):
            keys = {"split.no": i, "split.count": count, **((changes or {}).get(i, {}))}
            packed = [p.key(name, p.U16, value) for name, value in keys.items()]
            packed += [p.ARCHITECTURE] if i == 0 else []
            packed.append(p.key("split.tensors.count", p.I32, 2 * count if total is None else total))
            names = ("same.a", "same.b") if same_name else (f"blk.{i}.a", f"blk.{i}.b")
            tensors = [p.tensor(names[0]), p.tensor(names[1], offset=32)]
            data = struct.pack("<16f", *range(16 * i, 16 * i + 16))
            name = f"model-{i + 1:05d}-of-{count:05d}.gguf"
            if i not in leave_out:
                paths.append(write(p.Header(keys=packed, tensors=tensors, data=data), name))
        return paths

    return write_shards


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_complete_set_loads_by_its_first_shard(shards, count):
    paths = shards(count)
    directory = read_directory(paths[0])
    assert [shard.path for shard in directory.shards] == paths
    assert len(directory.tensors) == 2 * count
    for i in range(count):
        info = directory.tensors[f"blk.{i}.b"]
        assert info.shard == i
        with open(paths[i], "rb") as file:
            file.seek(info.offset)
            assert struct.unpack("<8f", file.read(info.nbytes))[0] == 16 * i + 8


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_shard_is_named(shards, refuse, missing):
    error = refuse(shards(3, leave_out=(missing,))[0])
    assert error.path.endswith(f"model-{missing + 1:05d}-of-00003.gguf")
    assert "No such file" in error.reason


def test_another_shard_than_the_first_names_the_first(shards, refuse):
    error = refuse(shards(3)[1])
    assert "shard 2 of 3" in error.reason
    assert "model-00001-of-00003.gguf" in error.reason


def test_a_shard_that_contradicts_its_name_is_refused(shards, refuse):
    assert refuse(shards(3, changes={1: {"split.no": 2}})[0]).path.endswith("00002-of-00003.gguf")
    assert refuse(shards(3, changes={2: {"split.count": 4}})[0]).path.endswith("00003-of-00003.gguf")
    assert refuse(shards(3, changes={0: {"split.count": 4}})[0]).subject == "split.count"


def test_a_split_file_of_another_name_is_refused_with_the_name_it_needs(p, refuse):
    keys = [p.ARCHITECTURE, p.key("split.no", p.U16, 0), p.key("split.count", p.U16, 2)]
    assert "-00001-of-00002.gguf" in refuse(p.Header(keys=keys)).reason


def test_shards_that_repeat_a_tensor_are_refused(shards, refuse):
    error = refuse(shards(2, same_name=True)[0])
    assert (error.subject, error.path.endswith("00002-of-00002.gguf")) == ("same.a", True)


def test_a_wrong_total_of_tensors_is_refused(shards, refuse):
    assert refuse(shards(2, total=5)[0]).subject == "split.tensors.count"


@pytest.mark.parametrize(("type", "value"), [("STRING", "2"), ("F32", 2.0), ("I32", -1), ("U64", 1 << 63)])
def test_split_keys_that_are_no_count_are_refused(p, refuse, type, value):
    keys = [p.ARCHITECTURE, p.key("split.count", getattr(p, type), value)]
    assert refuse(p.Header(keys=keys)).subject == "split.count"


def test_a_damaged_later_shard_is_refused_by_its_own_path(shards, refuse):
    paths = shards(3)
    with open(paths[2], "r+b") as file:
        file.truncate(file.seek(0, 2) - 8)
    error = refuse(paths[0])
    assert error.path == paths[2]
    assert "8 bytes lack" in error.reason
