"""Eviction with proof, and plain direct reads."""

from pathlib import Path

import pytest

from streamer.bench.cold import DirectShape, StillCachedError, direct_gbps, evict, warm
from streamer.gguf.directory import Shard
from streamer.gguf.mapping import Mapping

MIB = 1 << 20


@pytest.fixture
def mapping(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (2 * MIB // 256) + b"tail")
    status = path.stat()
    with Mapping(Shard(str(path), status.st_size, status.st_mtime_ns, status.st_ino)) as opened:
        yield opened


def test_evicted_file_has_no_page_in_the_cache_and_comes_back(mapping: Mapping) -> None:
    try:
        evict([mapping])
    except StillCachedError as error:
        pytest.skip(f"this file system keeps its pages: {error}")
    assert mapping.resident_bytes() == 0
    warm([mapping])
    assert mapping.resident_bytes() == mapping.nbytes


def test_pages_that_stay_are_no_cold_start(mapping: Mapping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mapping, "drop", lambda self, offset, nbytes: None)
    warm([mapping])
    with pytest.raises(StillCachedError, match="stay in the page cache"):
        evict([mapping], patience_s=0.01)


@pytest.mark.parametrize("shape", [DirectShape(1, MIB), DirectShape(3, 4096)])
def test_direct_read_covers_the_file(mapping: Mapping, shape: DirectShape) -> None:
    try:
        assert direct_gbps(mapping.shard.path, shape) > 0
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
