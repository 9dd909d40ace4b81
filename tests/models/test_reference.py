"""Every architecture and variant of its files equals an independent float64 reference."""

import numpy as np
import pytest

from streamer.errors import GGUFError
from streamer.runtime.planning import RuntimeOptions, plan_model, read_model

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3", "qwen3moe", "qwen35", "qwen35moe"]
IDS = [5, 17, 3, 90, 41, 8, 8, 63, 22, 1, 77, 50, 12]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture_equals_reference(architecture, small_model, same):
    same(small_model(architecture), IDS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tied_output_equals_reference(architecture, small_model, same):
    model = small_model(architecture)
    del model.tensors["output.weight"]
    same(model, IDS)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_fused_qkv_equals_reference(architecture, small_model, same):
    """Case: one fused weight, with the separate biases where the architecture has them."""
    model = small_model(architecture)
    for layer in range(3):
        parts = [model.tensors.pop(f"blk.{layer}.attn_{p}.weight") for p in "qkv"]
        model.tensors[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts)
    same(model, IDS)


def test_separate_biases_of_a_fused_weight_are_refused_on_cuda(small_model, tmp_path):
    """Its kernels take one bias a matrix: refused by name rather than left out."""
    model = small_model("qwen2")
    parts = [model.tensors.pop(f"blk.1.attn_{p}.weight") for p in "qkv"]
    model.tensors["blk.1.attn_qkv.weight"] = np.concatenate(parts)
    directory, architecture = read_model(str(model.write(tmp_path / "m.gguf")))
    plan_model(directory, architecture, RuntimeOptions(), kind="host", free_bytes=None)
    with pytest.raises(GGUFError, match=r"blk\.1\.attn_q\.bias: a separate bias"):
        plan_model(directory, architecture, RuntimeOptions(), kind="cuda", free_bytes=None)


def test_fused_bias_equals_reference(small_model, same):
    model = small_model("qwen2")
    for layer in range(3):
        for kind in ("weight", "bias"):
            parts = [model.tensors.pop(f"blk.{layer}.attn_{p}.{kind}") for p in "qkv"]
            model.tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
    same(model, IDS)


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen35moe"])
def test_merged_expert_gate_up_equals_reference(architecture, small_model, same):
    model = small_model(architecture)
    for layer in range(3):
        gate, up = (model.tensors.pop(f"blk.{layer}.ffn_{p}_exps.weight") for p in ("gate", "up"))
        model.tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1)
    same(model, IDS)


def test_llama_with_experts_equals_reference(small_model, same):
    same(small_model("llama", expert_count=4, expert_used_count=2, expert_feed_forward_length=48), IDS)


def test_expert_weights_scale_equals_reference(small_model, same):
    same(small_model("qwen3moe", expert_weights_scale=2.5), IDS)


@pytest.mark.parametrize("name", ["attn_q", "attn_k", "attn_v", "attn_output"])
def test_optional_biases_of_llama_equal_reference(name, small_model, same):
    model = small_model("llama")
    for layer in range(3):
        n = len(model.tensors[f"blk.{layer}.{name}.weight"])
        model.vector(f"blk.{layer}.{name}.bias", n, 0)
    same(model, IDS)


def test_output_bias_equals_reference(small_model, same):
    model = small_model("qwen2")
    model.vector("output.bias", 96, 0)
    same(model, IDS)


def test_output_bias_over_tied_embedding_equals_reference(small_model, same):
    model = small_model("qwen2")
    del model.tensors["output.weight"]
    model.vector("output.bias", 96, 0)
    same(model, IDS)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(("key_length", "value_length"), [(32, 32), (32, 24), (8, 40)])
def test_key_length_apart_from_n_embd_over_n_head_equals_reference(
    architecture, key_length, value_length, small_model, same
):
    """Case 20."""
    model = small_model(architecture, attention__key_length=key_length, attention__value_length=value_length)
    same(model, IDS)


def test_head_count_kv_array_equals_reference_and_is_summed_in_the_cache(
    small_model, same, tmp_path, open_model
):
    """Case 21."""
    model = small_model("llama", attention__head_count_kv=[2, 1, 2])
    same(model, IDS)
    layout = open_model(model.write(tmp_path / "again.gguf")).architecture.cache_layout()
    assert layout.kv_nbytes_per_token(2) == (2 + 1 + 2) * (16 + 16) * 2


def test_multi_head_attention_without_head_count_kv_equals_reference(small_model, same):
    same(small_model("llama", attention__head_count_kv=None), IDS)


def test_grouped_query_llama_equals_reference_for_every_group_size(small_model, same):
    """Case 29, beside the converter's own permutation in the tiny golden models."""
    for n_kv in (1, 2, 4):
        same(small_model("llama", attention__head_count_kv=n_kv), IDS)


def test_rope_factors_are_applied(small_model, same):
    """Case 19."""
    model = small_model("llama")
    plain = same(model, IDS)
    model.tensors["rope_freqs.weight"] = np.array([1, 8, 1, 2, 4, 1, 1, 32], np.float32)
    assert np.abs(same(model, IDS) - plain).max() > 1e-2


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_linear_rope_scaling_is_applied_but_never_to_windows(architecture, small_model, same):
    same(small_model(architecture, rope__scaling__type="linear", rope__scaling__factor=4.0), IDS)


def test_partial_rotation_passes_other_dimensions_through(small_model, same):
    same(small_model("llama", rope__dimension_count=8), IDS)


@pytest.mark.parametrize("n", [3, 4, 5, 9])
@pytest.mark.parametrize("chunk", [1, 2, None])
def test_sliding_window_of_four(n, chunk, small_model, same):
    """Case 32."""
    same(small_model("gemma3", attention__sliding_window=4), IDS[:n], chunk=chunk)


def test_default_window_pattern_is_five_windows_to_one_global(small_model, same):
    same(
        small_model(
            "gemma3", block_count=7, attention__sliding_window=3, attention__sliding_window_pattern=None
        ),
        IDS,
    )


def test_gemma_without_window_equals_reference(small_model, same):
    same(small_model("gemma3", attention__sliding_window=None), IDS)


def test_final_softcap_equals_reference(small_model, same):
    logits = same(small_model("gemma3", final_logit_softcapping=2.0), IDS)
    assert np.abs(logits).max() <= 2.0


def test_attention_scale_key_equals_reference(small_model, same):
    same(small_model("llama", attention__scale=0.5), IDS)


@pytest.mark.parametrize("recurrent", [[True, False, True], [False, True, True], [True, True, True]])
def test_array_of_recurrent_layers_equals_reference(recurrent, small_model, same):
    model = small_model("qwen35", attention__recurrent_layers=recurrent, full_attention_interval=None)
    same(model, IDS)


@pytest.mark.parametrize(("n_k", "n_v"), [(1, 4), (2, 2), (4, 4), (2, 6)])
def test_value_heads_use_tiled_key_heads(n_k, n_v, small_model, same):
    """The permutation trap: value head h uses key head h % n_k."""
    model = small_model("qwen35", ssm__group_count=n_k, ssm__time_step_rank=n_v, ssm__inner_size=n_v * 12)
    same(model, IDS)


def test_mtp_blocks_are_left_out_and_said_so(small_model, same, tmp_path, open_model):
    model = small_model("qwen35", block_count=4, nextn_predict_layers=1)
    model.matrix("blk.3.nextn.eh_proj.weight", 64, 128)
    same(model, IDS)
    architecture = open_model(model.write(tmp_path / "mtp.gguf")).architecture
    assert architecture.n_layers == 3
    assert "blk.3.nextn.eh_proj.weight" in architecture.skipped
    assert any("multi-token-prediction" in note for note in architecture.notes)
    assert all(not spec.name.startswith("blk.3.") for spec in architecture.specs())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_large_query_and_key_weights_stay_finite(architecture, small_model, tmp_path, open_model):
    """Case 31."""
    model = small_model(architecture)
    for name in model.tensors:
        if name.endswith(("attn_q.weight", "attn_k.weight", "attn_qkv.weight")):
            model.tensors[name] *= 300
    assert np.isfinite(open_model(model.write(tmp_path / "large.gguf")).logits(IDS)).all()
