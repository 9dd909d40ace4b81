"""A batch as tables in device memory: one packed host buffer, one copy a step. Pure packing; no driver here.

Graphs never change: they read everything that varies from these tables at fixed offsets. Every kind of
step has a layout of its own; what it does not use is padding (span -1, slot -1, id 0, tile of 0 rows).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from streamer.kernels.ops import Batch, SamplingBatch

ATTENTION_TILE = 64  # rows a tile of attention_prefill
CONV_TILE = 8  # rows a tile of conv_silu
ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class TableShape:
    """What a layout has room for."""

    n_rows: int
    n_spans: int
    n_logits: int
    max_pages: int  # pages a sequence: the row length of the page table
    n_adjust: int = 0  # sparse logit adjustments
    n_masks: int = 0
    mask_words: int = 0  # uint32 words a mask

    @property
    def n_attention_tiles(self) -> int:
        return self.n_rows // ATTENTION_TILE + self.n_spans

    @property
    def n_conv_tiles(self) -> int:
        return self.n_rows // CONV_TILE + self.n_spans


class TableLayout:
    """Byte offsets of every table for one shape. What every step sends comes first, the rest last."""

    def __init__(self, shape: TableShape) -> None:
        self.shape = shape
        s = shape
        sizes: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
            "token_ids": ((s.n_rows,), np.int32),
            "positions": ((s.n_rows,), np.int32),
            "row_span": ((s.n_rows,), np.int32),
            "row_slot": ((s.n_rows,), np.int32),
            "decode_rows": ((s.n_spans,), np.int32),
            "spans": ((s.n_spans, 4), np.int32),
            "conv_tiles": ((s.n_conv_tiles, 4), np.int32),
            "attention_tiles": ((s.n_attention_tiles, 4), np.int32),
            "logit_rows": ((s.n_logits,), np.int32),
            "temperature": ((s.n_logits,), np.float32),
            "top_k": ((s.n_logits,), np.int32),
            "top_p": ((s.n_logits,), np.float32),
            "min_p": ((s.n_logits,), np.float32),
            "uniform": ((s.n_logits,), np.float32),
            "slots": ((s.n_logits,), np.int32),
            "target_ids": ((s.n_logits,), np.int32),
            "mask_of_row": ((s.n_logits,), np.int32),
            "adjust_start": ((s.n_logits + 1,), np.int32),
            "page_table": ((s.n_spans, s.max_pages), np.int32),
            "adjust_ids": ((s.n_adjust,), np.int32),
            "adjust_divide": ((s.n_adjust,), np.float32),
            "adjust_add": ((s.n_adjust,), np.float32),
            "masks": ((s.n_masks, s.mask_words), np.uint32),
        }
        self.offsets: dict[str, int] = {}
        self.shapes = sizes
        at = 0
        for name, (dims, kind) in sizes.items():
            self.offsets[name] = at
            nbytes = int(np.prod(dims, dtype=np.int64)) * np.dtype(kind).itemsize
            at = (at + nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        self.nbytes = at

    def views(self, memory: memoryview) -> dict[str, npt.NDArray[np.generic]]:
        """Numpy views of every table over `memory` (at least `nbytes`)."""
        return {
            name: np.frombuffer(
                memory, dtype=kind, count=int(np.prod(dims, dtype=np.int64)), offset=self.offsets[name]
            ).reshape(dims)
            for name, (dims, kind) in self.shapes.items()
        }

    @cached_property
    def always_nbytes(self) -> int:
        """Bytes of the tables every step sends; adjustments and masks follow only when used."""
        return self.offsets["adjust_ids"]


@dataclass(frozen=True)
class Packed:
    """What a launch must know of the tables on the host."""

    nbytes: int  # to upload, from the start of the buffer
    n_decode: int  # rows served by decode attention
    n_attention_tiles: int
    n_conv_tiles: int
    n_spans: int
    single_rows: bool  # every span has one row
    sampled: bool  # some row is not greedy
    n_top: int


Views = dict[str, npt.NDArray[np.generic]]


def pack(batch: Batch, sampling: SamplingBatch, layout: TableLayout, views: Views) -> Packed:
    """Write one step's tables into `views`. Rows beyond the batch become padding."""
    n_decode, tiles, conv = _pack_spans(batch, layout.shape, views)
    nbytes = _pack_sampling(sampling, layout, views)
    n_logits = len(batch.logit_rows)
    views["logit_rows"][:n_logits] = batch.logit_rows
    views["logit_rows"][n_logits:] = 0
    return Packed(
        nbytes=nbytes,
        n_decode=n_decode,
        n_attention_tiles=tiles,
        n_conv_tiles=conv,
        n_spans=len(batch.spans),
        single_rows=batch.is_decode,
        sampled=bool((sampling.temperature > 0).any()),
        n_top=sampling.n_top,
    )


def _pack_spans(batch: Batch, shape: TableShape, views: Views) -> tuple[int, int, int]:
    """Array operations over all spans at once: a loop would cost every decode step microseconds a sequence.

    Returns the used length of `decode_rows`, `attention_tiles` and `conv_tiles`.
    """
    n, n_spans = batch.n_rows, len(batch.spans)
    columns = [(s.row_offset, s.n_rows, s.slot, s.position) for s in batch.spans]
    offsets, n_rows, slots, positions = np.array(columns, np.int32).reshape(n_spans, 4).T
    indices = np.arange(n_spans, dtype=np.int32)
    _fill(views["token_ids"], batch.token_ids, 0)
    _fill(views["positions"], batch.positions, 0)
    _fill(views["row_span"], np.repeat(indices, n_rows), -1)
    _fill(views["row_slot"], np.repeat(slots, n_rows), -1)
    _fill(views["spans"], np.stack([offsets, n_rows, slots, np.zeros_like(slots)], axis=1), (0, 0, -1, 0))
    page_table = views["page_table"]
    for index, span in enumerate(batch.spans):
        page_table[index, : len(span.pages)] = span.pages
    is_single = n_rows == 1
    n_decode = _fill(views["decode_rows"], offsets[is_single], -1)
    if n_decode == n:  # a decode step, the one that must be cheap: a tile is a row
        views["attention_tiles"][:] = 0
        conv = np.stack([offsets, n_rows, offsets, slots], axis=1)
        return n_decode, 0, _fill(views["conv_tiles"], conv, (0, 0, 0, -1))
    long = indices[~is_single]
    of, at, count = _tiles(n_rows[long], ATTENTION_TILE)
    of = long[of]
    attention = np.stack([offsets[of] + at, count, positions[of] + at, of], axis=1)
    of, at, count = _tiles(n_rows, CONV_TILE)
    conv = np.stack([offsets[of] + at, count, offsets[of], slots[of]], axis=1)
    n_attention = _fill(views["attention_tiles"], attention, 0)
    return n_decode, n_attention, _fill(views["conv_tiles"], conv, (0, 0, 0, -1))


def _fill(
    table: npt.NDArray[np.generic], entries: npt.NDArray[np.generic], padding: int | tuple[int, ...]
) -> int:
    """Entries, then padding; how many entries there are."""
    n = len(entries)
    table[:n] = entries
    table[n:] = padding
    return n


def _tiles(n_rows: npt.NDArray[np.int32], height: int) -> tuple[npt.NDArray[np.int32], ...]:
    """Cut spans of so many rows into tiles: (index of the span, first row within it, rows) of each."""
    n_tiles = (n_rows + height - 1) // height
    of = np.repeat(np.arange(len(n_rows), dtype=np.int32), n_tiles)
    first_tile = np.cumsum(n_tiles) - n_tiles
    at = ((np.arange(len(of)) - first_tile[of]) * height).astype(np.int32)
    return of, at, np.minimum(height, n_rows[of] - at)


def _pack_sampling(sampling: SamplingBatch, layout: TableLayout, views: Views) -> int:
    n = len(sampling.temperature)
    for name, padding in (
        ("temperature", 0), ("top_k", 0), ("top_p", 1), ("min_p", 0), ("uniform", 0), ("slots", -1),
        ("target_ids", -1),
    ):  # fmt: skip
        views[name][:n] = getattr(sampling, name)
        views[name][n:] = padding
    m = len(sampling.adjust_rows)
    counts = np.bincount(sampling.adjust_rows, minlength=layout.shape.n_logits) if m else 0
    views["adjust_start"][0] = 0
    views["adjust_start"][1:] = np.cumsum(counts) if m else 0
    views["mask_of_row"][:] = -1
    nbytes = layout.always_nbytes
    if m:
        views["adjust_ids"][:m] = sampling.adjust_ids
        views["adjust_divide"][:m] = sampling.adjust_divide
        views["adjust_add"][:m] = sampling.adjust_add
        nbytes = layout.offsets["masks"]
    if sampling.masks is not None and sampling.mask_rows is not None and len(sampling.mask_rows):
        k, words = sampling.masks.shape
        views["masks"][:k, :words] = sampling.masks
        views["masks"][:k, words:] = 0
        views["mask_of_row"][sampling.mask_rows] = np.arange(k)
        nbytes = layout.offsets["masks"] + k * layout.shape.mask_words * 4
    return nbytes
