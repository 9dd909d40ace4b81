"""What a file says, taken, defaulted with a note, or refused by key or tensor."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from streamer.errors import GGUFError
from streamer.gguf.metadata import Metadata
from streamer.gguf.reader import read_directory
from streamer.kernels.host_weights import prepared_nbytes
from streamer.kernels.ops import RopePairing
from streamer.kernels.rope import inverse_frequencies, rotations
from streamer.models.blocks import Attention, make_rope
from streamer.models.keys import Keys
from streamer.models.registry import ARCHITECTURES, describe
from streamer.models.weights import WeightSource


@pytest.fixture
def described(tmp_path):
    return lambda model: describe(read_directory(str(model.write(tmp_path / "m.gguf"))))


@pytest.fixture
def refused(described):
    def check(model, subject, reason):
        with pytest.raises(GGUFError) as caught:
            described(model)
        assert caught.value.subject == subject
        assert re.search(reason, str(caught.value)), str(caught.value)

    return check


def test_unknown_architecture_is_refused_with_the_known_ones(small_model, refused):
    model = small_model("llama")
    model.architecture = "mamba"
    refused(model, "general.architecture", "'mamba' is not supported.*" + ", ".join(sorted(ARCHITECTURES)))


def test_missing_rope_base_is_the_documented_default_and_noted(small_model, described):
    """Case 18."""
    architecture = described(small_model("llama", rope__freq_base=None))
    assert architecture.hparams.rope_base == 10000.0
    assert architecture.notes == ("key=llama.rope.freq_base missing=true default=10000.0",)


def test_nothing_is_noted_where_nothing_was_defaulted(small_model, described):
    for name in ARCHITECTURES:
        assert described(small_model(name)).notes == ()


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "LINEAR"])
def test_unknown_rope_scaling_is_refused(kind, small_model, refused):
    """Case 19."""
    refused(small_model("llama", rope__scaling__type=kind), "llama.rope.scaling.type", "not known")


def test_rope_scaling_none_with_a_factor_is_none(small_model, described):
    hparams = described(small_model("llama", rope__scaling__type="none", rope__scaling__factor=4.0)).hparams
    assert hparams.rope_scaling.factor == 1.0


def test_yarn_is_read(small_model, described):
    model = small_model(
        "qwen2",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=64,
    )
    scaling = described(model).hparams.rope_scaling
    assert scaling.yarn is not None
    assert (scaling.yarn.factor, scaling.yarn.original_context) == (4.0, 64)
    assert np.isclose(scaling.attention_factor, 1 + 0.1 * np.log(4))


def ggml_turns(positions, n_rot, base, freq_scale, n_ctx_orig, ext_factor, attn_factor, fast=32.0, slow=1.0):
    """(n, n_rot / 2) cos + i sin: ggml's rope_yarn, pair by pair."""

    def corr_dim(turns):
        return n_rot * np.log(n_ctx_orig / (turns * 2 * np.pi)) / (2 * np.log(base))

    low, high = max(0, np.floor(corr_dim(fast))), min(n_rot - 1, np.ceil(corr_dim(slow)))
    turns = np.empty((len(positions), n_rot // 2), complex)
    for row, position in enumerate(positions):
        for pair in range(n_rot // 2):
            extrapolated = position * base ** (-2 * pair / n_rot)
            theta, mscale = freq_scale * extrapolated, attn_factor
            if ext_factor:
                ramp = 1 - min(1, max(0, (pair - low) / max(0.001, high - low)))
                theta = theta * (1 - ramp * ext_factor) + extrapolated * ramp * ext_factor
                mscale *= 1 + 0.1 * np.log(1 / freq_scale)
            turns[row, pair] = np.exp(1j * theta) * mscale
    return turns


@pytest.mark.parametrize(
    ("keys", "freq_scale", "ext_factor", "attn_factor"),
    [
        ({}, 1.0, 0.0, 1.0),
        ({"factor": 4.0}, 0.25, 0.0, 1.0),
        ({"type": "linear", "factor": 4.0, "attn_factor": 1.5}, 0.25, 0.0, 1.5),
        ({"factor": 4.0, "attn_factor": 0.5}, 0.25, 0.0, 0.5),
        ({"type": "none", "factor": 4.0, "attn_factor": 1.5}, 1.0, 0.0, 1.5),
        ({"type": "yarn", "factor": 4.0}, 0.25, 1.0, 1.0),
        ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.0}, 0.25, 0.0, 1.0),
        ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.0, "attn_factor": 1.5}, 0.25, 0.0, 1.5),
        ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": -1.0}, 0.25, 1.0, 1.0),
        ({"type": "yarn", "factor": 8.0, "yarn_ext_factor": 0.5, "attn_factor": 1.5}, 0.125, 0.5, 1.5),
    ],
)
def test_rotations_are_those_of_ggml(keys, freq_scale, ext_factor, attn_factor, small_model, described):
    model = small_model("llama", **{f"rope__scaling__{key}": value for key, value in keys.items()})
    architecture = described(model)
    rope = make_rope(architecture.hparams, WeightSource(architecture.directory), RopePairing.NORM)
    positions = np.array([0, 1, 17, 200])
    turns = rotations(positions, inverse_frequencies(rope), rope.attention_factor)
    expected = ggml_turns(positions, 16, 10000.0, freq_scale, 256, ext_factor, attn_factor)
    np.testing.assert_allclose(turns, expected, atol=2e-6)  # complex64 of values near 1


def test_the_old_key_of_the_factor_counts_where_the_new_one_is_missing(small_model, described):
    for new, factor in ((None, 4.0), (2.0, 2.0)):
        model = small_model("llama", rope__scale_linear=4.0, rope__scaling__factor=new)
        assert described(model).hparams.rope_scaling.factor == factor


def test_windows_have_the_attention_factor_and_no_scaling(small_model, described):
    keys = {"rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 1.5}
    architecture = described(small_model("gemma3", **keys))
    model = architecture.bind(dict.fromkeys(spec.name for spec in architecture.specs()))
    ropes = [s.rope for s in model.sublayers if isinstance(s, Attention)]
    assert [(r.scale, r.attention_factor) for r in ropes] == [(1.0, 1.5), (1.0, 1.5), (0.25, 1.5)]


def test_yarn_over_a_base_of_one_is_refused(small_model, refused):
    model = small_model("llama", rope__scaling__type="yarn", rope__freq_base=1.0)
    refused(model, "llama.rope.freq_base", "is 1")


@pytest.mark.parametrize(
    ("keys", "lengths"),
    [
        ({}, (16, 16)),
        ({"attention__key_length": 32}, (32, 16)),
        ({"attention__value_length": 24}, (16, 24)),
        ({"attention__key_length": 8, "attention__value_length": 24}, (8, 24)),
    ],
)
def test_key_and_value_lengths_default_apart_from_each_other(keys, lengths, small_model, described):
    hparams = described(small_model("llama", **keys)).hparams
    assert (hparams.key_length, hparams.value_length) == lengths


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("block_count", None, "missing"),
        ("block_count", 0, "must be 1 to"),
        ("block_count", 4097, "must be 1 to"),
        ("block_count", "three", "must be an integer, not text"),
        ("block_count", True, "must be an integer, not a boolean"),
        ("context_length", None, "missing"),
        ("embedding_length", [64], "must be an integer, not an array"),
        ("attention.head_count", 0, "must be 1 to"),
        ("attention.head_count", 6, "does not divide 64 channels"),
        ("attention.head_count_kv", 3, "does not divide 4 heads"),
        ("attention.head_count_kv", [2, 2], "2 entries for 3 layers"),
        ("attention.head_count_kv", [2] * 4097, "4097 entries"),
        ("feed_forward_length", ["80"] * 5000, "5000 entries"),
        ("block_count", [3] * 5000, "5000 entries"),
        ("attention.head_count_kv", [2, 0, 2], "is 0; must be 1"),
        ("attention.layer_norm_rms_epsilon", None, "missing"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "finite"),
        ("attention.layer_norm_rms_epsilon", "small", "must be a number"),
        ("attention.causal", False, "only causal"),
        ("attention.causal", 0, "must be a boolean, not an integer"),
        ("attention.causal", 1.0, "must be a boolean, not a float"),
        ("attention.causal", "true", "must be a boolean, not text"),
        ("attention.causal", [True, True], "must be a boolean, not an array"),
        ("rope.freq_base", 0.0, "above zero"),
        ("rope.freq_base", float("inf"), "finite"),
        ("rope.dimension_count", 7, "by pairs"),
        ("rope.dimension_count", 32, "must be 2 to 16"),
        ("nextn_predict_layers", 3, "is 3 of 3 blocks"),
        ("feed_forward_length", None, "missing"),
    ],
)
def test_impossible_hyperparameter_is_refused_by_key(key, value, reason, small_model, refused):
    model = small_model("llama")
    model.metadata[key] = value
    if value is None:
        del model.metadata[key]
    refused(model, f"llama.{key}", reason)


@pytest.mark.parametrize("value", [1e-300, -1e-300, 1e300, 1e39, 1e-40])
def test_a_number_that_is_none_in_float32_is_refused(value):
    """Only a key of type F64 can hold one."""
    metadata = Metadata("m.gguf", {"toy.epsilon": value, "toy.none": 0.0, "toy.least": 2.0**-126})
    keys = Keys(SimpleNamespace(path="m.gguf", architecture="toy", metadata=metadata))
    with pytest.raises(GGUFError, match=r"toy\.epsilon: .*(float32|above zero)"):
        keys.real("epsilon")
    with pytest.raises(GGUFError, match=r"toy\.epsilon: .*float32"):
        keys.real("epsilon", positive=False)
    assert (keys.real("none", positive=False), keys.real("least")) == (0.0, 2.0**-126)


def test_an_array_may_have_more_entries_than_layers(small_model, described):
    assert described(small_model("llama", attention__head_count_kv=[2, 1, 2, 4])).hparams.n_kv_heads == (
        2,
        1,
        2,
    )


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("ssm.group_count", 3, "no multiple of 3 key heads"),
        ("ssm.inner_size", 97, "no multiple of 4 value heads"),
        ("ssm.conv_kernel", 1, "must be 2 to 64"),
        ("attention.recurrent_layers", [True], "1 entries for 3 layers"),
        ("attention.recurrent_layers", "all", "must be an array of booleans"),
    ],
)
def test_impossible_delta_net_is_refused_by_key(key, value, reason, small_model, refused):
    model = small_model("qwen35")
    model.metadata[key] = value
    subject = "ssm.time_step_rank" if key == "ssm.group_count" else key
    refused(model, f"qwen35.{subject}", reason)


def test_more_experts_used_than_there_are_is_refused(small_model, refused):
    model = small_model("qwen3moe")
    model.metadata["expert_used_count"] = 9
    refused(model, "qwen3moe.expert_used_count", "is 9; must be 1 to 8")


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.1.attn_q.weight", "blk.2.ffn_down.weight"])
def test_missing_tensor_is_refused_by_name(name, small_model, refused):
    model = small_model("llama")
    del model.tensors[name]
    refused(model, name, "missing")


def test_tensor_of_another_shape_is_refused_by_name(small_model, refused):
    model = small_model("llama")
    model.matrix("blk.1.ffn_up.weight", 81, 64)
    refused(model, "blk.1.ffn_up.weight", r"has shape \[64, 81\] instead of \[64, 80\]")


def test_more_tokens_than_embedding_rows_is_refused(small_model, refused):
    model = small_model("llama")
    model.tokens = 97
    refused(model, "tokenizer.ggml.tokens", "97 tokens for 96 embedding rows")


def test_rows_beyond_the_tokens_are_padding(small_model, described):
    """Case 23."""
    model = small_model("llama")
    model.tokens = 60
    architecture = described(model)
    assert (architecture.n_vocab, architecture.n_valid_ids) == (96, 60)


def test_without_a_tokenizer_every_row_is_valid(small_model, described):
    model = small_model("llama")
    model.tokens = 0
    assert described(model).n_valid_ids == 96


def test_tied_output_is_counted_once(small_model, described):
    """Case 22."""
    model = small_model("llama")
    del model.tensors["output.weight"]
    names = [spec.name for spec in described(model).specs()]
    assert names.count("token_embd.weight") == 1
    assert len(names) == len(set(names)) == len(model.tensors)


def test_specs_come_in_execution_order_with_projections_side_by_side(small_model, described):
    names = [spec.name for spec in described(small_model("qwen2")).specs()]
    assert names[0] == "token_embd.weight"
    assert names[-2:] == ["output_norm.weight", "output.weight"]
    start = names.index("blk.1.attn_norm.weight")
    parts = ["attn_norm.weight", *(f"attn_{p}.weight" for p in "qkv"), *(f"attn_{p}.bias" for p in "qkv")]
    assert names[start : start + 7] == [f"blk.1.{part}" for part in parts]
    layers = [spec.layer for spec in described(small_model("qwen2")).specs() if spec.layer is not None]
    assert layers == sorted(layers)


def test_unused_tensor_outside_layers_is_left_out_and_noted(small_model, described):
    model = small_model("llama")
    model.vector("extra.weight", 8)
    architecture = described(model)
    assert architecture.skipped == ("extra.weight",)
    assert architecture.notes == ("tensor=extra.weight left_out=true reason=unused",)


def test_notes_and_refusals_of_tensors_are_one_line(small_model, described, tmp_path):
    model = small_model("llama")
    model.vector("extra\n\x1b[2J\r.weight", 8)
    (note,) = described(model).notes
    assert note.isprintable()
    model.vector("blk.0.a\n\x1b[2J\r", 4)
    with pytest.raises(GGUFError) as caught:
        described(model)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("key", ["general.architecture", "llama.rope.scaling.type"])
def test_long_text_is_cut_in_a_refusal(key, small_model, tmp_path):
    directory = read_directory(str(small_model("llama").write(tmp_path / "m.gguf")))
    for value in ("x" * 10_000_000, "\n" * 10_000_000):
        values = {**{k: directory.metadata[k] for k in directory.metadata}, key: value}
        with pytest.raises(GGUFError) as caught:
            describe(replace(directory, metadata=Metadata("m.gguf", values)))
        assert caught.value.subject == key
        assert len(str(caught.value)) < 400
        assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "name",
    [
        "output_norm.bias",
        "token_embd.bias",
        "token_embd_norm.weight",
        "position_embd.weight",
        "output.scale",
        "rope_factors_long.weight",
        "rope_freqs.bias",
        "per_layer_token_embd.weight",
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen35"])
def test_unknown_tensor_around_the_layers_is_refused(name, architecture, small_model, refused):
    model = small_model(architecture)
    model.vector(name, 64)
    refused(model, name, f"not known in architecture {architecture}")


def test_tensors_that_no_text_needs_are_left_out(small_model, described):
    model = small_model("llama")
    names = (
        "v.position_embd.weight",
        "mm.0.weight",
        "a.output.weight",
        "output_hook",
        "rope_freqs_old.weight",
    )
    for name in names:
        model.vector(name, 8)
    assert described(model).skipped == names


def test_known_tensors_around_the_layers_are_used(small_model, described):
    model = small_model("llama")
    model.vector("rope_freqs.weight", 8)
    model.vector("output.bias", 96)
    architecture = described(model)
    assert architecture.skipped == ()
    assert {"rope_freqs.weight", "output.bias"} <= {spec.name for spec in architecture.specs()}


def test_unknown_tensor_of_a_layer_is_refused(small_model, refused):
    model = small_model("llama")
    model.vector("blk.0.attn_sinks.weight", 4)
    refused(model, "blk.0.attn_sinks.weight", "not known in architecture llama")


def test_prepared_bytes_are_a_function_of_the_tensors(small_model, tmp_path, open_model):
    for tied in (False, True):
        model = small_model("qwen35moe")
        if tied:
            del model.tensors["output.weight"]
        runner = open_model(model.write(tmp_path / f"{tied}.gguf"))
        infos = [runner.directory.tensors[spec.name] for spec in runner.architecture.specs()]
        assert runner.weights.nbytes == prepared_nbytes(infos)
        raw = 0 if tied else 96 * 64
        elements = sum(info.n_elements for info in infos) - raw
        assert elements * 4 <= runner.weights.nbytes <= elements * 4 * 1.6  # blocks of 32 rows are padded
