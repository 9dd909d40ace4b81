"""y = x W^T for weights whose rows are outputs, as GGUF stores them: plain, and over blocks for few rows.

Blocks: 32 outputs side by side, `(n_blocks, n_in, 32)`, the last one padded. Measured on an AVX-512 core with
OpenBLAS 0.3.31 (weights from memory; GB/s of weights, 1 / 8 rows): row-major 15 / 5, column-major 27 / 5,
blocks 30 / 18. BLAS packs every operand of a larger product, which costs more than the product of a few rows;
each of our small products stays below the size from where it does so. With many rows, tiles of them give 110
GFLOP/s, the plain product 97.
"""

import numpy as np

from streamer.kernels.ops import Float32s

BLOCK = 32  # outputs of a block
UNPACKED = 1_000_000  # m * n * k up to which OpenBLAS has kernels that pack nothing
MOST_TILE_ROWS = 32


def matmul_reference(x: Float32s, weight: Float32s) -> Float32s:
    """(n_rows, n_out) from x (n_rows, n_in) and weight (n_out, n_in)."""
    product: Float32s = np.matmul(x, weight.T)
    return product


def blocks_of(n_out: int) -> int:
    return -(-n_out // BLOCK)


def write_rows(blocks: Float32s, first_row: int, rows: Float32s) -> None:
    """Put rows (n, n_in) of a weight into blocks (n_blocks, n_in, 32), from row `first_row` on."""
    done = 0
    while done < len(rows):
        block, lane = divmod(first_row + done, BLOCK)
        whole = (len(rows) - done) // BLOCK if lane == 0 else 0
        if whole:
            part = rows[done : done + whole * BLOCK].reshape(whole, BLOCK, -1)
            blocks[block : block + whole] = part.transpose(0, 2, 1)
            done += whole * BLOCK
        else:
            n = min(BLOCK - lane, len(rows) - done)
            blocks[block, :, lane : lane + n] = rows[done : done + n].T
            done += n


def read_rows(blocks: Float32s, rows: np.ndarray[tuple[int], np.dtype[np.integer]]) -> Float32s:
    """(n, n_in): rows of the weight back out of its blocks."""
    picked: Float32s = blocks[rows // BLOCK, :, rows % BLOCK]
    return picked


def tile_rows(n_in: int) -> int:
    """Rows of x multiplied at once with a block."""
    tile = MOST_TILE_ROWS
    while tile > 1 and tile * BLOCK * n_in > UNPACKED:
        tile //= 2
    return tile


def blocked_matmul(
    x: Float32s, blocks: Float32s, out: Float32s, start: int = 0, stop: int | None = None
) -> None:
    """Fill the columns of blocks start .. stop - 1 of out (n_rows, n_blocks * 32), which is contiguous.

    x (n_rows, n_in), blocks (n_blocks, n_in, 32), all of the weight's.
    Runs without the interpreter lock; disjoint ranges may be computed by several threads at once.
    """
    n_rows, n_in = x.shape
    chosen = slice(start, stop)
    tile = tile_rows(n_in)
    whole = n_rows - n_rows % tile
    if whole:
        tiled = x[:whole].reshape(1, -1, tile, n_in)
        into = out[:whole].reshape(-1, tile, len(blocks), BLOCK).transpose(2, 0, 1, 3)
        np.matmul(tiled, blocks[chosen, None], out=into[chosen])
    if whole < n_rows:
        last = out[whole:].reshape(n_rows - whole, len(blocks), BLOCK).transpose(1, 0, 2)
        np.matmul(x[whole:], blocks[chosen], out=last[chosen])
