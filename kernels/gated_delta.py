"""The gated delta net between its projections: causal convolution, delta rule by tokens or by chunks.

Per value head with state S (k_dim, v_dim): S <- g S; delta = beta (v - S^T k); S <- S + k delta^T; o = S^T q.
States are kept transposed, (.., v_dim, k_dim). Value head h uses key head h % n_k_heads (tiled order).
"""

import numpy as np

from streamer.kernels.feed_forward import silu_reference
from streamer.kernels.ops import Float32s

CHUNK = 64  # rows whose delta rule is solved at once


def causal_conv_reference(u: Float32s, past: Float32s, weight: Float32s) -> tuple[Float32s, Float32s]:
    """Depthwise convolution over time, then SiLU: (n_rows, channels), and the new past.

    u (n_rows, channels) as projected; past (width - 1, channels) the inputs before, oldest first;
    weight (width, channels), oldest first.
    """
    width = weight.shape[0]
    n_rows = u.shape[0]
    seen = np.concatenate([past, u])  # (width - 1 + n_rows, channels)
    out = seen[:n_rows] * weight[0]
    for i in range(1, width):
        out += seen[i : i + n_rows] * weight[i]
    return silu_reference(out), seen[n_rows:]


def l2_norm_reference(x: Float32s, epsilon: float) -> Float32s:
    """x / sqrt(sum x^2 + epsilon) over the last axis."""
    normed: Float32s = x / np.sqrt(np.vecdot(x, x)[..., None] + np.float32(epsilon))
    return normed


def decay_reference(alpha: Float32s, dt_bias: Float32s, a: Float32s) -> Float32s:
    """log of the decay: a * softplus(alpha + dt_bias), (n_rows, n_v_heads), <= 0 because a is negative."""
    log_decay: Float32s = a * np.logaddexp(np.float32(0), alpha + dt_bias)
    return log_decay


def delta_rule_recurrent_reference(
    q: Float32s, k: Float32s, v: Float32s, log_decay: Float32s, beta: Float32s, state: Float32s
) -> tuple[Float32s, Float32s]:
    """Token by token. Outputs (n_rows, n_heads, v_dim) and the new state (n_heads, v_dim, k_dim).

    q, k (n_rows, n_heads, k_dim), normed and scaled, key heads already repeated; v (n_rows, n_heads, v_dim);
    log_decay, beta (n_rows, n_heads); state (n_heads, v_dim, k_dim).
    """
    out = np.empty_like(v)
    decay = np.exp(log_decay)
    for t in range(len(q)):
        state = state * decay[t, :, None, None]
        known = np.matmul(state, k[t, :, :, None])[..., 0]  # (n_heads, v_dim)
        delta = beta[t, :, None] * (v[t] - known)
        state = state + delta[:, :, None] * k[t, :, None, :]
        out[t] = np.matmul(state, q[t, :, :, None])[..., 0]
    return out, state


def delta_rule_chunked_reference(
    q: Float32s,
    k: Float32s,
    v: Float32s,
    log_decay: Float32s,
    beta: Float32s,
    state: Float32s,
    chunk: int = CHUNK,
) -> tuple[Float32s, Float32s]:
    """The same as `delta_rule_recurrent_reference`, `chunk` rows at once as matrix products."""
    out = np.empty_like(v)
    for start in range(0, len(q), chunk):
        rows = slice(start, start + chunk)
        out[rows], state = _delta_chunk(q[rows], k[rows], v[rows], log_decay[rows], beta[rows], state)
    return out, state


def _delta_chunk(
    q: Float32s, k: Float32s, v: Float32s, log_decay: Float32s, beta: Float32s, state: Float32s
) -> tuple[Float32s, Float32s]:
    """One chunk. With G_t the decay from the chunk's start, unrolling gives a triangular system
    (I + A) delta = beta (v - G S0^T k), A_ti = beta_t (G_t / G_i) k_t.k_i for i < t; then outputs and the new
    state are sums over the deltas. Ratios of decays are taken in logarithms: all are <= 1.
    """
    q, k, v = (np.ascontiguousarray(x.transpose(1, 0, 2)) for x in (q, k, v))  # (n_heads, n, ..)
    total = np.cumsum(log_decay.T, axis=-1)  # (n_heads, n): log G
    beta = beta.T[..., None]  # (n_heads, n, 1)
    n = q.shape[1]
    # (n_heads, n, n): G_t / G_i for i <= t, zero above
    ratio = np.exp(
        np.where(np.tri(n, dtype=bool), total[:, :, None] - total[:, None, :], np.float32(-np.inf))
    )
    k_t = k.transpose(0, 2, 1)
    system = beta * ratio * (k @ k_t)
    system *= np.tri(n, k=-1, dtype=np.float32)
    decay = np.exp(total)[..., None]  # (n_heads, n, 1)
    from_state = decay * (k @ state.transpose(0, 2, 1))  # (n_heads, n, v_dim)
    delta = unit_lower_inverse(system) @ (beta * (v - from_state))
    out = decay * (q @ state.transpose(0, 2, 1)) + (ratio * (q @ k_t)) @ delta
    to_end = np.exp(total[:, -1:] - total)[..., None]  # (n_heads, n, 1): G_n / G_i
    state = state * decay[:, -1:] + (delta * to_end).transpose(0, 2, 1) @ k
    return out.transpose(1, 0, 2), state


def unit_lower_inverse(strict: Float32s) -> Float32s:
    """(I + strict)^-1 for strictly lower triangular (.., n, n), by halves: as stable as substitution.

    (A series of powers would be shorter, but its terms grow like binomials where keys repeat.)
    """
    n = strict.shape[-1]
    if n == 1:
        return np.ones_like(strict)
    half = n // 2
    upper = unit_lower_inverse(strict[..., :half, :half])
    lower = unit_lower_inverse(strict[..., half:, half:])
    inverse = np.zeros_like(strict)
    inverse[..., :half, :half] = upper
    inverse[..., half:, half:] = lower
    inverse[..., half:, :half] = -(lower @ (strict[..., half:, :half] @ upper))
    return inverse
