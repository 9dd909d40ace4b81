"""Chunks cover a weight exactly once, cut where formats and checksums allow."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamer.gguf.quants import QuantType
from streamer.plan.chunks import chunk_step, chunks_of
from streamer.plan.plan import Role

TYPES = [t for t in QuantType if t.is_dequantizable]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(type=st.sampled_from(TYPES), rows=st.integers(1, 300), chunk_nbytes=st.integers(512, 1 << 17))
def test_chunks_cover_the_weight_once_in_order(models, type, rows, chunk_nbytes):
    model = models.Model(n_layers=1)
    model.add("blk.0.a", Role.ATTENTION, 0, (256, 3))
    model.add("blk.0.b", Role.ATTENTION, 0, (256, rows), type)
    plan = model.plan(chunk_nbytes=chunk_nbytes)
    weight = plan.weights[1]
    offset = 0
    chunks = chunks_of(weight, plan)
    for chunk in chunks:
        assert (chunk.weight, chunk.shard, chunk.offset) == (1, 0, offset)
        assert chunk.file_offset == weight.tensor.offset + offset
        assert 0 < chunk.nbytes <= chunk_nbytes
        offset += chunk.nbytes
    assert offset == weight.tensor.nbytes
    assert all(chunk.offset % type.block_nbytes == 0 for chunk in chunks)


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_a_slot_of_usual_size_cuts_at_checksum_rows_and_plane_boundaries(type):
    step = chunk_step(type, 4 << 20)
    assert step % 512 == 0
    assert step % (16 * type.block_nbytes) == 0
    assert (4 << 20) - (4 << 20) // step * step < 1 << 18  # little of the slot is wasted


def test_a_weight_of_exactly_a_slot_is_one_chunk(models):
    model = models.Model(n_layers=1)
    model.add("blk.0.a", Role.ATTENTION, 0, (1024, 4))
    model.add("blk.0.b", Role.ATTENTION, 0, (1024, 8))
    plan = model.plan(chunk_nbytes=16384)
    assert [len(chunks_of(weight, plan)) for weight in plan.weights] == [1, 2]


def test_a_chunk_that_holds_no_quant_block_is_refused():
    with pytest.raises(ValueError, match="Q6_K"):
        chunk_step(QuantType.Q6_K, 200)
