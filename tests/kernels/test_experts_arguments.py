"""What routed experts launch, without a GPU: argument blocks, bounds of grids, instances in use."""

import ctypes
import re

import numpy as np
import pytest

from streamer.gguf.quants import QuantType
from streamer.kernels.compile import KERNEL_DIRECTORY, declared_instances
from streamer.kernels.experts_arguments import (
    TILES,
    CombineParams,
    ExpertParams,
    RouteParams,
    TileParams,
    down_name,
    experts_a_lane,
    gate_up_name,
    most_tiles,
    refusal,
    tile_of,
    tiles_name,
    tiles_shared,
)
from streamer.kernels.matmul_launch import CHUNK
from streamer.kernels.ops import Experts, Linear, Weight

Q = QuantType


@pytest.mark.parametrize(
    ("source", "block"),
    [
        ("experts_route.cu", RouteParams),
        ("experts_route.cu", CombineParams),
        ("experts_gemv.cu", ExpertParams),
        ("experts_tiles.cu", TileParams),
    ],
)
def test_argument_block_has_the_size_the_kernel_asserts(source: str, block: type[ctypes.Structure]) -> None:
    text = (KERNEL_DIRECTORY / source).read_text()
    stated = re.search(rf"static_assert\(sizeof\({block.__name__}\) == (\d+)", text)
    assert stated
    assert ctypes.sizeof(block) == int(stated[1])


def test_instances_checked_without_a_gpu_are_those_in_use() -> None:
    types = sorted(CHUNK)
    used = {gate_up_name(g, u, n)[0] for g in types for u in types for n in (1, 2)}
    used |= {down_name(t, n) for t in types for n in (1, 2)}
    used |= {tiles_name(g, u, t, gated=True) for g in types for u in types for t in TILES}
    used |= {tiles_name(t, t, n, gated=False) for t in types for n in TILES}
    declared = [
        *declared_instances((KERNEL_DIRECTORY / "experts_gemv.cu").read_text()),
        *declared_instances((KERNEL_DIRECTORY / "experts_tiles.cu").read_text()),
    ]
    assert declared
    assert set(declared) <= used


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("n_pairs", "n_experts"), [(1, 8), (8, 128), (512, 128), (600, 1024), (4096, 4)])
def test_no_routing_needs_more_tiles_than_the_grid_has(n_pairs: int, n_experts: int, tile: int) -> None:
    rng = np.random.default_rng(n_pairs)
    most = min(n_pairs, n_experts)
    even = np.arange(n_pairs) % n_experts
    one_more = np.concatenate(
        [np.arange(most), np.zeros(n_pairs - most, int)]
    )  # one pair each, one has the rest
    for ids in (even, one_more, np.zeros(n_pairs, int), rng.integers(0, n_experts, n_pairs)):
        counts = np.bincount(ids, minlength=n_experts)
        assert (-(-counts // tile)).sum() <= most_tiles(n_pairs, n_experts, tile)


@pytest.mark.parametrize("n_experts", [1, 2, 8, 32, 33, 64, 128, 160, 512, 1024])
def test_a_warp_has_room_for_every_expert(n_experts: int) -> None:
    per = experts_a_lane(n_experts)
    assert 32 * per >= n_experts
    assert per == 1 or 16 * per < n_experts


def test_tiles_grow_with_the_pairs_an_expert_has() -> None:
    quantized, floats = frozenset({Q.Q8_0, Q.Q6_K}), frozenset({Q.Q8_0, Q.BF16})
    sizes = [tile_of(n, 8, 128, quantized) for n in (5, 64, 256, 1024, 2048, 4096)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (TILES[0], TILES[-1])
    assert tile_of(4096, 8, 128, floats) == 64


def test_shared_memory_of_the_largest_tile_fits_every_architecture() -> None:
    assert max(tiles_shared(t) for t in TILES) <= 99 * 1024


def experts(*, n_experts: int = 8, n_used: int = 2, n_ff: int = 48) -> Experts:
    def weight(*shape: int) -> Weight:
        return Weight("w", Q.BF16, shape, None)

    stack = weight(64, n_ff, n_experts)
    down = weight(n_ff, 64, n_experts)
    return Experts(Linear(weight(64, n_experts)), stack, stack, None, down, n_used)


def test_refusal_names_what_is_too_large() -> None:
    assert refusal(experts()) is None
    assert "1025 experts" in str(refusal(experts(n_experts=1025)))
    assert "33 experts a token" in str(refusal(experts(n_experts=64, n_used=33)))
    assert "64 x 40" in str(refusal(experts(n_ff=40)))
