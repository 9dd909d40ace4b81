"""Routing to experts and the sum of the chosen ones' SwiGLU (architectures with mixtures of experts)."""

from collections.abc import Callable

import numpy as np

from streamer.kernels.ops import Float32s, Int32s

SMALLEST_SUM = np.float32(6.103515625e-5)  # smallest normal f16: chosen probabilities are divided by no less


def route_reference(logits: Float32s, n_used: int, weight_scale: float = 1.0) -> tuple[Int32s, Float32s]:
    """Chosen experts and their weights, both (n_rows, n_used), most probable first (ties: lower expert).

    logits (n_rows, n_experts) of the router. Softmax over all experts; the n_used largest, by their sum.
    """
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, :n_used]
    weights = np.take_along_axis(probabilities, chosen, axis=-1)
    weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), SMALLEST_SUM)
    return chosen.astype(np.int32), (weights * np.float32(weight_scale)).astype(np.float32)


def experts_reference(
    h: Float32s, chosen: Int32s, weights: Float32s, expert: Callable[[int, Float32s], Float32s]
) -> Float32s:
    """sum over a row's chosen experts of weight * expert(row): (n_rows, n_embd).

    h (n_rows, n_embd). `expert(e, rows)` computes one expert; each is called once, with all its rows.
    """
    out = np.zeros_like(h)
    for e in np.unique(chosen):
        rows, place = np.nonzero(chosen == e)
        out[rows] += weights[rows, place, None] * expert(int(e), h[rows])
    return out
