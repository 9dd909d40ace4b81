"""The tables of a step hold what the batch says, row by row, and padding elsewhere."""

from itertools import groupby

import numpy as np
import pytest

from streamer.kernels.cuda_tables import ATTENTION_TILE, CONV_TILE, TableLayout, TableShape, pack
from streamer.kernels.ops import Batch, SamplingBatch, Span

PAGE = 16
SHAPE = TableShape(n_rows=400, n_spans=8, n_logits=8, max_pages=40, n_adjust=16, n_masks=2, mask_words=4)


def batch_of(lengths, rng):
    spans, row = [], 0
    for slot, n_rows in zip(rng.permutation(SHAPE.n_spans).tolist(), lengths, strict=False):
        position = int(rng.integers(0, 200))
        pages = rng.integers(0, 1000, -(-(position + n_rows) // PAGE)).astype(np.int32)
        spans.append(Span(slot, row, n_rows, position, pages))
        row += n_rows
    positions = [np.arange(s.position, s.position + s.n_rows, dtype=np.int32) for s in spans]
    ids = rng.integers(-1, 99, row).astype(np.int32)
    last_rows = np.array([s.row_offset + s.n_rows - 1 for s in spans], np.int32)
    return Batch(ids, np.concatenate(positions), tuple(spans), last_rows)


def sampling_of(n):
    zeros, none = np.zeros(n, np.float32), np.zeros(0, np.int32)
    ids = np.zeros(n, np.int32)
    return SamplingBatch(zeros, ids, zeros, zeros, zeros, ids, ids, none, none, zeros[:0], zeros[:0])


@pytest.mark.parametrize(
    "lengths", [[1], [1] * 8, [7], [64], [65, 1], [1, 1, 129, 8, 1, 9], [1, 200, 1, 1, 63, 2]]
)
def test_tables_hold_the_batch_and_padding(lengths):
    rng = np.random.default_rng(len(lengths))
    batch, layout = batch_of(lengths, rng), TableLayout(SHAPE)
    memory = memoryview(bytearray(rng.bytes(layout.nbytes)))  # whatever an earlier step left
    views = layout.views(memory)
    packed = pack(batch, sampling_of(len(lengths)), layout, views)
    n = batch.n_rows
    span_of = [i for i, s in enumerate(batch.spans) for _ in range(s.n_rows)]
    assert views["token_ids"].tolist() == [*batch.token_ids, *[0] * (400 - n)]
    assert views["positions"].tolist() == [*batch.positions, *[0] * (400 - n)]
    assert views["row_span"].tolist() == [*span_of, *[-1] * (400 - n)]
    assert views["row_slot"].tolist() == [*(batch.spans[i].slot for i in span_of), *[-1] * (400 - n)]
    listed = [[s.row_offset, s.n_rows, s.slot, 0] for s in batch.spans]
    assert views["spans"].tolist() == listed + [[0, 0, -1, 0]] * (8 - len(listed))
    for row, span in zip(views["page_table"], batch.spans, strict=False):
        np.testing.assert_array_equal(row[: len(span.pages)], span.pages)
    single = [s.row_offset for s in batch.spans if s.n_rows == 1]
    assert (packed.n_decode, packed.n_spans) == (len(single), len(batch.spans))
    assert packed.single_rows == (len(single) == len(batch.spans))
    assert views["decode_rows"].tolist() == single + [-1] * (8 - len(single))
    long = [(i, s) for i, s in enumerate(batch.spans) if s.n_rows > 1]
    check_tiles(
        views["attention_tiles"], packed.n_attention_tiles, ATTENTION_TILE,
        {i: (s.row_offset, s.n_rows) for i, s in long},
        owner=lambda tile: tile[3],
        third=lambda tile, i: tile[0] - batch.spans[i].row_offset + batch.spans[i].position,
        padding=[0, 0, 0, 0],
    )  # fmt: skip
    by_slot = {s.slot: s for s in batch.spans}
    check_tiles(
        views["conv_tiles"], packed.n_conv_tiles, CONV_TILE,
        {s.slot: (s.row_offset, s.n_rows) for s in batch.spans},
        owner=lambda tile: tile[3],
        third=lambda tile, slot: by_slot[slot].row_offset,
        padding=[0, 0, 0, -1],
    )  # fmt: skip


def check_tiles(table, n_tiles, height, ranges, *, owner, third, padding):
    """Each owner's tiles are its rows, once and in order, none higher than allowed."""
    tiles = table.tolist()
    assert all(tile == padding for tile in tiles[n_tiles:])
    seen = {}
    for who, group in groupby(tiles[:n_tiles], owner):
        assert who not in seen
        seen[who] = []
        for tile in group:
            assert 1 <= tile[1] <= height
            assert tile[2] == third(tile, who)
            seen[who] += range(tile[0], tile[0] + tile[1])
    assert seen == {who: list(range(first, first + n)) for who, (first, n) in ranges.items()}
