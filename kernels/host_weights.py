"""Weights prepared for BLAS on the host: float32, in execution order, so that neighbours make one product.

All prepared weights lie in one buffer without gaps. Projections of one input follow each other in execution order
(q, k, v; gate, up), so their rows together are one matrix: a view, not a copy. The embedding table stays as its
file bytes unless it also is the output projection.
"""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamer.device.base import Buffer, Device
from streamer.gguf.directory import TensorInfo
from streamer.gguf.quants import dequantize
from streamer.kernels.ops import Float32s, Linear, Weight

ROWS_NBYTES = 8 << 20  # float32 bytes dequantized at once: bounds the arithmetic's temporaries


@dataclass(frozen=True)
class RawTable:
    """An embedding table as file bytes."""

    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Matrix:
    """One prepared weight, or several side by side: values (n_out, n_in), bias (n_out,)."""

    values: Float32s
    bias: Float32s | None
    widths: tuple[int, ...]  # rows of each projection


def stays_raw(tensors: Iterable[TensorInfo]) -> frozenset[str]:
    """Names of tensors that are only looked up by row: the embedding, when there is an output projection."""
    names = {tensor.name for tensor in tensors}
    return frozenset({"token_embd.weight"} if "output.weight" in names else ())


def prepared_nbytes(tensors: Sequence[TensorInfo]) -> int:
    """Bytes `HostWeights` allocates for these tensors. Pure: the plan counts them."""
    raw = stays_raw(tensors)
    return sum(4 * tensor.n_elements for tensor in tensors if tensor.name not in raw)


class HostWeights:
    """Weights by name, once `prepare` has been called for each of `tensors` (in execution order).

    Owns the prepared buffer (`prepared_nbytes`). `prepare` may be called from several threads for different
    tensors. File bytes are not referred to afterwards, except those of tensors in `stays_raw`.
    """

    def __init__(self, device: Device, tensors: Sequence[TensorInfo]) -> None:
        self._raw = stays_raw(tensors)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self.nbytes = prepared_nbytes(tensors)
        self._buffer: Buffer = device.allocate(max(self.nbytes, 4), what="prepared weights")
        count = self.nbytes // 4
        self._values = np.ctypeslib.as_array((ctypes.c_float * count).from_address(self._buffer.handle))
        self._offsets: dict[str, int] = {}  # elements
        offset = 0
        for tensor in tensors:
            if tensor.name not in self._raw:
                self._offsets[tensor.name] = offset
                offset += tensor.n_elements
        self._weights: dict[str, Weight] = {}

    def prepare(self, name: str, data: npt.NDArray[np.uint8] | memoryview) -> Weight:
        """Dequantize one weight's file bytes into its place. Peak: a few times ROWS_NBYTES beside the buffer."""
        tensor = self._tensors[name]
        handle: RawTable | Float32s
        raw = np.frombuffer(data, dtype=np.uint8)
        if name in self._raw:
            handle = RawTable(raw)
        else:
            handle = self._place(name)
            _dequantize_into(handle, tensor, raw)
        self._weights[name] = Weight(name, tensor.type, tensor.shape, handle)
        return self._weights[name]

    @property
    def weights(self) -> Mapping[str, Weight]:
        return self._weights

    def _place(self, name: str) -> Float32s:
        """(.., n_out, n_in): the weight's part of the buffer."""
        tensor, offset = self._tensors[name], self._offsets[name]
        return self._values[offset : offset + tensor.n_elements].reshape(tuple(reversed(tensor.shape)))

    def matrix(self, linears: Sequence[Linear]) -> Matrix | None:
        """The projections as one matrix; None when they do not lie side by side (or differ in n_in)."""
        first = linears[0].weight
        if first.name not in self._offsets:
            return None
        end = start = self._offsets[first.name]
        for linear in linears:
            if self._offsets.get(linear.weight.name) != end or linear.n_in != linears[0].n_in:
                return None
            end += linear.n_in * linear.n_out
        values = self._values[start:end].reshape(-1, linears[0].n_in)
        return Matrix(values, joined_bias(linears), tuple(linear.n_out for linear in linears))

    def close(self) -> None:
        """Free the prepared buffer; every weight is invalid afterwards. Idempotent."""
        self._weights.clear()
        self._buffer.close()


def joined_bias(linears: Sequence[Linear]) -> Float32s | None:
    """(sum of n_out,), zeros where a projection has none; None when none has one."""
    if not any(linear.bias or linear.part_biases for linear in linears):
        return None
    parts: list[Float32s] = []
    for linear in linears:
        joined = np.zeros(linear.n_out, np.float32)
        if linear.bias is not None:
            joined += linear.bias.handle
        if linear.part_biases:
            joined += np.concatenate([bias.handle for bias in linear.part_biases])
        parts.append(joined)
    return np.concatenate(parts)


def _dequantize_into(target: Float32s, tensor: TensorInfo, raw: npt.NDArray[np.uint8]) -> None:
    """By groups of rows: the numpy dequantizers need several times their result."""
    n_in = tensor.shape[0]
    rows = target.reshape(-1, n_in)
    data = raw.reshape(len(rows), -1)
    step = max(1, ROWS_NBYTES // (4 * n_in))
    for start in range(0, len(rows), step):
        part = data[start : start + step]
        rows[start : start + step] = dequantize(tensor.type, part.reshape(-1), (n_in, len(part)))
