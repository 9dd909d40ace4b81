"""Rotary positions: inverse frequencies (linear scaling, Llama-3 factors, YaRN), tables, rotation."""

import math

import numpy as np
import numpy.typing as npt

from streamer.kernels.ops import Float32s, Rope, RopePairing, Yarn

Complex64s = npt.NDArray[np.complex64]
Float64s = npt.NDArray[np.float64]


def inverse_frequencies(rope: Rope, factors: npt.NDArray[np.floating] | None = None) -> Float64s:
    """(n_rot / 2,) radians a position for each rotated pair: theta_i = position * result[i].

    `factors` are the values of `rope.factors`. YaRN (arXiv 2309.00071): pairs that turn often within the
    original context keep their frequency, slow ones are interpolated, with a linear ramp between.
    """
    pairs = np.arange(0, rope.n_rot, 2, dtype=np.float64)
    frequency = np.power(float(rope.base), -pairs / rope.n_rot)
    if factors is not None:
        frequency = frequency / np.asarray(factors, dtype=np.float64)
    if rope.yarn is None:
        return frequency * rope.scale
    kept = _yarn_ramp(rope, rope.yarn) * rope.yarn.extrapolation_factor  # 1: keep, 0: interpolate
    return frequency / rope.yarn.factor * (1.0 - kept) + frequency * kept


def _yarn_ramp(rope: Rope, yarn: Yarn) -> Float64s:
    def pair_turning(turns: float) -> float:
        """The (fractional) pair that turns so often over the original context."""
        return (
            rope.n_rot * math.log(yarn.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))
        )

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), rope.n_rot - 1)
    ramp = (np.arange(rope.n_rot // 2, dtype=np.float64) - low) / max(high - low, 0.001)
    return 1.0 - np.clip(ramp, 0.0, 1.0)


def rotations(positions: npt.NDArray[np.integer], inverse: Float64s, attention_factor: float) -> Complex64s:
    """(n_positions, n_rot / 2) cos + i sin of each angle, times the attention factor; angles in float64."""
    angles = positions[:, None].astype(np.float64) * inverse
    turns: Complex64s = (np.exp(1j * angles) * attention_factor).astype(np.complex64)
    return turns


def rope_reference(x: Float32s, turn: Complex64s, pairing: RopePairing) -> Float32s:
    """x (n_rows, n_heads, head_dim), its first n_rot dimensions rotated by `turn` (n_rows, n_rot / 2). Fresh.

    A pair (a, b) is the complex number a + ib, so the rotation is one product.
    """
    half = turn.shape[-1]
    n_rot = 2 * half
    turn = turn[:, None, :]  # one angle for all heads of a row
    if pairing is RopePairing.NORM:
        rotated = np.array(x, dtype=np.float32, order="C")
        pairs = rotated[..., :n_rot].view(np.complex64)
        pairs *= turn
        return rotated
    a, b = x[..., :half], x[..., half:n_rot]
    cos, sin = turn.real, turn.imag
    rotated = np.empty(x.shape, np.float32)
    rotated[..., :half] = a * cos - b * sin
    rotated[..., half:n_rot] = a * sin + b * cos
    rotated[..., n_rot:] = x[..., n_rot:]
    return rotated
