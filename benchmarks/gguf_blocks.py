"""Random quant blocks that are valid and sane: weights about N(0, std), whatever the type.

A block is random bits with its scale fields set so that the weights' root mean square is `std`.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from streamer.gguf.quants import QuantType

Bytes = npt.NDArray[np.uint8]


def random_weights(type: QuantType, n_elements: int, std: float, rng: np.random.Generator) -> Bytes:
    """File bytes of `n_elements` weights (whole quant blocks)."""
    n_blocks = n_elements // type.block_elements
    if type in _FLOATS:
        values = rng.standard_normal(n_elements, dtype=np.float32) * np.float32(std)
        return _FLOATS[type](values).view(np.uint8)
    blocks = rng.integers(0, 256, (n_blocks, type.block_nbytes), dtype=np.uint8)
    scales = std * rng.uniform(0.75, 1.25, n_blocks)
    _SET_SCALES[type](blocks, scales, rng)
    return blocks.reshape(-1)


_FLOATS: dict[QuantType, Callable[[npt.NDArray[np.float32]], npt.NDArray[np.generic]]] = {
    QuantType.F32: lambda values: values,
    QuantType.F16: lambda values: values.astype("<f2"),
    QuantType.BF16: lambda values: (values.view("<u4") >> 16).astype("<u2"),
}

SetScales = Callable[[Bytes, npt.NDArray[np.float64], np.random.Generator], None]


def _put(blocks: Bytes, offset: int, values: npt.NDArray[np.float64]) -> None:
    """Write one f16 a block at byte `offset`."""
    blocks[:, offset : offset + 2] = values.astype("<f2").reshape(-1, 1).view(np.uint8)


def _symmetric(offset: int, unit: float) -> SetScales:
    """One scale: weight = d * q, where random q has the root mean square `unit`."""

    def set_scales(blocks: Bytes, scales: npt.NDArray[np.float64], rng: np.random.Generator) -> None:
        _put(blocks, offset, scales / unit)

    return set_scales


def _with_minimum(unit: float, middle: float) -> SetScales:
    """weight = d * q + m, with m so that the mean is 0."""

    def set_scales(blocks: Bytes, scales: npt.NDArray[np.float64], rng: np.random.Generator) -> None:
        _put(blocks, 0, scales / unit)
        _put(blocks, 2, -middle * scales / unit)

    return set_scales


def _k_with_minimum(unit: float, middle: float) -> SetScales:
    """Q4_K, Q5_K: weight = d * sc * q - dmin * m; 6-bit sc and m are made equal, so dmin = middle * d."""

    def set_scales(blocks: Bytes, scales: npt.NDArray[np.float64], rng: np.random.Generator) -> None:
        sc = rng.integers(16, 64, (len(blocks), 8), dtype=np.uint8)  # rms 42
        low, high = sc[:, :4], sc[:, 4:]
        blocks[:, 4:8] = low | (high >> 4) << 6  # low 6 bits: sc 0-3; top bits of sc 4-7
        blocks[:, 8:12] = blocks[:, 4:8]  # the same for m
        blocks[:, 12:16] = (high & 15) | (high & 15) << 4  # low nibbles of sc 4-7 and of m 4-7
        _put(blocks, 0, scales / (42 * unit))
        _put(blocks, 2, middle * scales / (42 * unit))

    return set_scales


def _set_q2_k(blocks: Bytes, scales: npt.NDArray[np.float64], rng: np.random.Generator) -> None:
    sc = rng.integers(4, 16, (len(blocks), 16), dtype=np.uint8)  # rms 10.1
    blocks[:, :16] = sc | sc << 4
    _put(blocks, 80, scales / (10.1 * 1.12))
    _put(blocks, 82, 1.5 * scales / (10.1 * 1.12))


def _set_q6_k(blocks: Bytes, scales: npt.NDArray[np.float64], rng: np.random.Generator) -> None:
    sc = rng.integers(32, 64, (len(blocks), 16)) * rng.choice((-1, 1), (len(blocks), 16))  # rms 48.4
    blocks[:, 192:208] = sc.astype(np.int8).view(np.uint8)
    _put(blocks, 208, scales / (48.4 * 18.5))


def _set_mxfp4(blocks: Bytes, scales: npt.NDArray[np.float64], rng: np.random.Generator) -> None:
    blocks[:, 0] = 127 + np.round(np.log2(scales / 2.93))


_SET_SCALES: dict[QuantType, SetScales] = {
    QuantType.Q8_0: _symmetric(0, 73.9),
    QuantType.Q4_0: _symmetric(0, 4.64),
    QuantType.Q5_0: _symmetric(0, 9.25),
    QuantType.Q4_1: _with_minimum(4.61, 7.5),
    QuantType.Q5_1: _with_minimum(9.23, 15.5),
    QuantType.Q2_K: _set_q2_k,
    QuantType.Q3_K: _symmetric(108, 43.4),
    QuantType.Q4_K: _k_with_minimum(4.61, 7.5),
    QuantType.Q5_K: _k_with_minimum(9.23, 15.5),
    QuantType.Q6_K: _set_q6_k,
    QuantType.IQ4_NL: _symmetric(0, 68.3),
    QuantType.IQ4_XS: _symmetric(0, 68.3 * 18.5),
    QuantType.MXFP4: _set_mxfp4,
}
TYPES = (*_FLOATS, *_SET_SCALES)
