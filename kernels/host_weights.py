"""Weights prepared for BLAS on the host: float32, in blocks, projections of one input as one matrix.

All prepared weights lie in one buffer. Matrices that follow each other in execution order and have the same
n_in (q, k, v; gate, up) are a group: one blocked matrix of all their rows, so that several projections of one
input are one product. The embedding table stays as its file bytes unless it also is the output projection.
"""

import ctypes
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamer.device.base import Buffer, Device
from streamer.gguf.directory import TensorInfo
from streamer.gguf.quants import dequantize
from streamer.kernels.matmul import BLOCK, blocks_of, write_rows
from streamer.kernels.ops import Float32s, Linear, Weight

ROWS_NBYTES = 1 << 19  # float32 bytes dequantized at once: temporaries stay in the cache


@dataclass(frozen=True)
class RawTable:
    """An embedding table as file bytes."""

    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Rows:
    """A prepared matrix: n_out rows from `first_row` on of a group's blocks (n_blocks, n_in, 32)."""

    blocks: Float32s
    first_row: int
    n_out: int


@dataclass(frozen=True)
class Stack:
    """Prepared experts: blocks (n_experts, n_blocks, n_in, 32), each expert with n_out rows."""

    blocks: Float32s
    n_out: int


@dataclass(frozen=True)
class Product:
    """Some projections as one product: the columns `columns` of x times `blocks`, plus bias (n_out,)."""

    blocks: Float32s
    columns: slice
    bias: Float32s | None


@dataclass(frozen=True)
class Place:
    """Where a weight lies in the buffer. `offset` in elements; matrices share their group's."""

    offset: int
    shape: tuple[int, ...]  # of the blocks (matrix: of the whole group's), or the vector's length
    first_row: int = 0
    n_rows: int = 0  # of the whole group


def stays_raw(tensors: Iterable[TensorInfo]) -> frozenset[str]:
    """Names of tensors that are only looked up by row: the embedding, when there is an output projection."""
    names = {tensor.name for tensor in tensors}
    return frozenset({"token_embd.weight"} if "output.weight" in names else ())


def place_weights(tensors: Sequence[TensorInfo]) -> tuple[dict[str, Place], int]:
    """Every prepared weight's place, and the elements of the whole buffer. Pure."""
    raw = stays_raw(tensors)
    places: dict[str, Place] = {}
    offset = 0
    prepared = enumerate(tensor for tensor in tensors if tensor.name not in raw)
    for _, members in itertools.groupby(prepared, key=_group):
        group = [tensor for _, tensor in members]
        shape = _blocks_shape(group)
        first_row, n_rows = 0, sum(tensor.shape[-1] for tensor in group)
        for tensor in group:
            places[tensor.name] = Place(offset, shape, first_row, n_rows)
            first_row += tensor.shape[-1]
        offset += int(np.prod(shape, dtype=np.int64))
    return places, offset


def _group(item: tuple[int, TensorInfo]) -> tuple[int, int]:
    """Neighbouring matrices of the same n_in have the same key; everything else has a key of its own."""
    index, tensor = item
    return (tensor.shape[0], -1) if len(tensor.shape) == 2 else (0, index)


def _blocks_shape(group: Sequence[TensorInfo]) -> tuple[int, ...]:
    shape = group[0].shape
    match len(shape):
        case 1:
            return shape
        case 2:
            return blocks_of(sum(tensor.shape[1] for tensor in group)), shape[0], BLOCK
        case _:
            return shape[2], blocks_of(shape[1]), shape[0], BLOCK


def prepared_nbytes(tensors: Sequence[TensorInfo]) -> int:
    """Bytes `HostWeights` allocates for these tensors (in execution order). Pure: the plan counts them."""
    return 4 * place_weights(tensors)[1]


class HostWeights:
    """Weights by name, once `prepare` has been called for each of `tensors` (in execution order).

    Owns the prepared buffer (`prepared_nbytes`). `prepare` may be called from several threads for different
    tensors. File bytes are not referred to afterwards, except those of tensors in `stays_raw`.
    """

    def __init__(self, device: Device, tensors: Sequence[TensorInfo]) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._places, count = place_weights(tensors)
        self.nbytes = 4 * count
        self._buffer: Buffer = device.allocate(max(self.nbytes, 4), what="prepared weights")
        self._values = np.ctypeslib.as_array((ctypes.c_float * count).from_address(self._buffer.handle))
        self._weights: dict[str, Weight] = {}

    def prepare(self, name: str, data: npt.NDArray[np.uint8] | memoryview) -> Weight:
        """Dequantize one weight's file bytes into its place. Peak beside the buffer: a few ROWS_NBYTES."""
        tensor = self._tensors[name]
        raw = np.frombuffer(data, dtype=np.uint8)
        self._weights[name] = Weight(name, tensor.type, tensor.shape, self._prepared(tensor, raw))
        return self._weights[name]

    def _prepared(self, tensor: TensorInfo, raw: npt.NDArray[np.uint8]) -> RawTable | Rows | Stack | Float32s:
        place = self._places.get(tensor.name)
        if place is None:
            return RawTable(raw)
        lies = self._lies(place)
        if len(tensor.shape) == 1:
            lies[:] = dequantize(tensor.type, raw, tensor.shape)
            return lies
        if len(tensor.shape) == 2:
            self._clear_padding(place, lies, tensor)
            _dequantize_into(lies, place.first_row, tensor, raw)
            return Rows(lies, place.first_row, tensor.shape[1])
        for blocks, data in zip(lies, raw.reshape(len(lies), -1), strict=True):
            blocks[-1] = 0
            _dequantize_into(blocks, 0, tensor, data)
        return Stack(lies, tensor.shape[1])

    def _lies(self, place: Place) -> Float32s:
        count = int(np.prod(place.shape, dtype=np.int64))
        return self._values[place.offset : place.offset + count].reshape(place.shape)

    @staticmethod
    def _clear_padding(place: Place, blocks: Float32s, tensor: TensorInfo) -> None:
        """Lanes behind the group's last row: multiplied like the others, so nothing strange may lie there."""
        if place.first_row + tensor.shape[1] == place.n_rows:
            blocks[-1, :, (place.n_rows - 1) % BLOCK + 1 :] = 0

    @property
    def weights(self) -> Mapping[str, Weight]:
        return self._weights

    def close(self) -> None:
        """Free the prepared buffer; every weight is invalid afterwards. Idempotent."""
        self._weights.clear()
        self._buffer.close()


def product_of(linears: Sequence[Linear]) -> Product | None:
    """The projections as one product; None when their rows do not follow each other in one group."""
    first: Rows = linears[0].weight.handle
    n_rows = 0
    for linear in linears:
        rows: Rows = linear.weight.handle
        if rows.blocks is not first.blocks and rows.blocks.ctypes.data != first.blocks.ctypes.data:
            return None
        if rows.first_row != first.first_row + n_rows:
            return None
        n_rows += rows.n_out
    begin = first.first_row // BLOCK
    end = blocks_of(first.first_row + n_rows)
    column = first.first_row - begin * BLOCK
    return Product(first.blocks[begin:end], slice(column, column + n_rows), joined_bias(linears))


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


def _dequantize_into(
    blocks: Float32s, first_row: int, tensor: TensorInfo, raw: npt.NDArray[np.uint8]
) -> None:
    """By groups of rows, each as one long row: the numpy dequantizers take short ones by sixteens."""
    n_in, n_rows = tensor.shape[0], tensor.shape[1]
    data = raw.reshape(n_rows, -1)
    step = max(BLOCK, ROWS_NBYTES // (4 * n_in) // BLOCK * BLOCK)
    for start in range(0, n_rows, step):
        part = data[start : start + step]
        values = dequantize(tensor.type, part.reshape(-1), (n_in * len(part),))
        write_rows(blocks, first_row + start, values.reshape(len(part), n_in))
