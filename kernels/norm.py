"""RMS norm. The numpy reference is also what the host device runs."""

import numpy as np

from streamer.kernels.ops import Float32s


def rms_norm_reference(x: Float32s, weight: Float32s, epsilon: float) -> Float32s:
    """x * weight / sqrt(mean(x^2) + epsilon) over the last axis; a fresh array of x's shape (.., n)."""
    scale: Float32s = np.vecdot(x, x)[..., None]  # (.., 1)
    scale *= np.float32(1.0 / x.shape[-1])
    scale += np.float32(epsilon)
    np.sqrt(scale, out=scale)
    normed: Float32s = x / scale
    normed *= weight
    return normed
