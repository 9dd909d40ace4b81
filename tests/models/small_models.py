"""Small random models of every architecture, written with the gguf package, in any variant of files."""

import gguf
import numpy as np

N_EMBD, N_VOCAB, N_FF = 64, 96, 80
BASE = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": N_EMBD,
    "feed_forward_length": N_FF,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
}
EXTRA = {
    "gemma3": {
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": 3,
        "rope.freq_base_swa": 1000.0,
    },
    "qwen3moe": {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 40},
    "qwen35": {
        "full_attention_interval": 3,
        "rope.dimension_count": 8,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 96,
    },
}
EXTRA["qwen35moe"] = {**EXTRA["qwen35"], **EXTRA["qwen3moe"], "expert_shared_feed_forward_length": 24}


class SmallModel:
    """Metadata and tensors to be changed at will, then written."""

    def __init__(self, architecture, seed=0, **keys):
        self.architecture = architecture
        self.metadata = {**BASE, **EXTRA.get(architecture, {})}
        self.metadata.update({key.replace("__", "."): value for key, value in keys.items()})
        self.metadata = {key: value for key, value in self.metadata.items() if value is not None}
        self.rng = np.random.default_rng(seed)
        self.tensors = {}
        self.tokens = N_VOCAB
        self._fill()

    def matrix(self, name, n_out, n_in, *lead):
        self.tensors[name] = self.rng.normal(0, n_in**-0.5, (*lead, n_out, n_in)).astype(np.float32)

    def vector(self, name, n, mean=1.0, spread=0.2):
        self.tensors[name] = self.rng.normal(mean, spread, n).astype(np.float32)

    def per_layer(self, key, layer):
        value = self.metadata.get(key)
        return value[layer] if isinstance(value, list) else value

    def _fill(self):
        self.matrix("token_embd.weight", N_VOCAB, N_EMBD)
        self.vector("output_norm.weight", N_EMBD)
        self.matrix("output.weight", N_VOCAB, N_EMBD)
        for layer in range(self.metadata["block_count"]):
            self._mixer(layer, f"blk.{layer}.")
            self._feed_forward(f"blk.{layer}.")

    def _mixer(self, layer, p):
        self.vector(p + "attn_norm.weight", N_EMBD)
        if self.architecture.startswith("qwen35"):
            self.vector(p + "post_attention_norm.weight", N_EMBD)
            interval = self.metadata.get("full_attention_interval", 4)
            recurrent = self.metadata.get("attention.recurrent_layers")
            if recurrent[layer] if recurrent else (layer + 1) % interval:
                return self._delta(p)
        n_heads, n_kv = (
            self.metadata["attention.head_count"],
            self.per_layer("attention.head_count_kv", layer),
        )
        n_kv = n_kv or n_heads
        dk = self.metadata.get("attention.key_length", N_EMBD // n_heads)
        dv = self.metadata.get("attention.value_length", N_EMBD // n_heads)
        gated = 2 if self.architecture.startswith("qwen35") else 1
        for part, n in (("q", gated * n_heads * dk), ("k", n_kv * dk), ("v", n_kv * dv)):
            self.matrix(f"{p}attn_{part}.weight", n, N_EMBD)
            if self.architecture == "qwen2":
                self.vector(f"{p}attn_{part}.bias", n, 0)
        self.matrix(p + "attn_output.weight", N_EMBD, n_heads * dv)
        if self.architecture not in ("llama", "qwen2"):
            self.vector(p + "attn_q_norm.weight", dk)
            self.vector(p + "attn_k_norm.weight", dk)
        if self.architecture == "gemma3":
            self.vector(p + "post_attention_norm.weight", N_EMBD)
            self.vector(p + "post_ffw_norm.weight", N_EMBD)
        return None

    def _delta(self, p):
        m = self.metadata
        n_k, n_v, dk, inner = (
            m[f"ssm.{x}"] for x in ("group_count", "time_step_rank", "state_size", "inner_size")
        )
        channels = 2 * n_k * dk + inner
        self.matrix(p + "attn_qkv.weight", channels, N_EMBD)
        self.matrix(p + "attn_gate.weight", inner, N_EMBD)
        self.matrix(p + "ssm_alpha.weight", n_v, N_EMBD)
        self.matrix(p + "ssm_beta.weight", n_v, N_EMBD)
        self.matrix(p + "ssm_conv1d.weight", channels, m["ssm.conv_kernel"])
        self.vector(p + "ssm_dt.bias", n_v, 0)
        self.tensors[p + "ssm_a"] = -np.exp(self.rng.normal(-1, 0.5, n_v)).astype(np.float32)
        self.vector(p + "ssm_norm.weight", inner // n_v)
        self.matrix(p + "ssm_out.weight", N_EMBD, inner)

    def _feed_forward(self, p):
        if not self.architecture.startswith("qwen35"):
            self.vector(p + "ffn_norm.weight", N_EMBD)
        n_experts = self.metadata.get("expert_count")
        if not n_experts:
            self.matrix(p + "ffn_gate.weight", N_FF, N_EMBD)
            self.matrix(p + "ffn_up.weight", N_FF, N_EMBD)
            self.matrix(p + "ffn_down.weight", N_EMBD, N_FF)
            return
        n_ff = self.metadata["expert_feed_forward_length"]
        self.matrix(p + "ffn_gate_inp.weight", n_experts, N_EMBD)
        self.matrix(p + "ffn_gate_exps.weight", n_ff, N_EMBD, n_experts)
        self.matrix(p + "ffn_up_exps.weight", n_ff, N_EMBD, n_experts)
        self.matrix(p + "ffn_down_exps.weight", N_EMBD, n_ff, n_experts)
        shared = self.metadata.get("expert_shared_feed_forward_length")
        if shared:
            self.matrix(p + "ffn_gate_inp_shexp.weight", 1, N_EMBD)
            self.matrix(p + "ffn_gate_shexp.weight", shared, N_EMBD)
            self.matrix(p + "ffn_up_shexp.weight", shared, N_EMBD)
            self.matrix(p + "ffn_down_shexp.weight", N_EMBD, shared)

    def write(self, path):
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            full = f"{self.architecture}.{key}"
            match value:
                case bool():
                    writer.add_bool(full, value)
                case int():
                    writer.add_uint32(full, value)
                case float():
                    writer.add_float32(full, value)
                case str():
                    writer.add_string(full, value)
                case list():
                    writer.add_array(full, value)
        if self.tokens:
            writer.add_tokenizer_model("gpt2")
            writer.add_token_list([f"t{i}" for i in range(self.tokens)])
        for name, values in self.tensors.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    @property
    def float64(self):
        return {name: values.astype(np.float64) for name, values in self.tensors.items()}
