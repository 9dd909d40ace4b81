"""Operators' numpy references against float64 formulas written another way."""

import math

import numpy as np
import pytest

from streamer.kernels.attention import attention_reference
from streamer.kernels.experts import experts_reference, route_reference
from streamer.kernels.feed_forward import gated_reference, sigmoid_reference
from streamer.kernels.norm import rms_norm_reference
from streamer.kernels.ops import Activation, Rope, RopePairing, Yarn
from streamer.kernels.rope import inverse_frequencies, rope_reference, rotations

RNG = np.random.default_rng(11)
F32 = 2e-6  # relative to values around one: a few roundings of float32


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def test_rms_norm():
    x, weight = normal(5, 3, 48), normal(48)
    want = np.empty(x.shape)
    for index in np.ndindex(5, 3):
        row = x[index].astype(np.float64)
        want[index] = [v * w / math.sqrt(sum(row**2) / 48 + 1e-5) for v, w in zip(row, weight, strict=True)]
    assert np.abs(rms_norm_reference(x, weight, 1e-5) - want).max() < F32 * 10


def test_rms_norm_of_zero_is_zero():
    assert not rms_norm_reference(np.zeros((2, 8), np.float32), normal(8), 1e-6).any()


@pytest.mark.parametrize("pairing", list(RopePairing))
@pytest.mark.parametrize("n_rot", [8, 4, 2])
def test_rope_rotates_pairs_and_passes_the_rest(pairing, n_rot):
    x, positions = normal(3, 2, 8), np.array([0, 7, 1000])
    rope = Rope(pairing, n_rot, 10000.0)
    got = rope_reference(x, rotations(positions, inverse_frequencies(rope), 1.0), pairing)
    want = x.astype(np.float64)
    for row, position in enumerate(positions):
        for i in range(n_rot // 2):
            a, b = (2 * i, 2 * i + 1) if pairing is RopePairing.NORM else (i, i + n_rot // 2)
            theta = position * 10000.0 ** (-2 * i / n_rot)
            turn = np.array([[math.cos(theta), -math.sin(theta)], [math.sin(theta), math.cos(theta)]])
            want[row][:, [a, b]] = x[row][:, [a, b]] @ turn.T
    assert np.abs(got - want).max() < F32


def test_rope_leaves_its_input_alone():
    x = normal(2, 2, 8)
    before = x.copy()
    for pairing in RopePairing:
        rope_reference(
            x, rotations(np.array([3, 4]), inverse_frequencies(Rope(pairing, 8, 100.0)), 1.0), pairing
        )
    assert np.array_equal(x, before)


def test_linear_scaling_and_factors_divide_frequencies():
    factors = np.array([1, 8, 2, 4], np.float32)
    got = inverse_frequencies(Rope(RopePairing.NORM, 8, 500.0, scale=0.25), factors)
    want = [500.0 ** (-2 * i / 8) / 4 / factors[i] for i in range(4)]
    assert np.allclose(got, want, rtol=1e-12)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones():
    """Over beta_fast turns in the original context: kept; under beta_slow: divided."""
    yarn = Yarn(factor=8.0, original_context=4096)
    rope = Rope(RopePairing.NEOX, 128, 10000.0, yarn=yarn)
    plain = inverse_frequencies(Rope(RopePairing.NEOX, 128, 10000.0))
    got = inverse_frequencies(rope)
    turns = 4096 * plain / (2 * math.pi)
    assert np.array_equal(got[turns > 40], plain[turns > 40])
    assert np.allclose(got[turns < 0.8], plain[turns < 0.8] / 8, rtol=1e-12)
    between = (turns < 25) & (turns > 1.3)
    assert (got[between] < plain[between]).all()
    assert (got[between] > plain[between] / 8).all()


def loop_attention(q, keys, values, scale, first_key, window, softcap):
    n_rows, n_heads, _ = q.shape
    n_kv, n_keys, dv = values.shape
    out = np.zeros((n_rows, n_heads, dv))
    for row in range(n_rows):
        position = first_key + n_keys - n_rows + row
        for head in range(n_heads):
            kv = head * n_kv // n_heads
            seen = [
                i
                for i in range(n_keys)
                if first_key + i <= position and (window is None or position - first_key - i < window)
            ]
            s = np.array([scale * float(q[row, head].astype(np.float64) @ keys[kv, i]) for i in seen])
            if softcap:
                s = softcap * np.tanh(s / softcap)
            p = np.exp(s - s.max())
            out[row, head] = (p / p.sum()) @ values[kv, seen].astype(np.float64)
    return out.reshape(n_rows, -1)


@pytest.mark.parametrize("n_rows", [1, 2, 17, 40])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention(n_rows, window, softcap):
    q, keys, values = normal(n_rows, 6, 16), normal(2, 45, 16), normal(2, 45, 12)
    first_key = 32
    options = {"scale": 0.25, "first_key": first_key, "sliding_window": window, "softcap": softcap}
    got = attention_reference(q, keys, values, **options)
    want = loop_attention(q, keys, values, 0.25, first_key, window, softcap)
    assert np.abs(got - want).max() < F32 * 5


def test_attention_in_blocks_of_rows_equals_whole(monkeypatch):
    q, keys, values = normal(90, 4, 16), normal(4, 90, 16), normal(4, 90, 16)
    whole = attention_reference(q, keys, values, scale=0.3, sliding_window=20)
    monkeypatch.setattr("streamer.kernels.attention.BLOCK_SCORES", 1)
    blocks = attention_reference(q, keys, values, scale=0.3, sliding_window=20)
    assert np.abs(blocks - whole).max() < F32


def test_attention_with_huge_scores_is_finite():
    q, keys, values = 300 * normal(3, 2, 16), 300 * normal(1, 3, 16), normal(1, 3, 16)
    assert np.isfinite(attention_reference(q, keys, values, scale=1.0)).all()


def test_activations():
    gate, up = 5 * normal(4, 33), normal(4, 33)
    g = gate.astype(np.float64)
    silu = g / (1 + np.exp(-g)) * up
    gelu = np.array(
        [0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in g.ravel()]
    )
    assert np.abs(gated_reference(gate, up, Activation.SILU) - silu).max() < F32 * 10
    assert (
        np.abs(gated_reference(gate, up, Activation.GELU_TANH) - gelu.reshape(g.shape) * up).max() < F32 * 10
    )


def test_sigmoid_at_both_ends():
    assert sigmoid_reference(np.array([-1000.0, 0.0, 1000.0], np.float32)).tolist() == [0.0, 0.5, 1.0]


def test_route_takes_the_most_probable_and_normalises():
    logits = np.array([[1.0, 3.0, 3.0, -2.0], [0.0, 0.0, 0.0, 9.0]], np.float32)
    chosen, weights = route_reference(logits, 2, 2.0)
    assert chosen.tolist() == [[1, 2], [3, 0]]
    assert np.allclose(weights.sum(axis=1), 2.0)
    assert np.isclose(weights[1, 0] / weights[1, 1], math.exp(9), rtol=1e-5)


def test_experts_are_called_once_with_their_rows():
    h, calls = normal(5, 8), []
    chosen = np.array([[0, 2], [2, 1], [0, 1], [2, 0], [1, 2]], np.int32)
    weights = normal(5, 2)

    def expert(e, rows):
        calls.append((e, len(rows)))
        return rows * (e + 1)

    got = experts_reference(h, chosen, weights, expert)
    want = sum(weights[:, i, None] * h * (chosen[:, i, None] + 1) for i in range(2))
    assert np.abs(got - want).max() < F32 * 5
    assert sorted(calls) == [(0, 3), (1, 3), (2, 4)]
