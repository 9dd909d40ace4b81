"""The ring filled by processes: whatever happens to them, the bytes are the file's, nothing stays behind."""

import os
import random
import sys

import numpy as np
import pytest
from pipeline_support import CHUNK, Piece, assert_exact, assert_nothing_held, build, make_transfer, run_load

from streamer.bench.meters import children
from streamer.device.host import HostDevice
from streamer.errors import DeviceMemoryError, FileChangedError, ResidencyError
from streamer.gguf.mapping import Mapping
from streamer.residency.state import Phase
from streamer.trace import RecordingTracer
from streamer.transfer.crewed_ring import CrewedRing, pieces_of
from streamer.transfer.ring_space import RingSpace

PAGE = 4096
MIB = 1 << 20


def noise(nbytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def noisy_model(tmp_path, count: int = 12, nbytes: int = 3 * CHUNK + 77):
    return build(tmp_path, [Piece(nbytes, layer=i, data=noise(nbytes, i)) for i in range(count)])


class Meddling(HostDevice):
    """Does something before its nth copy."""

    def __init__(self, nth: int, **options) -> None:
        super().__init__(**options)
        self.left = nth
        self.meddle = lambda source, nbytes: None

    def upload(self, buffer, offset, source, nbytes, *, stream, kind) -> None:
        self.left -= 1
        if self.left == 0:
            self.meddle(source, nbytes)
        super().upload(buffer, offset, source, nbytes, stream=stream, kind=kind)


@pytest.fixture
def crew():
    """Living children that the test itself started: daemons of other tests may be there too."""
    before = set(children())
    return lambda: [pid for pid in children() if pid not in before]


# ---- the pure parts


@pytest.mark.parametrize("seed", range(20))
def test_ranges_of_the_ring_never_overlap(seed: int) -> None:
    chance = random.Random(seed)
    space, taken = RingSpace(100), []
    for _ in range(500):
        nbytes = chance.randint(1, 40)
        begin = space.take(nbytes)
        if begin is None:
            assert taken, "an empty ring has room"
            space.give_back()
            taken.pop(0)
            continue
        assert 0 <= begin <= begin + nbytes <= 100
        assert all(begin + nbytes <= a or b <= begin for a, b in taken)
        taken.append((begin, begin + nbytes))
    assert len(space) == len(taken)


def test_the_whole_ring_can_be_taken_at_once() -> None:
    space = RingSpace(10)
    assert space.take(11) is None
    assert space.take(10) == 0
    assert space.take(1) is None
    space.give_back()
    assert (space.take(6), space.take(4), space.take(1)) == (0, 6, None)
    space.give_back()
    assert (space.take(7), space.take(6)) == (None, 0)


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 10_000])
@pytest.mark.parametrize("nbytes", [1, 4096, 8192, 30_001])
def test_pieces_cover_a_range_once_and_share_no_page(offset: int, nbytes: int) -> None:
    pieces = list(pieces_of(offset, nbytes, 500, 2 * PAGE))
    at, target = offset, 500
    for piece in pieces:
        assert (piece.offset, piece.target) == (at, target)
        assert 0 < piece.nbytes <= 2 * PAGE
        at, target = at + piece.nbytes, target + piece.nbytes
    assert at == offset + nbytes
    assert all(piece.offset % PAGE == 0 for piece in pieces[1:])


# ---- processes that end


def lose_a_job(transfer) -> None:
    """As if a process had taken the fifth job and been killed with it."""
    crew, count = transfer._crew, 0
    give = crew.give

    def losing(jobs) -> None:
        nonlocal count
        for job in jobs:
            count += 1
            if count == 5:
                crew._processes[0].kill()
            else:
                give([job])

    crew.give = losing


def kill_all(transfer) -> None:
    for process in transfer._crew._processes:
        process.kill()


@pytest.mark.parametrize("meddle", [lose_a_job, kill_all])
def test_processes_that_are_killed_are_replaced_by_the_conductor(tmp_path, crew, caplog, meddle) -> None:
    model, device = noisy_model(tmp_path), Meddling(3, link_bytes_per_s=50e6)
    transfer = make_transfer("crewed", device)
    device.meddle = lambda source, nbytes: meddle(transfer)
    weights, _ = run_load(model, device, transfer)
    assert_exact(model, device, weights)
    assert "event=staging_processes_lost" in caplog.text
    assert not crew()
    again, _ = run_load(model, device, transfer)  # with a new crew
    assert_exact(model, device, again)
    weights.close()
    again.close()
    transfer.close()
    assert_nothing_held(device)


def test_without_processes_the_conductor_copies(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    model, device = noisy_model(tmp_path), HostDevice()
    weights, _ = run_load(model, device, make_transfer("crewed", device))
    assert_exact(model, device, weights)
    assert "event=fewer_staging_processes started=0" in caplog.text
    device.close()


def test_no_process_outlives_the_load(tmp_path, crew) -> None:
    model, device = noisy_model(tmp_path, 2), HostDevice()
    transfer = make_transfer("crewed", device)
    transfer.prepare()
    assert len(crew()) == 2
    weights, _ = run_load(model, device, transfer)
    assert not crew()
    weights.close()
    transfer.close()
    assert_nothing_held(device)


@pytest.mark.parametrize("verify", [False, True])
def test_a_file_truncated_meanwhile_is_noticed_and_named(tmp_path, crew, verify: bool) -> None:
    model, device = noisy_model(tmp_path, 40), Meddling(2, link_bytes_per_s=50e6)
    device.meddle = lambda source, nbytes: os.truncate(model.path, 100)
    with pytest.raises(FileChangedError, match="truncated"):
        run_load(model, device, make_transfer("crewed", device), verify=verify)
    assert_nothing_held(device)
    assert not crew()


@pytest.mark.parametrize("proves", [False, True])
def test_a_byte_flipped_in_the_ring_is_found_and_named(tmp_path, proves: bool) -> None:
    model, device = noisy_model(tmp_path), Meddling(3)

    def flip(source: int, nbytes: int) -> None:
        import ctypes

        ctypes.c_ubyte.from_address(source + nbytes // 2).value ^= 1

    device.meddle = flip
    with pytest.raises(ResidencyError, match=r"blk\.\d+\.w\d+\.weight: device bytes from byte"):
        run_load(model, device, make_transfer("crewed", device, proves=proves), verify=True)
    assert_nothing_held(device)


def test_the_processes_take_the_checksums(tmp_path, monkeypatch) -> None:
    model, device = noisy_model(tmp_path), HostDevice()
    monkeypatch.setattr("streamer.transfer.crewed_ring.checksum_at", None)  # none is left to the conductor
    weights, ledger = run_load(model, device, make_transfer("crewed", device, proves=True), verify=True)
    assert_exact(model, device, weights)
    assert ledger.statistics().phase_seconds[Phase.VERIFY] >= 0.0
    device.close()


def test_checksums_of_processes_that_are_killed_are_taken_by_the_conductor(tmp_path, crew) -> None:
    model, device = noisy_model(tmp_path), Meddling(3, link_bytes_per_s=50e6)
    transfer = make_transfer("crewed", device, proves=True)
    device.meddle = lambda source, nbytes: kill_all(transfer)
    weights, _ = run_load(model, device, transfer, verify=True)
    assert_exact(model, device, weights)
    weights.close()
    transfer.close()
    assert_nothing_held(device)
    assert not crew()


# ---- memory and files


def test_a_smaller_ring_with_a_warning(tmp_path, caplog) -> None:
    model = noisy_model(tmp_path)
    device = HostDevice(pinned_limit=3 * CHUNK)
    weights, _ = run_load(model, device, make_transfer("crewed", device))  # asks for 8 chunks, gets 2
    assert_exact(model, device, weights)
    assert device.statistics().peak_pinned_bytes == 2 * CHUNK
    assert "event=smaller_ring" in caplog.text
    device.close()


def test_no_pinned_memory_at_all_is_an_error(tmp_path, crew) -> None:
    model, device = noisy_model(tmp_path), HostDevice(pinned_limit=100)
    with pytest.raises(DeviceMemoryError, match="pinned memory: asked"):
        run_load(model, device, make_transfer("crewed", device))
    assert_nothing_held(device)
    assert not crew()


@pytest.mark.parametrize(("direct", "proves"), [(True, False), (True, True), (False, False)])
def test_a_cold_file_is_read_around_or_dropped_from_the_page_cache(tmp_path, direct, proves) -> None:
    class Kind(Mapping):
        def open_direct(self) -> bool:
            return direct and super().open_direct()

    model = build(
        tmp_path,
        [Piece(4 * MIB + 33, layer=i, data=noise(4 * MIB + 33, i)) for i in range(3)],
        chunk_nbytes=MIB,
    )
    with model.path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with Mapping(model.directory.shards[0]) as probe:
        if probe.resident_bytes():
            pytest.skip("this file system does not evict")
        device = HostDevice()
        transfer = make_transfer("crewed", device, chunk_nbytes=MIB, proves=proves)
        weights, ledger = run_load(model, device, transfer, verify=True, open_source=Kind)
        assert_exact(model, device, weights)
        assert ledger.statistics().storage_bytes == model.plan.nbytes
        assert probe.resident_bytes() < model.plan.nbytes // 8
        device.close()


def test_files_of_the_caller_stay_known_to_the_processes(tmp_path, crew) -> None:
    model, device = noisy_model(tmp_path), HostDevice()
    transfer = make_transfer("crewed", device)
    with Mapping(model.directory.shards[0]) as source:
        for _ in range(2):
            weights, _ = run_load(model, device, transfer, sources=[source])
            assert_exact(model, device, weights)
            assert len(crew()) == 2
            weights.close()
        transfer.close()
    assert not crew()
    assert_nothing_held(device)


def test_the_trace_tells_what_each_process_did(tmp_path) -> None:
    model, device, tracer = noisy_model(tmp_path), HostDevice(), RecordingTracer()
    transfer = CrewedRing(device, processes=2, chunk_nbytes=CHUNK, ring_nbytes=8 * CHUNK, piece_nbytes=PAGE)
    run_load(model, device, transfer, tracer=tracer)
    lanes = {record.lane for record in tracer.records()}
    assert {"stage 0", "stage 1"} & lanes
    assert all(record.end_s >= record.start_s for record in tracer.records())
    device.close()
