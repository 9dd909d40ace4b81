"""y = x W^T for a weight whose rows are outputs, as GGUF stores it."""

import numpy as np

from streamer.kernels.ops import Float32s

MANY_ROWS = (
    48  # from here on BLAS packs the activations at no visible cost, and row-major results are worth more
)


def matmul_reference(x: Float32s, weight: Float32s) -> Float32s:
    """(n_rows, n_out) from x (n_rows, n_in) and weight (n_out, n_in).

    One row is a matrix-vector product at memory speed. A few rows are computed as weight @ x^T: BLAS then reads
    the weight in its own order (1.5 times as fast at 2 to 16 rows); the result is in column-major order.
    """
    if 1 < len(x) < MANY_ROWS:
        return np.matmul(weight, x.T).T
    return np.matmul(x, weight.T)
