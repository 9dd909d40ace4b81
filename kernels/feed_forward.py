"""Activations and the gated product of a feed-forward."""

import math

import numpy as np

from streamer.kernels.ops import Activation, Float32s

_GELU_SCALE = np.float32(math.sqrt(2.0 / math.pi))
_GELU_CUBIC = np.float32(0.044715)


def sigmoid_reference(x: Float32s) -> Float32s:
    """1 / (1 + e^-x); exact at both ends: an overflowing exponential gives 0."""
    out = np.negative(x)
    with np.errstate(over="ignore"):
        np.exp(out, out=out)
    out += np.float32(1)
    return np.reciprocal(out, out=out)


def silu_reference(x: Float32s) -> Float32s:
    out = sigmoid_reference(x)
    out *= x
    return out


def gelu_tanh_reference(x: Float32s) -> Float32s:
    """x/2 * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    out = x * x
    out *= _GELU_CUBIC
    out += np.float32(1)
    out *= x
    out *= _GELU_SCALE
    np.tanh(out, out=out)
    out += np.float32(1)
    out *= x
    out *= np.float32(0.5)
    return out


_ACTIVATIONS = {Activation.SILU: silu_reference, Activation.GELU_TANH: gelu_tanh_reference}


def gated_reference(gate: Float32s, up: Float32s, activation: Activation) -> Float32s:
    """act(gate) * up, elementwise; a fresh array."""
    out = _ACTIVATIONS[activation](gate)
    out *= up
    return out
