"""Reading a shard: every way gives the file's bytes, and a file that shrinks is an error, never a signal."""

import errno
import os

import numpy as np
import pytest

from streamer.errors import FileChangedError, GGUFError
from streamer.gguf import mapping as mapping_module
from streamer.gguf.directory import Shard
from streamer.gguf.mapping import DIRECT_ALIGNMENT, PAGE_NBYTES, Mapping, direct_span

NBYTES = 40 * PAGE_NBYTES + 123


def shard_of(path: str) -> Shard:
    status = os.stat(path)
    return Shard(path, status.st_size, status.st_mtime_ns, status.st_ino)


@pytest.fixture
def content() -> bytes:
    return np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8).tobytes()


@pytest.fixture
def path(tmp_path, content) -> str:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    return os.fspath(file)


@pytest.fixture
def mapped(path):
    with Mapping(shard_of(path)) as opened:
        yield opened


def aligned_buffer(nbytes: int) -> tuple[np.ndarray, int]:
    """Memory and its first address that O_DIRECT takes."""
    memory = np.zeros(nbytes + DIRECT_ALIGNMENT, dtype=np.uint8)
    return memory, -(-memory.ctypes.data // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT


def bytes_at(memory: np.ndarray, address: int, nbytes: int) -> bytes:
    begin = address - memory.ctypes.data
    return memory[begin : begin + nbytes].tobytes()


RANGES = [(0, NBYTES), (0, 0), (1, 1), (PAGE_NBYTES - 1, 2), (5 * PAGE_NBYTES, PAGE_NBYTES), (NBYTES - 1, 1)]


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_every_way_to_read_gives_the_files_bytes(mapped, content, offset, nbytes):
    expected = content[offset : offset + nbytes]
    with mapped.view(offset, nbytes) as view:
        assert view.readonly
        assert bytes(view) == expected
    memory = np.zeros(max(nbytes, 1), dtype=np.uint8)
    mapped.touch(offset, nbytes)
    mapped.read_into(memory.ctypes.data, offset, nbytes)
    assert memory[:nbytes].tobytes() == expected


@pytest.mark.parametrize(("offset", "nbytes"), [r for r in RANGES if r[1]])
def test_direct_reads_give_the_files_bytes_where_there_is_o_direct(mapped, content, offset, nbytes):
    if not mapped.open_direct():
        pytest.skip("this file system has no O_DIRECT")
    begin, span = direct_span(offset, nbytes)
    assert begin <= offset
    assert begin + span >= offset + nbytes
    memory, address = aligned_buffer(span)
    shift = mapped.read_direct(address, offset, nbytes)
    assert bytes_at(memory, address + shift, nbytes) == content[offset : offset + nbytes]


def test_a_file_system_without_o_direct_is_told_apart(mapped, monkeypatch):
    real_open = os.open

    def refuse_direct(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse_direct)
    assert not mapped.open_direct()
    assert not mapped.is_direct


def test_drop_empties_the_page_cache_and_touch_fills_it(mapped):
    os.fsync(mapped.descriptor)
    os.posix_fadvise(mapped.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if mapped.resident_bytes():
        pytest.skip("this file system keeps its pages (tmpfs)")
    mapped.touch(0, NBYTES)
    assert mapped.resident_bytes() == NBYTES
    assert mapped.resident_bytes(PAGE_NBYTES, 10) == 10
    mapped.drop(0, NBYTES)
    assert mapped.resident_bytes() == 0
    mapped.touch(3 * PAGE_NBYTES, PAGE_NBYTES)
    assert mapped.resident_bytes(3 * PAGE_NBYTES, PAGE_NBYTES) == PAGE_NBYTES


def test_drop_leaves_pages_shared_with_neighbours(mapped):
    mapped.touch(0, NBYTES)
    mapped.drop(10, PAGE_NBYTES)
    assert mapped.resident_bytes(0, 2 * PAGE_NBYTES) == 2 * PAGE_NBYTES


def test_the_mapping_is_read_only(mapped):
    with open("/proc/self/maps") as maps:
        line = next(line for line in maps if line.rstrip().endswith(mapped.shard.path))
    assert line.split()[1] == "r--s"
    with mapped.view(0, 1) as view, pytest.raises(TypeError):
        view[0] = 1


@pytest.mark.parametrize("keep", [0, 100, PAGE_NBYTES, 7 * PAGE_NBYTES + 5])
def test_a_truncated_file_is_an_error_in_every_protected_read(mapped, path, keep):
    os.truncate(path, keep)
    lacking = NBYTES - keep
    memory = np.zeros(NBYTES, dtype=np.uint8)
    with pytest.raises(FileChangedError, match=f"{lacking} bytes lack"):
        mapped.check_unchanged()
    with pytest.raises(FileChangedError, match=f"{lacking} of {NBYTES} bytes"):
        mapped.read_into(memory.ctypes.data, 0, NBYTES)
    with pytest.raises(FileChangedError, match=f"{lacking} bytes lack"):
        mapped.touch(0, NBYTES)


def test_touch_without_populate_still_notices_truncation(mapped, path, content):
    mapped._can_populate = False
    mapped.touch(0, NBYTES)
    os.truncate(path, 10)
    with pytest.raises(FileChangedError):
        mapped.touch(0, NBYTES)


def test_a_kernel_without_populate_falls_back_to_reading(mapped, monkeypatch):
    monkeypatch.setattr(mapping_module, "_MADV_POPULATE_READ", 12345)
    mapped.touch(0, NBYTES)
    assert not mapped._can_populate
    assert mapped.resident_bytes() == NBYTES


def test_an_io_error_is_attributed(mapped):
    with pytest.raises(FileChangedError, match="cannot be read: Bad address"):
        mapped.read_into(8, 0, PAGE_NBYTES)  # the kernel cannot write there


def test_replacing_the_path_keeps_the_old_bytes(mapped, path, content, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(bytes(NBYTES))
    os.replace(other, path)
    mapped.check_unchanged()
    memory = np.zeros(NBYTES, dtype=np.uint8)
    mapped.read_into(memory.ctypes.data, 0, NBYTES)
    assert memory.tobytes() == content
    assert mapped.open_direct() in (True, False)  # the second descriptor is of the old file too
    if mapped.is_direct:
        page, address = aligned_buffer(DIRECT_ALIGNMENT)
        mapped.read_direct(address, 0, 100)
        assert bytes_at(page, address, 100) == content[:100]


def test_an_overwritten_file_is_noticed(mapped, path):
    with open(path, "r+b") as file:
        file.write(b"x")
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, mapped.shard.mtime_ns + 1))
    with pytest.raises(FileChangedError, match="written"):
        mapped.check_unchanged()


def test_another_file_than_the_headers_is_refused_at_opening(path, tmp_path):
    shard = shard_of(path)
    os.replace(path, tmp_path / "old")
    (tmp_path / "model.gguf").write_bytes(bytes(NBYTES))
    with pytest.raises(FileChangedError, match="replaced"):
        Mapping(shard)
    os.unlink(path)
    with pytest.raises(GGUFError, match="No such file"):
        Mapping(shard)


def test_closing_frees_descriptors_and_is_idempotent(path):
    before = sorted(os.listdir("/proc/self/fd"))
    opened = Mapping(shard_of(path))
    opened.open_direct()
    opened.close()
    opened.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
    with open("/proc/self/maps") as maps:
        assert path not in maps.read()


def test_ranges_outside_the_file_are_our_own_fault(mapped):
    for offset, nbytes in [(-1, 1), (0, NBYTES + 1), (NBYTES, 1), (0, -1)]:
        with pytest.raises(AssertionError):
            mapped.touch(offset, nbytes)
