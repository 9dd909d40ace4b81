"""The gated delta net: both forms against a float64 recurrence, and where a series of powers would fail."""

import numpy as np
import pytest

from streamer.kernels.gated_delta import (
    causal_conv_reference,
    decay_reference,
    delta_rule_chunked_reference,
    delta_rule_recurrent_reference,
    l2_norm_reference,
    unit_lower_inverse,
)

RNG = np.random.default_rng(3)


def inputs(n, n_heads=3, k_dim=16, v_dim=12, same_keys=False):
    q, k = (
        l2_norm_reference(RNG.standard_normal((n, n_heads, k_dim)).astype(np.float32), 1e-6) for _ in "qk"
    )
    if same_keys:
        k[:] = k[0]
    v = RNG.standard_normal((n, n_heads, v_dim)).astype(np.float32)
    log_decay = -RNG.exponential(0.3, (n, n_heads)).astype(np.float32) * (0 if same_keys else 1)
    beta = RNG.uniform(0.9 if same_keys else 0, 1, (n, n_heads)).astype(np.float32)
    state = RNG.standard_normal((n_heads, v_dim, k_dim)).astype(np.float32)
    return q, k, v, log_decay, beta, state


def float64_rule(q, k, v, log_decay, beta, state):
    """S (k, v) per head: S <- g S; S <- S + k (beta (v - S^T k))^T; o = S^T q."""
    s = state.astype(np.float64).transpose(0, 2, 1)
    out = []
    for t in range(len(q)):
        s = s * np.exp(log_decay[t].astype(np.float64))[:, None, None]
        error = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", s, k[t]))
        s = s + np.einsum("hk,hv->hkv", k[t], error)
        out.append(np.einsum("hkv,hk->hv", s, q[t]))
    return np.array(out), s.transpose(0, 2, 1)


@pytest.mark.parametrize("rule", [delta_rule_recurrent_reference, delta_rule_chunked_reference])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 150])
def test_both_forms_equal_the_float64_recurrence(rule, n):
    values = inputs(n)
    out, state = rule(*values)
    want, want_state = float64_rule(*values)
    assert np.abs(out - want).max() < 2e-5
    assert np.abs(state - want_state).max() < 2e-5


def test_repeated_keys_without_decay_stay_exact():
    """The triangular system's powers grow like binomials here; substitution does not."""
    values = inputs(128, same_keys=True)
    out, state = delta_rule_chunked_reference(*values)
    want, want_state = float64_rule(*values)
    assert np.abs(out - want).max() < 1e-4
    assert np.abs(state - want_state).max() < 1e-4


def test_forms_leave_their_state_argument_alone():
    values = inputs(70)
    before = values[-1].copy()
    delta_rule_chunked_reference(*values)
    delta_rule_recurrent_reference(*values)
    assert np.array_equal(values[-1], before)


@pytest.mark.parametrize("n", [1, 2, 5, 64])
def test_unit_lower_inverse(n):
    strict = np.tril(RNG.standard_normal((2, n, n)) * 0.3, -1)
    product = (np.eye(n) + strict) @ unit_lower_inverse(strict)
    assert np.abs(product - np.eye(n)).max() < 1e-9


def test_strong_decay_underflows_to_zero_not_nan():
    q, k, v, log_decay, beta, state = inputs(64)
    out, state = delta_rule_chunked_reference(q, k, v, log_decay - 50, beta, state)
    assert np.isfinite(out).all()
    assert np.isfinite(state).all()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_causal_conv_sees_the_past_and_keeps_the_last_inputs(n):
    u, past = (RNG.standard_normal((m, 5)).astype(np.float32) for m in (n, 3))
    weight = RNG.standard_normal((4, 5)).astype(np.float32)
    out, kept = causal_conv_reference(u, past, weight)
    seen = np.concatenate([past, u]).astype(np.float64)
    for t in range(n):
        x = sum(weight[i] * seen[t + i] for i in range(4))
        assert np.abs(out[t] - x / (1 + np.exp(-x))).max() < 1e-6
    assert np.array_equal(kept, seen[-3:].astype(np.float32))


def test_decay_is_never_positive():
    alpha = np.array([[-100.0, 0.0, 100.0]], np.float32)
    got = decay_reference(alpha, np.zeros(3, np.float32), -np.ones(3, np.float32))
    assert np.allclose(got, [[0.0, -np.log(2), -100.0]], atol=1e-6)
