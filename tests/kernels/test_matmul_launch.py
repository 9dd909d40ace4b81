"""Geometry of the product kernels and their argument blocks, without a GPU."""

import ctypes
import re

import pytest

from streamer.gguf.quants import QuantType
from streamer.kernels.compile import KERNEL_DIRECTORY
from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.matmul_arguments import (
    CHUNK,
    DequantizeParams,
    EmbedParams,
    GemvParams,
    MmaParams,
    Output,
    RingParams,
    RowsParams,
    device_matrix,
)
from streamer.kernels.matmul_launch import (
    PARTIAL_NBYTES,
    STAGE,
    GemvBuild,
    gemv_shape,
    group_threads,
    product_modules,
    tiled_shape,
)
from streamer.kernels.matmul_ring import (
    MAX_STAGES,
    RINGS,
    RingVariant,
    ring_fits,
    ring_shape,
    ring_variant,
    rows_nbytes,
    stage_nbytes,
)
from streamer.kernels.planes import CodebookParams, PlanesParams
from streamer.plan.layouts import PLANES

SHAPES = [(576, 960), (576, 576), (1536, 576), (640, 2048), (4096, 6144), (4096, 14336), (14336, 4096)]
SHAPES += [(4096, 128256), (32, 1), (96, 7), (17408, 5120)]


def output(type: QuantType, n_in: int, n_out: int) -> Output:
    return Output(device_matrix(type, 0, n_in, n_out), DeviceArray(0, 1, n_out))


@pytest.mark.parametrize(
    ("source", "block"),
    [
        ("gemv.cu", GemvParams),
        ("gemv_ring.cu", RingParams),
        ("mma.cuh", MmaParams),
        ("quantize.cu", RowsParams),
        ("dequantize.cu", DequantizeParams),
        ("dequantize.cu", EmbedParams),
        ("planes.cu", PlanesParams),
        ("codebooks.cu", CodebookParams),
    ],
)
def test_argument_block_has_the_size_the_kernel_asserts(source: str, block: type[ctypes.Structure]) -> None:
    text = (KERNEL_DIRECTORY / source).read_text()
    stated = re.search(rf"static_assert\(sizeof\({block.__name__}\) == (\d+)", text)
    assert stated
    assert ctypes.sizeof(block) == int(stated[1])


@pytest.mark.parametrize(
    "source", ["gemv.cu", "gemv_ring.cu", "mma_direct.cu", "mma_tiled.cu", "quantize.cu", "dequantize.cu"]
)
def test_instances_checked_without_a_gpu_are_those_in_use(source: str) -> None:
    declared = re.findall(r"^// instance: (.*)$", (KERNEL_DIRECTORY / source).read_text(), re.MULTILINE)
    used = {"norm_rows<1>", "norm_rows<2>", "norm_rows<4>"}
    for type in CHUNK:
        for module in product_modules(type, gemv_tokens=8, activation_bytes=2):
            used |= set(module.instances)
    assert declared
    assert set(declared) <= used


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n_in", "n_out"), SHAPES)
def test_gemv_covers_every_row_once(n_in: int, n_out: int, gated: bool) -> None:
    outputs = [output(QuantType.Q8_0, n_in, n_out)] * 2 if gated else [output(QuantType.Q8_0, n_in, n_out)]
    for rows in (2, 4):
        shape = gemv_shape(outputs, GemvBuild(rows, 3), gated=gated)
        assert shape.tiles * shape.rows >= n_out > (shape.tiles - 1) * shape.rows
        assert shape.grid * shape.block >= shape.tiles * shape.threads
        assert shape.block % shape.threads == 0
        assert 64 <= shape.block <= 256


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 2, 4])
@pytest.mark.parametrize(("n_in", "n_out"), SHAPES)
@pytest.mark.parametrize("type", RINGS, ids=lambda t: t.name)
def test_ring_and_activations_fit_shared_memory(
    type: QuantType, n_in: int, n_out: int, n_tokens: int, gated: bool
) -> None:
    variant = ring_variant(RINGS[type], type, n_in, n_tokens, 2)
    if variant is None:
        pytest.skip("left to gemv")
    outputs = [output(type, n_in, n_out)] * (2 if gated else 1)
    shape = ring_shape(outputs, n_tokens, 2, variant, gated=gated)
    assert shape.tokens >= n_tokens
    assert 2 <= shape.stages <= MAX_STAGES
    ring = variant.warps * shape.stages * stage_nbytes(type, variant)
    assert ring + shape.tokens * rows_nbytes(type, n_in, 2) <= shape.shared
    assert 2 * (shape.shared + 2048) <= 228 << 10  # two launches fit a multiprocessor


def test_ring_takes_widths_whose_planes_are_whole_pieces() -> None:
    assert ring_fits(QuantType.Q8_0, 4096)
    assert ring_fits(QuantType.Q6_K, 14336)
    assert not ring_fits(QuantType.Q6_K, 5120)  # a row's f16 scales are 40 bytes
    assert not ring_fits(QuantType.Q8_0, 576)
    assert not ring_fits(QuantType.F32, 4096)


def test_ring_of_wide_rows_has_smaller_pieces_until_gemv_takes_over() -> None:
    def chosen(n_in: int, n_tokens: int) -> RingVariant | None:
        return ring_variant(RINGS[QuantType.Q4_K], QuantType.Q4_K, n_in, n_tokens, 2)

    assert chosen(4096, 1) == chosen(4096, 2) == chosen(14336, 1) == RingVariant(rows=4)
    assert chosen(14336, 2) == chosen(17408, 1) == RingVariant(rows=2)
    assert chosen(17408, 4) is None
    assert chosen(4000, 1) is None
    assert ring_variant((), QuantType.Q4_K, 4096, 1, 2) is None


@pytest.mark.parametrize("type", PLANES, ids=lambda t: t.name)
def test_kernels_know_the_bytes_of_planes(type: QuantType) -> None:
    text = (KERNEL_DIRECTORY / "quants.cuh").read_text()
    body = re.search(rf"struct {type.name}( : \w+)? {{(.*?)struct Raw", text, re.DOTALL)
    assert body
    stated = tuple(int(n) for n in re.findall(r"i == \d \? (\d+)", body[2]))
    eight = 8 * CHUNK[type]
    assert stated == tuple(nbytes * eight // type.block_elements for nbytes in PLANES[type])


def test_groups_leave_few_lanes_idle() -> None:
    for chunks in range(1, 2000):
        threads = group_threads(chunks)
        assert threads in (8, 16, 32, 64, 128, 256)
        if chunks > 64:
            assert chunks / (threads * -(-chunks // threads)) > 0.66


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n_tokens", [17, 32, 33, 64, 65, 128])
@pytest.mark.parametrize(("n_in", "n_out"), SHAPES)
@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.Q4_0, QuantType.Q4_K, QuantType.Q2_K])
def test_tiles_cover_everything_and_parts_fit(
    type: QuantType, n_in: int, n_out: int, n_tokens: int, gated: bool
) -> None:
    if n_in % type.block_elements:
        pytest.skip("rows are whole quant blocks")
    outputs = [output(type, n_in, n_out)] * (2 if gated else 1)
    shape = tiled_shape(outputs, n_tokens, gated=gated)
    assert shape.tiles * shape.tile >= n_out > (shape.tiles - 1) * shape.tile
    assert shape.token_tiles * shape.n_tiles * 8 >= n_tokens
    assert shape.partial_nbytes <= PARTIAL_NBYTES
    assert 1 <= shape.splits <= max(1, -(-n_in // STAGE) // 2)  # every split has work


def test_every_type_with_planes_has_a_chunk() -> None:
    for type, planes in PLANES.items():
        assert planes[0] * CHUNK[type] == 16 * type.block_elements  # 16 bytes of quants a chunk
