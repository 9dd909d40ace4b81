"""Launches of the product kernels, and their geometry. What to launch when: cuda_matmul.py.

Geometry is pure. All launches go to a given stream, allocate nothing, may be captured, and carry programmatic
dependent launch: a kernel reads weights before, activations only after its predecessor has ended.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from streamer.gguf.quants import QuantType
from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.launch import KernelSource, ModuleSpec
from streamer.kernels.matmul_arguments import (
    ACTIVATIONS,
    CHUNK,
    FLOATS,
    DequantizeParams,
    DeviceMatrix,
    EmbedParams,
    GemvParams,
    MmaParams,
    Output,
    QuantizedRows,
    RingParams,
    RowsParams,
    SourceRows,
    fill_matrices,
)
from streamer.kernels.matmul_ring import RINGS, RingVariant, ring_modules, ring_shape
from streamer.kernels.ops import Activation

GEMV_TOKENS = (1, 2, 4, 8)
DIRECT_TOKENS = 16  # most tokens of mma_direct
STAGE = 256  # elements of K a stage of mma_tiled holds
PITCH = 2 * STAGE + 16
COUNTERS_NBYTES = 1 << 17
PARTIAL_NBYTES = 32 << 20  # sums of mma_tiled's splits of K

# ---- geometry: pure ------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemvBuild:
    """Of gemv: rows a group takes at once, blocks of 256 that its registers allow without a spill."""

    rows: int
    blocks: int
    threads: int = 0  # a group; 0: by the width


def gemv_build(type: QuantType, n_tokens: int) -> GemvBuild:
    """Four rows at once where registers allow share loads of activations (H200, Q8_0: 0.89 for 0.80)."""
    if type is QuantType.Q8_0:
        return {1: GemvBuild(4, 3), 2: GemvBuild(4, 3)}.get(n_tokens, GemvBuild(2, 2))
    if type in (QuantType.F16, QuantType.BF16) and n_tokens <= 2:
        return GemvBuild(4, 3 if n_tokens == 1 else 2)
    if n_tokens == 1:
        return GemvBuild(2, 3 if type in _WIDE else 4)
    return GemvBuild(2, 2 if n_tokens == 2 or (n_tokens == 4 and type not in _WIDE) else 1)


_WIDE = frozenset(
    {QuantType.Q2_K, QuantType.Q3_K, QuantType.Q5_K, QuantType.F32}
)  # more registers than others


def gemv_name(
    type: QuantType, n_tokens: int, activation_bytes: int, gated: bool, build: GemvBuild | None = None
) -> str:
    nbytes = 1 if type in FLOATS else activation_bytes
    build = build or gemv_build(type, n_tokens)
    return f"gemv<{type.name}, {n_tokens}, {build.rows}, {nbytes}, {str(gated).lower()}, {build.blocks}>"


def group_threads(chunks: int, most: int = 256) -> int:
    """Lanes that share a row of so many chunks: a power of two from 8 to `most` that leaves few idle."""
    if chunks <= 64:
        return max(8, 1 << (chunks - 1).bit_length())

    def used(threads: int) -> float:
        return chunks / (threads * -(-chunks // threads))

    return max((t for t in (256, 128, 64, 32) if t <= most), key=lambda t: (min(used(t), 0.85), t))


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
    outputs: Sequence[Output], build: GemvBuild, *, gated: bool, multiprocessors: int = 132
) -> GemvShape:
    """Blocks of 256 threads, smaller ones where a launch would leave multiprocessors without work."""
    matrix = outputs[0].matrix
    threads = build.threads or group_threads(matrix.n_in // CHUNK[matrix.type], 128)
    results = build.rows // 2 if gated else build.rows
    counted = outputs[:1] if gated else outputs
    tiles = sum(-(-o.matrix.n_out // results) for o in counted)
    block = 256
    while block > max(threads, 64) and tiles * threads // block < 2 * multiprocessors:
        block //= 2
    return GemvShape(threads, max(threads, block), tiles, results)


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


def product_modules(
    type: QuantType, *, gemv_tokens: int, activation_bytes: int, rings: Sequence[RingVariant] | None = None
) -> list[ModuleSpec]:
    """What products with weights of `type` need compiled, one compilation each. `rings`: else as in RINGS."""
    rings = RINGS.get(type, ()) if rings is None else rings
    name, gates = type.name, ("false", "true")
    tokens = [m for m in GEMV_TOKENS if m <= gemv_tokens or type is QuantType.F32]
    specs = [
        ModuleSpec(
            "gemv.cu", tuple(gemv_name(type, m, activation_bytes, g) for m in tokens for g in (False, True))
        )
    ]
    specs += ring_modules(type, gemv_tokens, activation_bytes, rings)
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
        self.build: Callable[[QuantType, int], GemvBuild] = gemv_build  # the laboratory sets others
        self._kernels: dict[tuple[str, int], Any] = {}

    def gemv(
        self,
        outputs: Sequence[Output],
        x: QuantizedRows | DeviceArray,
        n_tokens: int,
        *,
        stream: int,
        activation: Activation | None = None,
        build: GemvBuild | None = None,
    ) -> None:
        """Products of any number of tokens (a pass over the weights for every 8) with matrices of one type.

        `activation`: outputs[0] is the gate, outputs[1] up, the result goes to outputs[0].out.
        x: f32 rows for float types, else quantized ones. `build`: else what `self.build` says.
        """
        matrix, gated = outputs[0].matrix, activation is not None
        tokens = min((m for m in GEMV_TOKENS if m >= n_tokens), default=GEMV_TOKENS[-1])
        build = build or self.build(matrix.type, tokens)
        shape = gemv_shape(outputs, build, gated=gated, multiprocessors=self._multiprocessors)
        params = GemvParams(n_tokens=n_tokens, K=matrix.n_in, activation=ACTIVATIONS[activation])
        params.log_threads, params.n_matrices = shape.threads.bit_length() - 1, len(outputs)
        fill_matrices(params.matrices, outputs, shape.rows, gated=gated)
        activation_bytes = 1
        if isinstance(x, DeviceArray):
            assert matrix.is_float
            assert x.dtype == "f32"
            assert x.row_stride == matrix.n_in
            params.x_float = x.address
        else:
            params.x = x.argument
            activation_bytes = 2 if x.lo else 1
        name = gemv_name(matrix.type, tokens, activation_bytes, gated, build)
        grid = (shape.grid, -(-n_tokens // tokens), 1)
        self._kernel("gemv.cu", name, GemvParams)(grid, shape.block, params, stream=stream)

    def gemv_ring(
        self,
        outputs: Sequence[Output],
        x: QuantizedRows | SourceRows,
        n_tokens: int,
        *,
        stream: int,
        activation: Activation | None = None,
        variant: RingVariant,
        activation_bytes: int = 2,
    ) -> None:
        """As `gemv` where `ring_fits`; f32 rows are normed and quantized by the launch itself."""
        matrix, gated = outputs[0].matrix, activation is not None
        shape = ring_shape(
            outputs,
            n_tokens,
            activation_bytes,
            variant,
            gated=gated,
            multiprocessors=self._multiprocessors,
        )
        params = RingParams(n_tokens=n_tokens, K=matrix.n_in, activation=ACTIVATIONS[activation])
        params.n_matrices, params.stages = len(outputs), shape.stages
        params.tiles = fill_matrices(params.matrices, outputs, shape.rows, gated=gated)
        if isinstance(x, SourceRows):
            assert x.x.dtype == "f32"
            params.x_float, params.x_stride = x.x.address, x.x.row_stride
            params.norm, params.epsilon = x.norm, x.epsilon
        else:
            params.x = x.argument
        kernel = self._kernel("gemv_ring.cu", shape.name, RingParams, shared=shape.shared)
        kernel((shape.blocks, -(-n_tokens // shape.tokens), 1), shape.threads, params, stream=stream)

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
            params.n_matrices, params.n_splits = len(outputs), 1
            tiles = fill_matrices(params.matrices, outputs, 16, gated=gated)
            name = f"mma_direct<{matrix.type.name}, {1 if n_tokens <= 8 else 2}, {gate}>"
            self._kernel("mma_direct.cu", name, MmaParams)((tiles, 1, 1), 256, params, stream=stream)
            return
        shape = tiled_shape(
            outputs, n_tokens, gated=gated, splits=splits, multiprocessors=self._multiprocessors
        )
        params.n_matrices, params.n_splits = len(outputs), shape.splits
        fill_matrices(params.matrices, outputs, shape.tile, gated=gated)
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
