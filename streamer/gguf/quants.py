"""Quant types: how many bytes a type's elements take, and what the bytes mean. One table row a type.

Ids and sizes are ggml's (`ggml.h`, `ggml-common.h`); numbers are checked against the gguf package in tests.
"""

import enum
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class QuantType(enum.IntEnum):
    """A tensor's element type, as ggml numbers it. Removed ids (4, 5, 31-33, 36-38) are not members."""

    block_elements: int  # elements of one quant block; rows are whole blocks
    block_nbytes: int  # bytes of one quant block

    def __new__(cls, value: int, block_elements: int = 0, block_nbytes: int = 0) -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.block_elements, member.block_nbytes = block_elements, block_nbytes
        return member

    #       id, elements, bytes of a block
    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 40
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18

    @property
    def is_quantized(self) -> bool:
        return self.block_elements > 1

    @property
    def is_dequantizable(self) -> bool:
        """Whether `dequantize` knows the type; a weight of any other type is refused by the plan."""
        return self not in _NOT_WEIGHTS


# Integers are indices, Q8_1 and Q8_K are activations' formats: none of them is a weight.
_NOT_WEIGHTS = frozenset(
    {QuantType.I8, QuantType.I16, QuantType.I32, QuantType.I64, QuantType.Q8_1, QuantType.Q8_K}
)


def nbytes_of(type: QuantType, shape: Sequence[int]) -> int:
    """Bytes of a tensor of `shape` (GGUF order). ValueError if a row is no multiple of the quant block."""
    row = shape[0] if shape else 0
    if row < 1 or row % type.block_elements:
        raise ValueError(f"a row of {row} elements is no multiple of {type.name}'s {type.block_elements}")
    n_blocks = shape[0] // type.block_elements
    for dimension in shape[1:]:
        n_blocks *= dimension
    return n_blocks * type.block_nbytes


def dequantize(
    type: QuantType, data: bytes | bytearray | memoryview | Bytes, shape: Sequence[int]
) -> Float32s:
    """Float32 values of a tensor's file bytes.

    `shape` in GGUF order; the result has it reversed, `(.., n_rows, n_in)`, is fresh, contiguous and owned by
    the caller. Peak memory: a few times the result (the arithmetic's temporaries).
    ValueError when `data` is not exactly the tensor's bytes or the type is no weight's (`is_dequantizable`).
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    if raw.nbytes != nbytes_of(type, shape):
        raise ValueError(f"{raw.nbytes} bytes for a {type.name} tensor of shape {tuple(shape)}")
    if not type.is_dequantizable:
        raise ValueError(f"type {type.name} cannot be dequantized")
    target = tuple(reversed(shape))
    row_nbytes = shape[0] // type.block_elements * type.block_nbytes
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # a hostile scale gives inf or NaN, which checks downstream find
        values = _values(type, raw.reshape(-1, row_nbytes))
    return np.ascontiguousarray(values, dtype=np.float32).reshape(target)


def _values(type: QuantType, rows: Bytes) -> npt.NDArray[np.floating]:
    """`rows` (n_rows, row_nbytes) -> (n_rows, n_in), a fresh array."""
    match type:
        case QuantType.F32:
            return rows.view("<f4").astype(np.float32)
        case QuantType.F64:
            return rows.view("<f8").astype(np.float32)
        case QuantType.F16:
            return rows.view("<f2").astype(np.float32)
        case QuantType.Q1_0:
            return _dequantize_q1_0(rows)
    import gguf.quants  # late: costs a few hundred milliseconds that `inspect` need not pay

    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(int(type)))  # type: ignore[no-any-return]


def _dequantize_q1_0(rows: Bytes) -> Float32s:
    """Blocks of f16 d and 128 bits, lowest first: d where the bit is set, else -d (ggml-quants.c)."""
    blocks = rows.reshape(-1, QuantType.Q1_0.block_nbytes)
    d = blocks[:, :2].view("<f2").astype(np.float32)  # (n_blocks, 1)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")  # (n_blocks, 128)
    return np.where(bits == 1, d, -d).reshape(rows.shape[0], -1)
