"""What the product kernels are given: matrices, activations, outputs; the argument blocks of the .cu files.

Addresses and sizes only: nothing here owns memory or launches anything.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamer.gguf.quants import QuantType
from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.ops import Activation
from streamer.plan.layouts import PLANES, plane_offsets

MAX_MATRICES = 4
FLOATS = frozenset({QuantType.F32, QuantType.F16, QuantType.BF16})
# Elements of a chunk (quants.cuh): what one lane takes at a time.
CHUNK = {t: 16 if t in FLOATS or t is QuantType.Q8_0 else 32 for t in (*PLANES, *FLOATS)} | {
    QuantType.Q2_K: 64,
    QuantType.Q3_K: 64,
}
ACTIVATIONS = {None: 0, Activation.SILU: 1, Activation.GELU_TANH: 2}


@dataclass(frozen=True)
class DeviceMatrix:
    """A resident weight as the kernels read it: n_out rows of n_in, in planes or (floats) as in the file."""

    type: QuantType
    n_in: int
    n_out: int
    planes: tuple[int, ...]  # addresses

    @property
    def is_float(self) -> bool:
        return self.type in FLOATS


def device_matrix(type: QuantType, address: int, n_in: int, n_out: int) -> DeviceMatrix:
    """The matrix at `address`; `n_out` counts all rows of a stack of matrices."""
    offsets = (0,) if type in FLOATS else plane_offsets(type, n_in * n_out)
    return DeviceMatrix(type, n_in, n_out, tuple(address + offset for offset in offsets))


@dataclass(frozen=True)
class QuantizedRows:
    """Activations as dp4a takes them (linear.cuh): addresses. `lo` 0: 8 bits, else 16."""

    hi: int
    lo: int
    scale: int
    sum: int

    @property
    def argument(self) -> "QuantizedArgument":
        return QuantizedArgument(self.hi, self.lo, self.scale, self.sum)


@dataclass(frozen=True)
class Output:
    """One matrix of a launch and where its results go: (n_tokens, n_out) f32 or bf16."""

    matrix: DeviceMatrix
    out: DeviceArray
    bias: int = 0  # address of (n_out,) f32
    residual: int = 0  # address, laid out as `out`


@dataclass(frozen=True)
class SourceRows:
    """f32 rows as they came, with the norm that is still to be applied: what gemv_ring prepares itself."""

    x: DeviceArray
    norm: int = 0  # address of the RMS norm's weight; 0: none
    epsilon: float = 0.0


def fill_matrices(to: Any, outputs: Sequence[Output], tile: int, *, gated: bool) -> int:
    """Write the matrices of a launch, numbering tiles of so many rows through them; how many there are."""
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
    return -(-outputs[0].matrix.n_out // tile) if gated else first


# ---- argument blocks: the structs of the .cu files -----------------------------------------------


class MatrixArgument(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("p0", "p1", "p2", "p3", "out", "bias", "residual")),
        *((name, ctypes.c_int32) for name in ("rows", "first_tile", "out_stride", "pad")),
    )


class QuantizedArgument(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("hi", "lo", "scale", "sum"))


class GemvParams(ctypes.Structure):
    """gemv.cu"""

    _fields_ = (
        ("matrices", MatrixArgument * MAX_MATRICES),
        ("x", QuantizedArgument),
        ("x_float", ctypes.c_uint64),
        *(
            (name, ctypes.c_int32)
            for name in ("n_matrices", "n_tokens", "K", "log_threads", "activation", "pad")
        ),
    )


class RingParams(ctypes.Structure):
    """gemv_ring.cu"""

    _fields_ = (
        ("matrices", MatrixArgument * MAX_MATRICES),
        ("x", QuantizedArgument),
        *((name, ctypes.c_uint64) for name in ("x_float", "norm")),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("x_stride", "n_matrices", "n_tokens", "K", "activation")),
        *((name, ctypes.c_int32) for name in ("tiles", "stages")),
    )


class MmaParams(ctypes.Structure):
    """mma.cuh"""

    _fields_ = (
        ("matrices", MatrixArgument * MAX_MATRICES),
        *((name, ctypes.c_uint64) for name in ("x", "partial", "counters")),
        *(
            (name, ctypes.c_int32)
            for name in ("n_matrices", "n_tokens", "K", "activation", "out_bf16", "n_splits")
        ),
    )


class RowsParams(ctypes.Structure):
    """quantize.cu"""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "up", "residual", "post", "updated", "weight")),
        ("to", QuantizedArgument),
        *((name, ctypes.c_uint64) for name in ("out", "out_bf16")),
        *((name, ctypes.c_float) for name in ("post_epsilon", "epsilon")),
        *((name, ctypes.c_int32) for name in ("K", "x_stride", "activation", "n_tokens")),
    )


class DequantizeParams(ctypes.Structure):
    """dequantize.cu"""

    _fields_ = (
        ("planes", ctypes.c_uint64 * 4),
        ("out", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("first_row", "n_rows", "K")),
    )


class EmbedParams(ctypes.Structure):
    """dequantize.cu"""

    _fields_ = (
        ("planes", ctypes.c_uint64 * 4),
        *((name, ctypes.c_uint64) for name in ("out", "ids", "last_ids", "slots")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("n_ids", "K")),
    )
