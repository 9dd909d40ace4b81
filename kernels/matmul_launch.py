"""Launches of the product kernels, and their geometry. What to launch when: cuda_matmul.py.

Geometry is pure. All launches go to a given stream, allocate nothing, may be captured, and carry programmatic
dependent launch: a kernel reads weights before, activations only after its predecessor has ended.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamer.gguf.quants import QuantType
from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.launch import KernelSource, ModuleSpec
from streamer.kernels.matmul_arguments import (
    ACTIVATIONS,
    FLOATS,
    MAX_MATRICES,
    DequantizeParams,
    DeviceMatrix,
    EmbedParams,
    GemvParams,
    MmaParams,
    NextRows,
    Output,
    QuantizedRows,
    RowsParams,
)
from streamer.kernels.ops import Activation
from streamer.plan.layouts import PLANES

GEMV_TOKENS = (1, 2, 4, 8)
GEMV_ROWS = 2  # rows a group takes at once
DIRECT_TOKENS = 16  # most tokens of mma_direct
STAGE = 256  # elements of K a stage of mma_tiled holds
PITCH = 2 * STAGE + 16
COUNTERS_NBYTES = 1 << 17
PARTIAL_NBYTES = 32 << 20  # sums of mma_tiled's splits of K

# Elements of a chunk (quants.cuh): what one lane takes at a time.
CHUNK = {t: 16 if t in FLOATS or t is QuantType.Q8_0 else 32 for t in (*PLANES, *FLOATS)} | {
    QuantType.Q2_K: 64,
    QuantType.Q3_K: 64,
}


# ---- geometry: pure ------------------------------------------------------------------------------


def blocks_a_multiprocessor(type: QuantType, n_tokens: int) -> int:
    """Blocks of 256 that a gemv instance is compiled for: as many as its registers allow without a spill."""
    if n_tokens == 1:
        return 6 if type in (QuantType.Q8_0, QuantType.F16, QuantType.BF16) else 3 if type in _WIDE else 4
    if n_tokens == 2:
        return 4 if type is QuantType.Q8_0 else 2
    return 2 if type is QuantType.Q8_0 or (n_tokens == 4 and type not in _WIDE) else 1


_WIDE = frozenset(
    {QuantType.Q2_K, QuantType.Q3_K, QuantType.Q5_K, QuantType.F32}
)  # more registers than others


@dataclass(frozen=True)
class GemvVariant:
    """How gemv is built and cut; zeros: what the tables say. benchmarks/kernels.py tries others."""

    rows: int = GEMV_ROWS  # that a group takes at once
    threads: int = 0  # lanes a group
    blocks: int = 0  # of 256 that must fit a multiprocessor
    ahead: bool = False  # load the next chunk while computing


def gemv_name(
    type: QuantType,
    n_tokens: int,
    activation_bytes: int,
    gated: bool,
    variant: GemvVariant = GemvVariant(),
) -> str:
    nbytes = 1 if type in FLOATS else activation_bytes
    blocks = variant.blocks or blocks_a_multiprocessor(type, n_tokens)
    flags = str(gated).lower(), blocks, str(variant.ahead).lower()
    return f"gemv<{type.name}, {n_tokens}, {variant.rows}, {nbytes}, {flags[0]}, {flags[1]}, {flags[2]}>"


def group_threads(chunks: int) -> int:
    """Lanes that share a row of so many chunks: a power of two from 8 to 256 that leaves few of them idle."""
    if chunks <= 64:
        return max(8, 1 << (chunks - 1).bit_length())

    def used(threads: int) -> float:
        return chunks / (threads * -(-chunks // threads))

    return max((t for t in (256, 128, 64, 32)), key=lambda t: (min(used(t), 0.85), t))


@dataclass(frozen=True)
class GemvShape:
    threads: int  # a group
    block: int
    tiles: int  # groups of rows in all
    rows: int  # results a group

    @property
    def grid(self) -> int:
        return -(-self.tiles * self.threads // self.block)


def gemv_shape(
    outputs: Sequence[Output], variant: GemvVariant, *, gated: bool, multiprocessors: int = 132
) -> GemvShape:
    """Blocks of 256 threads, smaller ones where a launch would leave multiprocessors without work."""
    matrix = outputs[0].matrix
    threads = variant.threads or group_threads(matrix.n_in // CHUNK[matrix.type])
    results = variant.rows // 2 if gated else variant.rows
    counted = outputs[:1] if gated else outputs
    tiles = sum(-(-o.matrix.n_out // results) for o in counted)
    block = 256
    while block > max(threads, 64) and tiles * threads // block < 2 * multiprocessors:
        block //= 2
    # what one block computes must lie in one group of 32 rows, for `next`
    return GemvShape(threads, max(threads, min(block, 32 // results * threads)), tiles, results)


@dataclass(frozen=True)
class TiledShape:
    n_tiles: int  # mma n-tiles of 8 tokens
    tile: int  # rows of the result a block
    tiles: int
    token_tiles: int
    splits: int
    results: int  # floats of partial sums a block

    @property
    def shared(self) -> int:
        return 2 * self.n_tiles * 8 * PITCH

    @property
    def partial_nbytes(self) -> int:
        return 4 * self.token_tiles * self.tiles * self.splits * self.results if self.splits > 1 else 0


def tiled_shape(
    outputs: Sequence[Output], n_tokens: int, *, gated: bool, splits: int = 0, multiprocessors: int = 132
) -> TiledShape:
    """Rows a block follow from the type; K is split until every multiprocessor has a block."""
    matrix = outputs[0].matrix
    row_warps = CHUNK[matrix.type] // 8
    n_tiles = 4 if n_tokens <= 32 else 8
    tile = row_warps * (16 if gated else 32)
    counted = outputs[:1] if gated else outputs
    tiles = sum(-(-o.matrix.n_out // tile) for o in counted)
    token_tiles = -(-n_tokens // (8 * n_tiles))
    results = row_warps * 2 * n_tiles * 4 * 32
    stages = -(-matrix.n_in // STAGE)
    most = min(16, max(1, stages // 2), max(1, PARTIAL_NBYTES // (4 * results * tiles * token_tiles)))
    wanted = splits or round(multiprocessors / (tiles * token_tiles))
    return TiledShape(n_tiles, tile, tiles, token_tiles, max(1, min(wanted, most)), results)


def product_modules(type: QuantType, *, gemv_tokens: int, activation_bytes: int) -> list[ModuleSpec]:
    """What products with weights of `type` need compiled, one compilation each."""
    name, gates = type.name, ("false", "true")
    tokens = [m for m in GEMV_TOKENS if m <= gemv_tokens or type is QuantType.F32]
    specs = [
        ModuleSpec(
            "gemv.cu", tuple(gemv_name(type, m, activation_bytes, g) for m in tokens for g in (False, True))
        )
    ]
    if type is not QuantType.F32:
        specs.append(
            ModuleSpec("mma_direct.cu", tuple(f"mma_direct<{name}, {n}, {g}>" for n in (1, 2) for g in gates))
        )
        specs.append(
            ModuleSpec("mma_tiled.cu", tuple(f"mma_tiled<{name}, {n}, {g}>" for n in (4, 8) for g in gates))
        )
    specs.append(ModuleSpec("dequantize.cu", (f"dequantize<{name}, __nv_bfloat16>", f"embed<{name}>")))
    return specs


ROWS_MODULE = ModuleSpec("quantize.cu", ("norm_rows<1>", "norm_rows<2>", "norm_rows<4>"))


# ---- launches ------------------------------------------------------------------------------------


class ProductLauncher:
    """One launch a method. Scratch: `counters` (zeroed, COUNTERS_NBYTES), `partial` (PARTIAL_NBYTES)."""

    def __init__(self, store: KernelSource, *, counters: int, partial: int, multiprocessors: int) -> None:
        self._store, self._counters, self._partial = store, counters, partial
        self._multiprocessors = multiprocessors
        self._kernels: dict[tuple[str, int], Any] = {}

    def gemv(
        self,
        outputs: Sequence[Output],
        x: QuantizedRows | DeviceArray,
        n_tokens: int,
        *,
        stream: int,
        activation: Activation | None = None,
        squares: tuple[int, float] | None = None,
        next_rows: NextRows | None = None,
        variant: GemvVariant = GemvVariant(),
    ) -> None:
        """Products of any number of tokens (a pass over the weights for every 8) with matrices of one type.

        `activation`: outputs[0] is the gate, outputs[1] up, the result goes to outputs[0].out. `squares`:
        (address, epsilon) of the deferred norm. x: f32 rows for float types, else quantized ones.
        """
        matrix, gated = outputs[0].matrix, activation is not None
        tokens = min((m for m in GEMV_TOKENS if m >= n_tokens), default=GEMV_TOKENS[-1])
        shape = gemv_shape(outputs, variant, gated=gated, multiprocessors=self._multiprocessors)
        params = GemvParams(n_tokens=n_tokens, K=matrix.n_in, activation=ACTIVATIONS[activation])
        params.log_threads = shape.threads.bit_length() - 1
        params.n_matrices = _fill(params.matrices, outputs, shape.rows, gated)
        activation_bytes = 1
        if isinstance(x, DeviceArray):
            assert matrix.is_float
            assert x.dtype == "f32"
            assert x.row_stride == matrix.n_in
            params.x_float = x.address
        else:
            params.x = x.argument
            activation_bytes = 2 if x.lo else 1
        if squares:
            params.squares, params.epsilon = squares
        if next_rows:
            assert len(outputs) == 1 + gated
            assert matrix.n_out % 32 == 0
            params.next, params.next_norm, params.next_squares = (
                next_rows.to.argument,
                next_rows.norm,
                next_rows.squares,
            )
            assert not matrix.is_float
            assert bool(next_rows.to.lo) == (activation_bytes == 2)
            params.counters = self._counters
        name = gemv_name(matrix.type, tokens, activation_bytes, gated, variant)
        grid = (shape.grid, -(-n_tokens // tokens), 1)
        self._kernel("gemv.cu", name, GemvParams)(grid, shape.block, params, stream=stream)

    def mma(
        self,
        outputs: Sequence[Output],
        x: DeviceArray,
        *,
        stream: int,
        activation: Activation | None = None,
        splits: int = 0,
        tiled: bool | None = None,
    ) -> None:
        """Products of the rows of x (bf16, contiguous) with up to 4 matrices of one type, on tensor cores."""
        matrix, gated, n_tokens = outputs[0].matrix, activation is not None, x.rows
        assert x.dtype == "bf16"
        assert x.row_stride == x.columns == matrix.n_in
        params = MmaParams(x=x.address, n_tokens=n_tokens, K=matrix.n_in, activation=ACTIVATIONS[activation])
        params.out_bf16 = outputs[0].out.dtype == "bf16"
        gate = str(gated).lower()
        if not (n_tokens > DIRECT_TOKENS if tiled is None else tiled):
            params.n_matrices, params.n_splits = _fill(params.matrices, outputs, 16, gated), 1
            tiles = sum(-(-o.matrix.n_out // 16) for o in (outputs[:1] if gated else outputs))
            name = f"mma_direct<{matrix.type.name}, {1 if n_tokens <= 8 else 2}, {gate}>"
            self._kernel("mma_direct.cu", name, MmaParams)((tiles, 1, 1), 256, params, stream=stream)
            return
        shape = tiled_shape(
            outputs, n_tokens, gated=gated, splits=splits, multiprocessors=self._multiprocessors
        )
        params.n_matrices, params.n_splits = _fill(params.matrices, outputs, shape.tile, gated), shape.splits
        params.partial, params.counters = self._partial, self._counters
        name = f"mma_tiled<{matrix.type.name}, {shape.n_tiles}, {gate}>"
        kernel = self._kernel("mma_tiled.cu", name, MmaParams, shared=shape.shared)
        kernel((shape.tiles, shape.splits, shape.token_tiles), 256, params, stream=stream)

    def rows(self, params: RowsParams, *, stream: int) -> None:
        """Norm, gate, quantize: a block a token where a row must be seen as a whole, else by pieces of it."""
        if not (params.weight or params.residual):
            pieces = -(-params.K // 1024)
            kernel = self._kernel("quantize.cu", "elements", RowsParams)
            kernel((pieces, min(params.n_tokens, 16384), 1), 256, params, stream=stream)
            return
        vectors = next(v for v in (1, 2, 4) if 4096 * v >= params.K)
        threads = -(-params.K // (4 * vectors))
        kernel = self._kernel("quantize.cu", f"norm_rows<{vectors}>", RowsParams)
        kernel((params.n_tokens, 1, 1), -(-threads // 32) * 32, params, stream=stream)

    def dequantize(
        self, matrix: DeviceMatrix, out: int, first_row: int, n_rows: int, *, stream: int, dtype: str = "bf16"
    ) -> None:
        """Rows first_row .. of the matrix to (n_rows, n_in) at `out`, "bf16" or "f32"."""
        params = DequantizeParams(_planes(matrix), out, first_row, n_rows, matrix.n_in)
        name = f"dequantize<{matrix.type.name}, {'__nv_bfloat16' if dtype == 'bf16' else 'float'}>"
        chunks = n_rows * matrix.n_in // CHUNK[matrix.type]
        grid = (min(-(-chunks // 256), 32 * self._multiprocessors), 1, 1)
        self._kernel("dequantize.cu", name, DequantizeParams)(grid, 256, params, stream=stream)

    def embed(
        self,
        table: DeviceMatrix,
        ids: int,
        out: DeviceArray,
        *,
        stream: int,
        scale: float = 1.0,
        last: tuple[int, int] = (0, 0),
    ) -> None:
        """Rows of the table by id to out (n_tokens, n_in) f32.

        `last`: addresses of the last ids by slot and of the tokens' slots, for negative ids.
        """
        params = EmbedParams(_planes(table), out.address, ids, *last, scale, table.n_out, table.n_in)
        grid = (-(-(table.n_in // CHUNK[table.type]) // 256), out.rows, 1)
        self._kernel("dequantize.cu", f"embed<{table.type.name}>", EmbedParams)(
            grid, 256, params, stream=stream
        )

    def _kernel(self, source: str, name: str, params: type, *, shared: int = 0) -> Any:
        kernel = self._kernels.get((name, shared))
        if kernel is None:
            kernel = self._kernels[name, shared] = self._store.kernel(source, name, (params,), shared=shared)
        return kernel


def _planes(matrix: DeviceMatrix) -> Any:
    return (ctypes.c_uint64 * 4)(*matrix.planes)


def _fill(to: Any, outputs: Sequence[Output], tile: int, gated: bool) -> int:
    """Write the matrices; tiles are numbered through them."""
    assert len(outputs) <= MAX_MATRICES
    assert len({o.matrix.type for o in outputs}) == 1
    first = 0
    for entry, output in zip(to, outputs, strict=False):
        matrix = output.matrix
        for name, address in zip(("p0", "p1", "p2", "p3"), matrix.planes, strict=False):
            setattr(entry, name, address)
        entry.out, entry.bias, entry.residual = output.out.address, output.bias, output.residual
        entry.rows, entry.out_stride = matrix.n_out, output.out.row_stride
        entry.first_tile = 0 if gated else first
        first += -(-matrix.n_out // tile)
    return len(outputs)
