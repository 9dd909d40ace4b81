"""Causal grouped-query attention of some rows over one sequence's keys and values."""

import numpy as np

from streamer.kernels.matmul import UNPACKED
from streamer.kernels.ops import Float32s

BLOCK_SCORES = 1 << 20  # scores held at once: 4 MiB of float32, so that a block stays in cache
KEY_TILE = 128  # keys multiplied at once with a few queries: BLAS packs nothing then, four times as fast


def attention_reference(
    q: Float32s,
    keys: Float32s,
    values: Float32s,
    *,
    scale: float,
    first_key: int = 0,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Float32s:
    """Attention of the sequence's last n_rows rows: (n_rows, n_heads * value_length).

    q (n_rows, n_heads, key_length); keys (n_kv_heads, n_keys, key_length) and values (n_kv_heads, n_keys,
    value_length) of positions first_key .. first_key + n_keys - 1, the rows' own included. Query head h uses
    KV head h // (n_heads / n_kv_heads). Peak memory: scores of a block of rows.
    """
    n_rows, n_heads, _ = q.shape
    n_keys = keys.shape[1]
    if n_rows == 1:
        if sliding_window is not None:
            keys, values = keys[:, -sliding_window:], values[:, -sliding_window:]
        return _attend(q, keys, values, scale, None, softcap)
    first_row = first_key + n_keys - n_rows  # position of row 0
    block = max(16, BLOCK_SCORES // (n_heads * n_keys))
    out = np.empty((n_rows, n_heads * values.shape[2]), np.float32)
    for start in range(0, n_rows, block):
        stop = min(start + block, n_rows)
        rows = np.arange(first_row + start, first_row + stop)
        begin = first_key if sliding_window is None else max(first_key, int(rows[0]) - sliding_window + 1)
        visible = slice(begin - first_key, int(rows[-1]) + 1 - first_key)
        hidden = _hidden(rows, np.arange(begin, rows[-1] + 1), sliding_window)
        out[start:stop] = _attend(q[start:stop], keys[:, visible], values[:, visible], scale, hidden, softcap)
    return out


def _hidden(
    rows: np.ndarray[tuple[int], np.dtype[np.integer]],
    positions: np.ndarray[tuple[int], np.dtype[np.integer]],
    sliding_window: int | None,
) -> Float32s:
    """(n_rows, n_keys): 0 where the row may look, -inf at later keys and those the window has left behind."""
    distance = rows[:, None] - positions[None, :]
    hidden = distance < 0
    if sliding_window is not None:
        hidden |= distance >= sliding_window
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def _attend(
    q: Float32s,
    keys: Float32s,
    values: Float32s,
    scale: float,
    hidden: Float32s | None,
    softcap: float | None,
) -> Float32s:
    n_rows, n_heads, key_length = q.shape
    n_kv_heads, n_keys, value_length = values.shape
    group = n_heads // n_kv_heads
    # queries of a KV head side by side: (n_kv_heads, group * n_rows, key_length)
    scaled: Float32s = q * np.float32(scale)
    stacked = scaled.reshape(n_rows, n_kv_heads, group, key_length).transpose(1, 2, 0, 3)
    scores = _scores(stacked.reshape(n_kv_heads, group * n_rows, key_length), keys)
    if softcap is not None:
        scores /= np.float32(softcap)
        np.tanh(scores, out=scores)
        scores *= np.float32(softcap)
    if hidden is not None:
        scores.reshape(n_kv_heads, group, n_rows, n_keys)[...] += hidden
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    out = scores @ values  # (n_kv_heads, group * n_rows, value_length)
    out /= total
    rows = out.reshape(n_kv_heads, group, n_rows, value_length).transpose(2, 0, 1, 3)
    return rows.reshape(n_rows, n_heads * value_length)


def _scores(queries: Float32s, keys: Float32s) -> Float32s:
    """(n_kv_heads, n_queries, n_keys): queries (n_kv_heads, n_queries, length), keys (.., n_keys, length)."""
    n_kv_heads, n_queries, length = queries.shape
    n_keys = keys.shape[1]
    whole = n_keys - n_keys % KEY_TILE
    scores = np.empty((n_kv_heads, n_queries, n_keys), np.float32)
    if n_queries * KEY_TILE * length > UNPACKED:
        whole = 0
    if whole:
        tiled = keys[:, :whole].reshape(n_kv_heads, -1, KEY_TILE, length)
        into = scores[:, :, :whole].reshape(
            n_kv_heads, n_queries, -1, KEY_TILE
        )  # a view: splits the last axis
        np.matmul(queries[:, None], tiled.transpose(0, 1, 3, 2), out=into.transpose(0, 2, 1, 3))
    if whole < n_keys:
        np.matmul(queries, keys[:, whole:].transpose(0, 2, 1), out=scores[:, :, whole:])
    return scores
