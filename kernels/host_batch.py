"""What the host operators need to know of a batch, worked out once a step: rows, places, runs of pages."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamer.kernels.ops import Batch, Float32s, Int32s, Span

Places = int | slice | npt.NDArray[np.int64]


@dataclass(frozen=True)
class SpanView:
    """One sequence's rows, and how to see its keys without copying if its pages follow each other."""

    span: Span
    rows: slice
    n_keys: int  # tokens in the cache once this span is written
    first_page: int | None  # of consecutive pages; None: they must be gathered
    n_pages: int


@dataclass(frozen=True)
class HostBatch:
    batch: Batch
    ids: Int32s  # (n_rows,), every -1 resolved
    places: Places  # of the rows in a layer's (n_kv_heads, n_pages * page_size, ..)
    spans: tuple[SpanView, ...]


def read_batch(batch: Batch, page_size: int, last_ids: Int32s) -> HostBatch:
    """`last_ids` (n_slots,): the id sampled last for each sequence slot."""
    ids = batch.token_ids
    if len(ids) and ids.min() < 0:
        slots = np.repeat([s.slot for s in batch.spans], [s.n_rows for s in batch.spans])
        ids = np.where(ids < 0, last_ids[slots], ids)
    views = tuple(_view(span, page_size) for span in batch.spans)
    return HostBatch(batch, ids, _places(batch, page_size), views)


def _view(span: Span, page_size: int) -> SpanView:
    n_keys = span.position + span.n_rows
    n_pages = -(-n_keys // page_size)
    pages = span.pages[:n_pages]
    first = int(pages[0])
    consecutive = n_pages == 1 or bool((pages[1:] - pages[:-1] == 1).all())
    rows = slice(span.row_offset, span.row_offset + span.n_rows)
    return SpanView(span, rows, n_keys, first if consecutive else None, n_pages)


def _places(batch: Batch, page_size: int) -> Places:
    """A number or a slice where it suffices: plain indexing is several times as fast as an index array."""
    parts = []
    for span in batch.spans:
        positions = np.arange(span.position, span.position + span.n_rows)
        parts.append(span.pages[positions // page_size].astype(np.int64) * page_size + positions % page_size)
    places = np.concatenate(parts)
    if len(places) == 1:
        return int(places[0])
    if (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def sequence_view(
    pages: Float32s, view: SpanView, page_size: int, sliding_window: int | None
) -> tuple[Float32s, int]:
    """Keys or values (n_kv_heads, n, length) the span may see, and the position of the first.

    pages (n_kv_heads, n_pages, page_size, length). A view where pages are consecutive, else a copy.
    """
    skip = 0  # whole pages that the window has left behind
    if sliding_window is not None:
        skip = max(0, view.span.position - sliding_window + 1) // page_size
    n_kv_heads, _, _, length = pages.shape
    if view.first_page is not None:
        seen = pages[:, view.first_page + skip : view.first_page + view.n_pages]
    else:
        seen = pages.take(view.span.pages[skip : view.n_pages], axis=1)
    first = skip * page_size
    return seen.reshape(n_kv_heads, -1, length)[:, : view.n_keys - first], first


def for_each_span(batch: HostBatch, compute: Callable[[SpanView], Float32s]) -> Float32s:
    """The spans' results under each other, (n_rows, ..)."""
    if len(batch.spans) == 1:
        return compute(batch.spans[0])
    return np.concatenate([compute(view) for view in batch.spans])
