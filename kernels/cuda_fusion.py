"""A norm computed by the product before it: which addition is followed by which norm, learned from the calls.

A forward calls the same operators in the same order every step. The first run (a dry run is enough) notes,
for each addition to the residual stream, the norm that is applied to it next; later runs let the addition
quantize its own result for that norm. A wrong guess costs its work only: the norm is computed then.
"""

from dataclasses import dataclass

from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.matmul_arguments import NextRows, QuantizedRows
from streamer.kernels.ops import Norm

NORMED_NBYTES = 1 << 20  # room for quantized rows: 8 tokens of 32768 elements at 16 bits and their scales


@dataclass(frozen=True)
class Deferred:
    """Rows times the norm's weight, quantized, and the squares whose mean is still to be divided by."""

    norm: Norm
    residual: int  # address of the rows it was made from
    n_tokens: int
    rows: QuantizedRows
    squares: int


class NormFusion:
    """State of one forward after the other. `place`: device address of NORMED_NBYTES."""

    def __init__(self, place: int, *, activation_bytes: int) -> None:
        self._place, self._activation_bytes = place, activation_bytes
        self._followers: dict[int, Norm] = {}  # addition, counted through a forward -> the norm after it
        self._additions = 0
        self._last: tuple[int, int] | None = None  # addition, address: nothing has been computed since
        self._ready: Deferred | None = None

    def begin(self) -> None:
        """A new forward."""
        self._additions, self._last, self._ready = 0, None, None

    def added(self, residual: DeviceArray) -> Norm | None:
        """An addition to `residual` is about to be launched: the norm that follows it, if known."""
        self._last, self._ready = (self._additions, residual.address), None
        self._additions += 1
        return self._followers.get(self._last[0])

    def next_rows(self, norm: Norm, residual: DeviceArray) -> NextRows:
        """Where the addition leaves its rows for `norm`."""
        n, width = residual.rows, residual.columns
        sizes = (n * width, n * width if self._activation_bytes == 2 else 0, n * width // 8, n * width // 4)
        addresses, at = [], self._place
        for size in (*sizes, n * width // 8):
            addresses.append(at if size else 0)
            at += -(-size // 256) * 256
        assert at - self._place <= NORMED_NBYTES
        rows, squares = QuantizedRows(*addresses[:4]), addresses[4]
        self._ready = Deferred(norm, residual.address, n, rows, squares)
        return NextRows(rows, norm.weight.handle.address, squares)

    def taken(self, x: DeviceArray, norm: Norm) -> Deferred | None:
        """`norm` is applied to `x` now: its rows, if the addition before left them."""
        if self._last is not None and self._last[1] == x.address:
            self._followers[self._last[0]] = norm
        ready, self._ready = self._ready, None
        if ready is not None and (ready.norm, ready.residual, ready.n_tokens) == (norm, x.address, x.rows):
            return ready
        return None
