"""Rows of the embedding table, dequantized on demand: the table stays as the file has it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamer.gguf.quants import QuantType, dequantize, nbytes_of
from streamer.kernels.ops import Float32s


def embed_reference(
    table: npt.NDArray[np.uint8], type: QuantType, shape: Sequence[int], ids: npt.NDArray[np.integer]
) -> Float32s:
    """(n_ids, n_embd) from the table's file bytes; `shape` in GGUF order [n_embd, n_rows]."""
    n_embd = shape[0]
    rows = table.reshape(-1, nbytes_of(type, (n_embd,)))  # (n_rows, bytes of a row)
    return dequantize(type, rows[ids].reshape(-1), (n_embd, len(ids)))
