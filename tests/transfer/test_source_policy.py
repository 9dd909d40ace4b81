"""How bytes leave the file: by residency and what the file system can do."""

import os

import numpy as np
import pytest
from pipeline_support import CHUNK, Piece, assert_exact, build, make_transfer, run_load

from streamer.device.host import HostDevice
from streamer.gguf.mapping import Mapping
from streamer.plan.chunks import chunks_of
from streamer.transfer.base import Origin
from streamer.transfer.source_policy import WAYS, Way, choose_way, fill

MIB = 1 << 20


def evict(path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


class WithoutDirect(Mapping):
    """A file system without O_DIRECT."""

    def open_direct(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("cached", "safe", "direct", "way"),
    [
        (True, True, True, Way.MAP),
        (True, False, True, Way.READ),
        (False, True, True, Way.DIRECT),
        (False, False, True, Way.DIRECT),
        (False, True, False, Way.READ_DROP),
        (True, True, False, Way.MAP),
    ],
)
def test_the_table(cached: bool, safe: bool, direct: bool, way: Way) -> None:
    assert WAYS[cached, safe, direct] is way


def test_the_table_is_total_and_only_cached_bytes_count_as_cached() -> None:
    assert len(WAYS) == 8
    for (cached, _, _), way in WAYS.items():
        assert (way.origin is Origin.PAGE_CACHE) == cached


@pytest.mark.parametrize("kind", [Mapping, WithoutDirect])
def test_a_cold_file_is_loaded_without_staying_in_the_page_cache(tmp_path, kind) -> None:
    model = build(
        tmp_path, [Piece(4 * MIB, layer=i, data=noise(4 * MIB, i)) for i in range(3)], chunk_nbytes=MIB
    )
    evict(model.path)
    with Mapping(model.directory.shards[0]) as probe:
        if probe.resident_bytes():
            pytest.skip("this file system does not evict")
        device = HostDevice()
        transfer = make_transfer("ring", device, chunk_nbytes=MIB)
        weights, ledger = run_load(model, device, transfer, verify=True, open_source=kind)
        assert_exact(model, device, weights)
        now = ledger.statistics()
        assert (now.page_cache_bytes, now.storage_bytes) == (0, model.plan.nbytes)
        assert probe.resident_bytes() < model.plan.nbytes // 8  # nothing but edges and readahead
        device.close()


def test_a_cold_file_of_another_owner_is_seen_to_be_cold(tmp_path) -> None:
    """There mincore says that everything is resident."""

    class Others(Mapping):
        def resident_bytes(self, offset: int = 0, nbytes: int | None = None) -> int:
            return self.nbytes - offset if nbytes is None else nbytes

    model = build(
        tmp_path, [Piece(4 * MIB, layer=i, data=noise(4 * MIB, i)) for i in range(3)], chunk_nbytes=MIB
    )
    evict(model.path)
    with Mapping(model.directory.shards[0]) as probe:
        if probe.resident_bytes():
            pytest.skip("this file system does not evict")
    device = HostDevice()
    weights, ledger = run_load(
        model, device, make_transfer("ring", device, chunk_nbytes=MIB), verify=True, open_source=Others
    )
    assert_exact(model, device, weights)
    assert ledger.statistics().storage_bytes >= model.plan.nbytes * 3 // 4
    device.close()


def test_a_half_cached_file_is_taken_from_both(tmp_path) -> None:
    model = build(
        tmp_path, [Piece(4 * MIB, layer=i, data=noise(4 * MIB, i)) for i in range(2)], chunk_nbytes=MIB
    )
    evict(model.path)
    second = model.plan.weights[1].tensor
    with model.path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no readahead beyond what is asked
        os.pread(file.fileno(), second.nbytes, second.offset)
    device = HostDevice()
    weights, ledger = run_load(model, device, make_transfer("ring", device, chunk_nbytes=MIB))
    assert_exact(model, device, weights)
    now = ledger.statistics()
    assert now.page_cache_bytes >= 3 * MIB
    assert now.storage_bytes >= 3 * MIB
    device.close()


@pytest.mark.parametrize("way", list(Way))
def test_every_way_brings_the_same_bytes(tmp_path, way: Way) -> None:
    data = noise(3 * CHUNK + 77)
    model = build(tmp_path, [Piece(100), Piece(len(data), data=data)])
    device = HostDevice()
    slot = device.allocate_pinned(CHUNK + 8192)
    with Mapping(model.directory.shards[0]) as source:
        if way is Way.DIRECT and not source.open_direct():
            pytest.skip("no O_DIRECT here")
        for chunk in chunks_of(model.plan.weights[1], model.plan):
            begin = fill(way, source, chunk.file_offset, chunk.nbytes, slot.address)
            found = bytes(slot.view[begin : begin + chunk.nbytes])
            assert found == data[chunk.offset : chunk.offset + chunk.nbytes]
    device.close()


def test_the_probe_reads_only_a_little_of_a_large_chunk(tmp_path) -> None:
    model = build(tmp_path, [Piece(4 * MIB)], chunk_nbytes=4 * MIB)
    asked: list[int] = []

    class Watching(Mapping):
        def resident_bytes(self, offset: int = 0, nbytes: int | None = None) -> int:
            asked.append(nbytes or 0)
            return super().resident_bytes(offset, nbytes)

    with Watching(model.directory.shards[0]) as source:
        (chunk,) = chunks_of(model.plan.weights[0], model.plan)
        assert choose_way(source, chunk.file_offset, chunk.nbytes, mapping_is_safe=True) is Way.MAP
    assert asked == [64 << 10]
