"""The gated delta net against numpy: float32 on both sides, other orders of summation (NMSE <= 1e-8)."""

from typing import Any

import numpy as np
import pytest

from streamer.kernels.gated_delta import (
    causal_conv_reference,
    decay_reference,
    delta_rule_recurrent_reference,
    l2_norm_reference,
)

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(("k_dim", "v_dim", "n_k", "n_v"), [(128, 128, 4, 12), (32, 32, 2, 4)])
def test_gated_delta_net(bench: Any, k_dim: int, v_dim: int, n_k: int, n_v: int) -> None:
    rng = np.random.default_rng(k_dim)
    channels = 2 * n_k * k_dim + n_v * v_dim
    spans = np.array([(0, 1, 2, 0), (1, 37, 0, 0), (38, 3, 3, 0), (0, 0, -1, 0)], np.int32)
    n_rows = 41
    u = rng.standard_normal((n_rows, channels)).astype(np.float32)
    alpha, beta = rng.standard_normal((2, n_rows, n_v)).astype(np.float32)
    weight = rng.standard_normal((channels, 4)).astype(np.float32)
    dt, a = rng.standard_normal(n_v).astype(np.float32), -np.exp(rng.standard_normal(n_v)).astype(np.float32)
    conv = rng.standard_normal((5, 3, channels)).astype(np.float32)
    state = rng.standard_normal((5, n_v, v_dim, k_dim)).astype(np.float32)
    tiles = [(s[0] + at, min(8, s[1] - at), s[0], s[2]) for s in spans[:3] for at in range(0, s[1], 8)]
    tiles.append((0, 0, 0, -1))
    d_u, d_conv, d_state = bench.put(u), bench.put(conv), bench.put(state)
    mixed, out = bench.poisoned((n_rows, channels)), bench.poisoned((n_rows, n_v, v_dim))
    wide = -(-channels // 256)
    bench.launch(
        "gated_delta.cu",
        "conv_silu",
        (wide, len(tiles)),
        256,
        d_u,
        bench.put(weight),
        d_conv,
        mixed,
        bench.put(np.array(tiles, np.int32)),
        channels,
        0,
    )
    bench.launch(
        "gated_delta.cu", "conv_state_update", (wide, 4), 256, d_u, d_conv, bench.put(spans), channels
    )
    bench.launch(
        "gated_delta.cu",
        f"gated_delta<{k_dim // 32}>",
        (n_v, v_dim // 16, 4),
        128,
        mixed,
        bench.put(alpha),
        bench.put(beta),
        bench.put(dt),
        bench.put(a),
        d_state,
        out,
        bench.put(spans),
        n_k,
        n_v,
        v_dim,
        n_v,
        n_v,
        1e-6,
    )
    got, got_state = bench.get(out, (n_rows, n_v, v_dim)), bench.get(d_state, state.shape)
    got_conv = bench.get(d_conv, conv.shape)
    for row, count, slot, _ in spans[:3]:
        rows = slice(row, row + count)
        x, past = causal_conv_reference(u[rows], conv[slot], weight.T)
        q, k = (
            np.tile(
                l2_norm_reference(
                    x[:, i * n_k * k_dim : (i + 1) * n_k * k_dim].reshape(count, n_k, k_dim), 1e-6
                ),
                (1, n_v // n_k, 1),
            )
            for i in (0, 1)
        )
        v = x[:, 2 * n_k * k_dim :].reshape(count, n_v, v_dim)
        want, want_state = delta_rule_recurrent_reference(
            q * k_dim**-0.5,
            k,
            v,
            decay_reference(alpha[rows], dt, a),
            1 / (1 + np.exp(-beta[rows])),
            state[slot],
        )
        assert bench.nmse(got[rows], want) < 1e-8
        assert bench.nmse(got_state[slot], want_state) < 1e-8
        assert (got_conv[slot] == past).all()
    for slot in (1, 4):  # nobody's: untouched
        assert (got_state[slot] == state[slot]).all()
        assert (got_conv[slot] == conv[slot]).all()
