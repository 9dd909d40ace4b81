"""Products on CUDA: which kernel for which type and how many tokens, and what activations it takes.

| tokens | weights | activations | kernel |
|---|---|---|---|
| few (`gemv_tokens`), types of `rings` | as resident | f32, or as gemv.cu | gemv_ring.cu |
| few, else; F32 weights always | as resident | quantized; f32 for floats | gemv.cu |
| to 16 | bf16 in registers | bf16 | mma_direct.cu |
| to `tiled_tokens` | bf16 in registers | bf16 | mma_tiled.cu |
| more | bf16 in scratch, or resident | bf16 | cuBLASLt |

Nothing here allocates after construction, waits, or reads back. With an arena without capacity nothing is
launched: a dry run that counts the temporaries.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from streamer.device.base import Buffer
from streamer.gguf.quants import QuantType
from streamer.kernels.cublas import WORKSPACE_NBYTES, CublasLt, ProductShape
from streamer.kernels.cuda_array import Arena, DeviceArray
from streamer.kernels.launch import KernelSource, ModuleSpec
from streamer.kernels.matmul_arguments import (
    ACTIVATIONS,
    MAX_MATRICES,
    DeviceMatrix,
    Output,
    QuantizedRows,
    RowsParams,
    SourceRows,
    device_matrix,
)
from streamer.kernels.matmul_launch import (
    COUNTERS_NBYTES,
    PARTIAL_NBYTES,
    ROWS_MODULE,
    ProductLauncher,
    product_modules,
)
from streamer.kernels.matmul_ring import LEAST_CAPABILITY, RINGS, RingVariant, ring_variant
from streamer.kernels.ops import Activation, Linear, Norm, Weight
from streamer.plan.plan import Layout

SCRATCH_NBYTES = 192 << 20  # bf16 weights on their way to cuBLASLt
# What `CudaMatmul` allocates for itself, in bytes, in this order.
PARTS = {
    "counters": COUNTERS_NBYTES,
    "partial": PARTIAL_NBYTES,
    "blas": WORKSPACE_NBYTES,
    "weights": SCRATCH_NBYTES,
}


@dataclass(frozen=True)
class ResidentWeight:
    """`Weight.handle` on CUDA: where the weight lies, and how."""

    address: int
    layout: Layout


@dataclass(frozen=True)
class MatmulOptions:
    gemv_tokens: int = 2  # up to so many tokens dp4a, then tensor cores
    # mma_tiled reads weights once for every 64 tokens (H200, 8B Q8_0, 128 tokens: 18.4 ms against 13).
    tiled_tokens: int = 64  # up to so many tokens weights go to registers, then through scratch to cuBLASLt
    tiled_tokens_bf16: int = 12  # of weights that need no scratch
    activation_bytes: int = 2  # of quantized activations: 1 is a little faster, 2 more exact than bf16
    rings: Mapping[QuantType, tuple[RingVariant, ...]] = field(default_factory=lambda: RINGS)  # others: gemv
    source_elements: int = 12288  # n_tokens * n_in up to which gemv_ring norms and quantizes its input itself


class Form(enum.Flag):
    """How a product wants its activations."""

    QUANTIZED = enum.auto()
    F32 = enum.auto()
    BF16 = enum.auto()
    SOURCE = enum.auto()  # as it came, with the norm still to apply


@dataclass
class Rows:
    """One (n_tokens, n_in) matrix of activations in the forms it has been prepared in."""

    n_tokens: int
    n_in: int
    quantized: QuantizedRows | None = None
    f32: DeviceArray | None = None
    bf16: DeviceArray | None = None
    source: SourceRows | None = None


def needed_modules(types: Iterable[QuantType], options: MatmulOptions) -> list[ModuleSpec]:
    """Every compilation that products with these types need. BF16 stands for types decoded at load."""
    specs, tokens, nbytes = [ROWS_MODULE], options.gemv_tokens, options.activation_bytes
    for type in sorted(set(types)):
        rings = options.rings.get(type, ())
        specs += product_modules(type, gemv_tokens=tokens, activation_bytes=nbytes, rings=rings)
    return specs


def matmul_nbytes() -> int:
    """Device bytes `CudaMatmul` allocates for itself, beside the arena's temporaries."""
    return sum(PARTS.values())


def matrix_of(weight: Weight) -> DeviceMatrix:
    """A weight as the kernels read it; a stack of matrices counts all its rows."""
    n_in, n_out = weight.shape[0], 1
    for rows in weight.shape[1:]:
        n_out *= rows
    type = QuantType.BF16 if weight.handle.layout is Layout.BF16 else weight.type
    return device_matrix(type, weight.handle.address, n_in, n_out)


class CudaMatmul:
    """The matrix side of `CudaOps`. Owns one scratch buffer; launches from one thread, on one stream."""

    def __init__(self, device: Any, store: KernelSource, options: MatmulOptions | None = None) -> None:
        """`device` a CudaDevice. Allocates `matmul_nbytes()`."""
        self.options = options or MatmulOptions()
        self._buffer: Buffer = device.allocate(matmul_nbytes(), what="matrix product scratch")
        starts = (self._buffer.handle + at for at in accumulate((0, *PARTS.values())))
        self._parts = dict(zip(PARTS, starts, strict=False))
        self._zero(device)
        self.launcher = ProductLauncher(
            store,
            counters=self._parts["counters"],
            partial=self._parts["partial"],
            multiprocessors=device.capabilities.multiprocessors,
        )
        self._has_ring = device.capabilities.compute_capability >= LEAST_CAPABILITY
        self._blas: CublasLt | None = None
        self._matrices: dict[str, DeviceMatrix] = {}
        self._arena = Arena(0, None)
        self._stream = 0

    def close(self) -> None:
        if self._blas is not None:
            self._blas.close()
            self._blas = None
        self._buffer.close()

    def begin(self, arena: Arena, *, stream: int) -> None:
        """Temporaries of the following calls come from `arena`; without capacity it only counts."""
        self._arena, self._stream = arena, stream

    # ---- operators: see streamer.kernels.ops.Ops ---------------------------------------------------------

    def embed(self, table: Weight, ids: int, out: DeviceArray, *, scale: float) -> None:
        """Rows of the table by the ids at address `ids` (int32), times scale."""
        if self.is_live:
            self.launcher.embed(self.matrix(table), ids, out, stream=self._stream, scale=scale)

    def norm(self, x: DeviceArray, norm: Norm, out: DeviceArray) -> None:
        params = self._rows_params(x, norm)
        params.out = out.address
        self._launch_rows(params)

    def norm_project(
        self, x: DeviceArray, norm: Norm, projections: Sequence[Linear]
    ) -> tuple[DeviceArray, ...]:
        """f32 results, one array a projection."""
        rows = self.prepare(x, [p.weight for p in projections], norm=norm)
        outs = tuple(self._arena.take(x.rows, p.n_out) for p in projections)
        self.project(rows, [self.output(p, out) for p, out in zip(projections, outs, strict=True)])
        return outs

    def project_add(
        self, a: DeviceArray, projection: Linear, residual: DeviceArray, *, post_norm: Norm | None
    ) -> DeviceArray:
        """residual += post_norm(projection(a)), in place."""
        return self._add(self.prepare(a, [projection.weight]), projection, residual, post_norm)

    def gated_feed_forward(
        self,
        x: DeviceArray,
        norm: Norm,
        gate: Linear,
        up: Linear,
        down: Linear,
        *,
        activation: Activation,
        post_norm: Norm | None,
    ) -> DeviceArray:
        """x += post_norm(down(act(gate(h)) * up(h))), h = norm(x), in place."""
        rows = self.prepare(x, [gate.weight, up.weight], norm=norm)
        hidden = self.gated(rows, gate, up, down, activation)
        return self._add(hidden, down, x, post_norm)

    def head(self, x: DeviceArray, norm: Norm, output: Linear, logits: DeviceArray) -> None:
        rows = self.prepare(x, [output.weight], norm=norm)
        self.project(rows, [self.output(output, logits)])

    def matrix(self, weight: Weight) -> DeviceMatrix:
        found = self._matrices.get(weight.name)
        if found is None:
            found = self._matrices[weight.name] = matrix_of(weight)
        return found

    def form(self, matrix: DeviceMatrix, n_tokens: int) -> Form:
        """How a product of n_tokens with this matrix takes its activations."""
        if matrix.type is not QuantType.F32 and n_tokens > self.options.gemv_tokens:
            return Form.BF16
        if self.ring(matrix, n_tokens):
            few = n_tokens * matrix.n_in <= self.options.source_elements
            return Form.SOURCE if matrix.is_float or few else Form.QUANTIZED
        return Form.F32 if matrix.is_float else Form.QUANTIZED

    def ring(self, matrix: DeviceMatrix, n_tokens: int) -> RingVariant | None:
        """How such a product of few tokens goes through gemv_ring; None: gemv."""
        variants = self.options.rings.get(matrix.type, ()) if self._has_ring else ()
        return ring_variant(variants, matrix.type, matrix.n_in, n_tokens, self.options.activation_bytes)

    def uses_library(self, matrix: DeviceMatrix, n_tokens: int) -> bool:
        """Whether a product of bf16 rows is left to cuBLASLt."""
        options, is_bf16 = self.options, matrix.type is QuantType.BF16
        return n_tokens > (options.tiled_tokens_bf16 if is_bf16 else options.tiled_tokens)

    @property
    def is_live(self) -> bool:
        return self._arena.capacity is not None

    def prepare(
        self,
        x: DeviceArray,
        weights: Sequence[Weight],
        *,
        norm: Norm | None = None,
        up: DeviceArray | None = None,
        activation: Activation | None = None,
        also: Form | None = None,
    ) -> Rows:
        """x (or act(x) * up), normed if asked, in every form `weights` ask for, and in `also`: one launch."""
        forms = also or Form(0)
        for matrix in map(self.matrix, weights):
            form = self.form(matrix, x.rows)
            if form is Form.SOURCE and up is not None:  # a launch is needed anyway
                form = Form.F32 if matrix.is_float else Form.QUANTIZED
            forms |= form
        rows = Rows(x.rows, x.columns)
        if Form.SOURCE in forms:
            weight = norm.weight.handle.address if norm is not None else 0
            rows.source = SourceRows(x, weight, norm.epsilon if norm is not None else 0.0)
            forms &= ~Form.SOURCE
        if forms == Form.F32 and norm is None and up is None and x.row_stride == x.columns:
            rows.f32, forms = x, Form(0)
        if not forms:
            return rows
        params = self._rows_params(x, norm)
        if up is not None:
            params.up, params.activation = up.address, ACTIVATIONS[activation]
        if Form.QUANTIZED in forms:
            rows.quantized = self.take_quantized(x.rows, x.columns)
            params.to = rows.quantized.argument
        if Form.F32 in forms:
            rows.f32 = self._arena.take(x.rows, x.columns)
            params.out = rows.f32.address
        if Form.BF16 in forms:
            rows.bf16 = self._arena.take(x.rows, x.columns, "bf16")
            params.out_bf16 = rows.bf16.address
        self._launch_rows(params)
        return rows

    def _rows_params(self, x: DeviceArray, norm: Norm | None) -> RowsParams:
        params = RowsParams(x=x.address, x_stride=x.row_stride, K=x.columns, n_tokens=x.rows)
        if norm is not None:
            params.weight, params.epsilon = norm.weight.handle.address, norm.epsilon
        return params

    def _launch_rows(self, params: RowsParams) -> None:
        if self.is_live:
            self.launcher.rows(params, stream=self._stream)

    def take_quantized(self, n_tokens: int, n_in: int) -> QuantizedRows:
        hi = self._arena.take(n_tokens, n_in, "i8").address
        lo = self._arena.take(n_tokens, n_in, "i8").address if self.options.activation_bytes == 2 else 0
        scale = self._arena.take(n_tokens, n_in // 32).address
        return QuantizedRows(hi, lo, scale, self._arena.take(n_tokens, n_in // 16).address)

    def output(self, projection: Linear, out: DeviceArray, residual: int = 0) -> Output:
        bias = projection.bias.handle.address if projection.bias is not None else 0
        return Output(self.matrix(projection.weight), out, bias, residual)

    def _add(
        self, rows: Rows, projection: Linear, residual: DeviceArray, post_norm: Norm | None
    ) -> DeviceArray:
        if post_norm is None:
            self.project(rows, [self.output(projection, residual, residual.address)])
            return residual
        y = self._arena.take(rows.n_tokens, projection.n_out)
        self.project(rows, [self.output(projection, y)])
        params = self._rows_params(y, None)
        params.residual = params.updated = residual.address
        params.post, params.post_epsilon = post_norm.weight.handle.address, post_norm.epsilon
        self._launch_rows(params)
        return residual

    def gated(self, rows: Rows, gate: Linear, up: Linear, down: Linear, activation: Activation) -> Rows:
        """act(gate) * up, ready for down: in one launch where gate and up have one type."""
        n, width = rows.n_tokens, gate.n_out
        types = {self.matrix(w.weight).type for w in (gate, up)}
        matrix = self.matrix(gate.weight)
        form = self.form(matrix, n)
        fused = len(types) == 1 and not (form is Form.BF16 and self.uses_library(matrix, n))
        if not fused:
            outs = self._arena.take(n, width), self._arena.take(n, width)
            self.project(rows, [self.output(p, o) for p, o in zip((gate, up), outs, strict=True)])
            return self.prepare(outs[0], [down.weight], up=outs[1], activation=activation)
        wanted = self.form(self.matrix(down.weight), n)
        direct = form is Form.BF16 and wanted is Form.BF16
        hidden = self._arena.take(n, width, "bf16" if direct else "f32")
        outputs = [self.output(gate, hidden), self.output(up, hidden)]
        if form is Form.BF16:
            assert rows.bf16 is not None
            if self.is_live:
                self.launcher.mma(outputs, rows.bf16, stream=self._stream, activation=activation)
            return Rows(n, width, bf16=hidden) if direct else self.prepare(hidden, [down.weight])
        self._gemv(rows, outputs, activation=activation)
        return self.prepare(hidden, [down.weight])

    def project(self, rows: Rows, outputs: Sequence[Output]) -> None:
        """Products with one or several matrices: those of a type together, up to four a launch."""
        by_type: dict[QuantType, list[Output]] = {}
        for output in outputs:
            by_type.setdefault(output.matrix.type, []).append(output)
        for group in by_type.values():
            for first in range(0, len(group), MAX_MATRICES):
                self._launch(rows, group[first : first + MAX_MATRICES])

    def _launch(self, rows: Rows, outputs: list[Output]) -> None:
        if self.form(outputs[0].matrix, rows.n_tokens) is not Form.BF16:
            self._gemv(rows, outputs)
            return
        assert rows.bf16 is not None
        if not self.is_live:
            return
        if not self.uses_library(outputs[0].matrix, rows.n_tokens):
            self.launcher.mma(outputs, rows.bf16, stream=self._stream)
            return
        for output in outputs:
            self._multiply_dequantized(output, rows.bf16)

    def _gemv(self, rows: Rows, outputs: list[Output], *, activation: Activation | None = None) -> None:
        if not self.is_live:
            return
        matrix, n, stream = outputs[0].matrix, rows.n_tokens, self._stream
        plain = rows.f32 if matrix.is_float else rows.quantized
        variant = self.ring(matrix, n)
        if variant:
            source = rows.source if self.form(matrix, n) is Form.SOURCE else None
            x = source or (SourceRows(plain) if isinstance(plain, DeviceArray) else plain)
            assert x is not None
            nbytes = self.options.activation_bytes
            self.launcher.gemv_ring(
                outputs, x, n, stream=stream, activation=activation, variant=variant, activation_bytes=nbytes
            )
        else:
            assert plain is not None
            self.launcher.gemv(outputs, plain, n, stream=stream, activation=activation)

    def _multiply_dequantized(self, output: Output, x: DeviceArray) -> None:
        """By slices of rows that fit the scratch; bf16 weights are used where they lie."""
        matrix, out = output.matrix, output.out
        n_slice = matrix.n_out
        if matrix.type is not QuantType.BF16:
            n_slice = min(matrix.n_out, SCRATCH_NBYTES // (2 * matrix.n_in) // 128 * 128)
        item = 4 if out.dtype == "f32" else 2
        for first in range(0, matrix.n_out, n_slice):
            n_out = min(n_slice, matrix.n_out - first)
            weights = matrix.planes[0]
            if matrix.type is not QuantType.BF16:
                weights = self._parts["weights"]
                self.launcher.dequantize(matrix, weights, first, n_out, stream=self._stream)
            shape = ProductShape(x.rows, matrix.n_in, n_out, out.row_stride, out.dtype, bool(output.bias))
            self.blas().multiply(
                shape,
                x.address,
                weights,
                out.address + first * item,
                stream=self._stream,
                bias=output.bias + 4 * first if output.bias else 0,
                residual=output.residual + first * item if output.residual else 0,
            )

    def blas(self) -> CublasLt:
        """The library, opened at first use (`warm` does it before READY)."""
        if self._blas is None:
            self._blas = CublasLt(workspace=self._parts["blas"])
        return self._blas

    def _zero(self, device: Any) -> None:
        stream = device.create_stream("matmul")
        device.fill(self._buffer, 0, COUNTERS_NBYTES, 0, stream=stream)
        stream.sync()
        stream.close()
