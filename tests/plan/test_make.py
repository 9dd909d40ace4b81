"""The plan: order, places, refusals."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamer.errors import GGUFError
from streamer.gguf.quants import QuantType
from streamer.plan.layouts import LAYOUTS, cuda_layout, host_layout, resident_nbytes
from streamer.plan.plan import Layout, Role

PROPERTY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_weights_are_in_execution_order(models):
    plan = models.toy(3).plan()
    assert [weight.index for weight in plan.weights] == list(range(len(plan.weights)))
    assert [segment.name for segment in plan.segments] == [
        "embedding",
        "tables",
        "layer 0",
        "layer 1",
        "layer 2",
        "output",
    ]
    assert plan.n_layers == 3
    layers = [weight.layer for weight in plan.weights if weight.layer is not None]
    assert layers == sorted(layers)
    assert [plan.weights[i].name for i in plan.segments[-1].weights] == [
        "output_norm.weight",
        "output.weight",
    ]


def test_absent_optional_weights_are_left_out(models):
    names = {weight.name for weight in models.toy().plan().weights}
    assert "blk.0.attn_q.weight" in names
    assert "blk.0.attn_q.bias" not in names


def test_a_tied_output_is_planned_once(models):
    tied, untied = models.toy(tied=True).plan(), models.toy().plan()
    assert [weight.name for weight in tied.weights].count("token_embd.weight") == 1
    assert tied.nbytes == untied.nbytes - 100 * 68
    assert tied.memory.weights < untied.memory.weights


def test_a_missing_tensor_is_refused_by_name(models):
    model = models.toy()
    del model.tensors["blk.1.ffn_up.weight"]
    with pytest.raises(GGUFError, match=r"blk\.1\.ffn_up\.weight: tensor is missing"):
        model.plan()


@pytest.mark.parametrize("shape", [(64, 32), (33, 64), (64,), (64, 33, 2)])
def test_a_wrong_shape_is_refused_by_name(models, shape):
    model = models.toy(type=QuantType.F32)
    tensor = model.tensors["blk.1.ffn_up.weight"]
    model.tensors[tensor.name] = replace(tensor, shape=shape)
    with pytest.raises(GGUFError, match=r"blk\.1\.ffn_up\.weight: tensor has shape .*64, 33"):
        model.plan()


def test_trailing_ones_of_a_shape_do_not_matter(models):
    model = models.toy()
    tensor = model.tensors["blk.1.attn_norm.weight"]
    model.tensors[tensor.name] = replace(tensor, shape=(64, 1, 1))
    assert len(model.plan().weights) == len(models.toy().plan().weights)


@pytest.mark.parametrize("type", [QuantType.I32, QuantType.I8, QuantType.Q8_K], ids=lambda t: t.name)
def test_a_type_that_is_no_weights_is_refused_by_name(models, type):
    model = models.toy()
    tensor = model.tensors["blk.0.attn_q.weight"]
    model.tensors[tensor.name] = replace(tensor, type=type)
    with pytest.raises(GGUFError, match=rf"blk\.0\.attn_q\.weight: tensor type {type.name}"):
        model.plan()


def test_a_layers_unknown_tensor_is_refused_by_name(models):
    model = models.toy()
    model.add("blk.1.attn_sinks.weight", Role.ATTENTION, 1, (8,), asked=False)
    with pytest.raises(GGUFError, match=r"blk\.1\.attn_sinks\.weight.*not known"):
        model.plan()


def test_a_block_beyond_the_trunk_is_refused_unless_it_predicts_next_tokens(models):
    model = models.toy(2)
    model.add("blk.2.nextn.eh_proj.weight", Role.ATTENTION, 2, (8,), asked=False)
    with pytest.raises(GGUFError, match=r"blk\.2\.nextn"):
        model.plan()
    model.keys = {"toy.block_count": 3, "toy.nextn_predict_layers": 1}
    assert model.plan().skipped == ("blk.2.nextn.eh_proj.weight",)


def test_tensors_of_no_layer_are_left_out_and_listed(models):
    model = models.toy()
    model.add("mm.0.weight", Role.TABLE, None, (8,), asked=False)
    model.add("blk.0.attn_rot_embd.weight", Role.TABLE, None, (8,), asked=False)
    assert model.plan().skipped == ("mm.0.weight", "blk.0.attn_rot_embd.weight")


@PROPERTY
@given(
    st.lists(st.sampled_from([t for t in QuantType if t.is_dequantizable]), min_size=1, max_size=12),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 9),
)
def test_destinations_are_aligned_and_never_overlap(models, types, kind, rows):
    model = models.Model(n_layers=len(types))
    for layer, type in enumerate(types):
        model.add(f"blk.{layer}.a", Role.ATTENTION, layer, (256, rows), type)
        model.add(f"blk.{layer}.b", Role.NORM, layer, (rows,))
        model.add(f"blk.{layer}.c", Role.FEED_FORWARD, layer, (512, 3), types[0])
    plan = model.plan(layouts=LAYOUTS[kind])
    for segment in plan.segments:
        end = 0
        for index in segment.weights:
            weight = plan.weights[index]
            assert weight.segment == segment.index
            assert weight.destination_offset % 256 == 0
            assert weight.destination_offset >= end
            end = weight.destination_offset + weight.resident_nbytes
        assert end <= segment.nbytes < end + 256
    assert sorted(i for segment in plan.segments for i in segment.weights) == list(range(len(plan.weights)))
    assert plan.memory.weights == sum(segment.nbytes for segment in plan.segments)
    assert plan.nbytes == sum(tensor.nbytes for tensor in model.tensors.values())


@pytest.mark.parametrize("type", [t for t in QuantType if t.is_dequantizable], ids=lambda t: t.name)
def test_layouts_hold_at_least_what_they_must(type):
    n_elements = 256 * 7
    file_nbytes = n_elements // type.block_elements * type.block_nbytes
    assert host_layout(type, Role.ATTENTION) is Layout.FILE
    assert resident_nbytes(Layout.FILE, type, n_elements) == file_nbytes
    layout = cuda_layout(type, Role.ATTENTION)
    nbytes = resident_nbytes(layout, type, n_elements)
    if layout is Layout.PLANES:
        assert file_nbytes <= nbytes < file_nbytes + 16 * 4
        assert nbytes % 16 == 0
    if layout is Layout.BF16:
        assert nbytes == 2 * n_elements


NATIVE = {
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
}


def test_types_with_a_native_kernel_are_never_expanded():
    expanded = {t.name for t in QuantType if cuda_layout(t, Role.ATTENTION) is Layout.BF16}
    assert not expanded & NATIVE
    assert {"IQ3_S", "TQ2_0", "NVFP4", "F64"} <= expanded
