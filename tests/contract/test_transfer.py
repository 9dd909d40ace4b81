"""What every strategy must do on every device: the file's bytes, counted once, nothing left over."""

import numpy as np
import pytest
from pipeline_support import (
    CHUNK,
    STRATEGIES,
    Piece,
    assert_exact,
    assert_nothing_held,
    build,
    load_threads,
    make_transfer,
    run_load,
    uploaded,
)

from streamer.device.base import Device


def random_bytes(nbytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_device_bytes_are_the_files_bytes(tmp_path, device: Device, strategy: str) -> None:
    sizes = [1, 31, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 300_001]
    model = build(tmp_path, [Piece(n, layer=i // 3, data=random_bytes(n, i)) for i, n in enumerate(sizes)])
    transfer = make_transfer(strategy, device)
    weights, ledger = run_load(model, device, transfer, verify=True)
    assert_exact(model, device, weights)
    assert uploaded(device) == sum(sizes)  # each byte once
    assert ledger.statistics().verified
    weights.close()
    transfer.close()
    assert_nothing_held(device)
    assert load_threads() == []


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_tensors_at_multiples_of_a_slot(
    tmp_path, device: Device, strategy: str, count: int, delta: int
) -> None:
    nbytes = count * CHUNK + delta
    model = build(tmp_path, [Piece(nbytes, layer=i, data=random_bytes(nbytes, i)) for i in range(3)])
    transfer = make_transfer(strategy, device)
    weights, _ = run_load(model, device, transfer, verify=True)
    assert_exact(model, device, weights)
    transfer.close()


def test_several_shards(tmp_path, device: Device, strategy: str) -> None:
    pieces = [
        Piece(CHUNK + 100 * i, layer=i, shard=i % 3, data=random_bytes(CHUNK + 100 * i, i)) for i in range(6)
    ]
    model = build(tmp_path, pieces)
    transfer = make_transfer(strategy, device)
    weights, _ = run_load(model, device, transfer, verify=True)
    assert_exact(model, device, weights)
    transfer.close()


def test_a_transfer_loads_again_after_a_load(tmp_path, device: Device, strategy: str) -> None:
    model = build(tmp_path, [3 * CHUNK, 17, CHUNK])
    transfer = make_transfer(strategy, device)
    for _ in range(3):
        weights, _ledger = run_load(model, device, transfer)
        assert_exact(model, device, weights)
        weights.close()
    transfer.close()
    transfer.close()
    assert_nothing_held(device)


def test_pinned_memory_does_not_grow_with_the_model(tmp_path, device: Device, strategy: str) -> None:
    peaks = []
    for count in (10, 100):
        folder = tmp_path / str(count)
        folder.mkdir()
        model = build(folder, [Piece(2 * CHUNK, layer=i) for i in range(count)])
        transfer = make_transfer(strategy, device)
        weights, _ = run_load(model, device, transfer)
        weights.close()
        transfer.close()
        peaks.append(device.statistics().peak_pinned_bytes)
    assert peaks[0] == peaks[1]


def test_source_is_accounted(tmp_path, device: Device, strategy: str) -> None:
    model = build(tmp_path, [5 * CHUNK, 100])
    transfer = make_transfer(strategy, device)
    _, ledger = run_load(model, device, transfer)
    now = ledger.statistics()
    assert now.page_cache_bytes + now.storage_bytes == model.plan.nbytes
    assert now.page_cache_bytes == model.plan.nbytes  # written just now
    transfer.close()
