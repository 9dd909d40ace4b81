"""Shapes of models people run: hyperparameters, tensors and a tokenizer that works, without any weights.

Tensor shapes in GGUF order. Names and keys as llama.cpp's converter writes them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from streamer.gguf.quants import QuantType

Choose = Callable[["Tensor"], QuantType]  # a matrix's quant type


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    fill: str = "matrix"  # matrix, norm, or a small F32 vector by name (make_gguf.py)
    layer: int = -1

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Shape:
    architecture: str
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    type: str  # what --type defaults to
    tokenizer: str = "qwen2"  # tokenizer.ggml.pre
    epsilon: float = 1e-6
    more: dict[str, object] = field(default_factory=dict)  # further keys, without the architecture's prefix

    def keys(self) -> dict[str, object]:
        return {
            "block_count": self.n_layers,
            "context_length": self.n_ctx,
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.epsilon,
            "rope.freq_base": self.rope_base,
            "rope.dimension_count": self.head_dim,
            "vocab_size": self.n_vocab,
        } | self.more

    def tensors(self) -> Iterator[Tensor]:
        yield Tensor("token_embd.weight", (self.n_embd, self.n_vocab), "embedding")
        if self.architecture == "llama":
            yield Tensor("rope_freqs.weight", (self.head_dim // 2,), "rope_freqs")
        for layer in range(self.n_layers):
            for name, shape, fill in _LAYERS[self.architecture](self, layer):
                yield Tensor(f"blk.{layer}.{name}", shape, fill, layer)
        yield Tensor("output_norm.weight", (self.n_embd,), "norm")
        yield Tensor("output.weight", (self.n_embd, self.n_vocab))


Row = tuple[str, tuple[int, ...], str]


def _attention(s: Shape, gated: bool = False) -> Iterator[Row]:
    q, kv = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    yield "attn_q.weight", (s.n_embd, 2 * q if gated else q), "matrix"
    yield "attn_k.weight", (s.n_embd, kv), "matrix"
    yield "attn_v.weight", (s.n_embd, kv), "matrix"
    if s.architecture != "llama":
        yield "attn_q_norm.weight", (s.head_dim,), "norm"
        yield "attn_k_norm.weight", (s.head_dim,), "norm"
    yield "attn_output.weight", (q, s.n_embd), "matrix"


def _feed_forward(s: Shape) -> Iterator[Row]:
    yield "ffn_gate.weight", (s.n_embd, s.n_ff), "matrix"
    yield "ffn_up.weight", (s.n_embd, s.n_ff), "matrix"
    yield "ffn_down.weight", (s.n_ff, s.n_embd), "matrix"


def _llama_layer(s: Shape, layer: int) -> Iterator[Row]:
    yield "attn_norm.weight", (s.n_embd,), "norm"
    yield from _attention(s)
    yield "ffn_norm.weight", (s.n_embd,), "norm"
    yield from _feed_forward(s)


def _qwen3moe_layer(s: Shape, layer: int) -> Iterator[Row]:
    n_experts, n_ff = int(str(s.more["expert_count"])), int(str(s.more["expert_feed_forward_length"]))
    yield "attn_norm.weight", (s.n_embd,), "norm"
    yield from _attention(s)
    yield "ffn_norm.weight", (s.n_embd,), "norm"
    yield "ffn_gate_inp.weight", (s.n_embd, n_experts), "router"
    yield "ffn_gate_exps.weight", (s.n_embd, n_ff, n_experts), "matrix"
    yield "ffn_up_exps.weight", (s.n_embd, n_ff, n_experts), "matrix"
    yield "ffn_down_exps.weight", (n_ff, s.n_embd, n_experts), "matrix"


def _qwen35_layer(s: Shape, layer: int) -> Iterator[Row]:
    yield "attn_norm.weight", (s.n_embd,), "norm"
    if (layer + 1) % 4 == 0:
        yield from _attention(s, gated=True)
    else:
        yield from _gated_delta(s)
    yield "post_attention_norm.weight", (s.n_embd,), "norm"
    yield from _feed_forward(s)


def _gated_delta(s: Shape) -> Iterator[Row]:
    dim, k_heads, v_heads = (
        int(str(s.more[f"ssm.{k}"])) for k in ("state_size", "group_count", "time_step_rank")
    )
    channels, inner = 2 * k_heads * dim + v_heads * dim, v_heads * dim
    yield "attn_qkv.weight", (s.n_embd, channels), "matrix"
    yield "attn_gate.weight", (s.n_embd, inner), "matrix"
    yield "ssm_conv1d.weight", (4, channels), "conv"
    yield "ssm_dt.bias", (v_heads,), "dt"
    yield "ssm_a", (v_heads,), "decay"
    yield "ssm_alpha.weight", (s.n_embd, v_heads), "matrix"
    yield "ssm_beta.weight", (s.n_embd, v_heads), "matrix"
    yield "ssm_norm.weight", (dim,), "norm"
    yield "ssm_out.weight", (inner, s.n_embd), "matrix"


_LAYERS: dict[str, Callable[[Shape, int], Iterator[Row]]] = {
    "llama": _llama_layer,
    "qwen3moe": _qwen3moe_layer,
    "qwen35": _qwen35_layer,
}


def _hybrid_keys(sections: list[int], n_rot: int, groups: int, heads: int, dim: int) -> dict[str, object]:
    return {
        "rope.dimension_sections": sections,
        "rope.dimension_count": n_rot,
        "ssm.conv_kernel": 4,
        "ssm.state_size": dim,
        "ssm.group_count": groups,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * dim,
        "full_attention_interval": 4,
    }


def _expert_keys(n_experts: int, n_used: int, n_ff: int) -> dict[str, object]:
    return {"expert_count": n_experts, "expert_used_count": n_used, "expert_feed_forward_length": n_ff}


SHAPES: dict[str, Shape] = {
    "llama8b": Shape(
        "llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5, "q8_0", tokenizer="llama-bpe", epsilon=1e-5
    ),
    "qwen35_27b": Shape(
        "qwen35",
        64,
        5120,
        17408,
        24,
        4,
        256,
        248320,
        262144,
        1e7,
        "ffn_q8_0",
        tokenizer="qwen35",
        more=_hybrid_keys([11, 11, 10, 0], 64, 16, 48, 128),
    ),
    "qwen3moe_30b": Shape(
        "qwen3moe", 48, 2048, 6144, 32, 4, 128, 151936, 40960, 1e6, "q8_0", more=_expert_keys(128, 8, 768)
    ),
    "llama_small": Shape(
        "llama", 4, 256, 512, 8, 4, 32, 1024, 2048, 5e5, "q8_0", tokenizer="llama-bpe", epsilon=1e-5
    ),
    "qwen35_small": Shape(
        "qwen35",
        4,
        256,
        512,
        4,
        2,
        64,
        1024,
        2048,
        1e7,
        "ffn_q8_0",
        tokenizer="qwen35",
        more=_hybrid_keys([3, 3, 2, 0], 16, 2, 6, 32),
    ),
    "qwen3moe_small": Shape(
        "qwen3moe", 4, 256, 512, 8, 4, 32, 1024, 2048, 1e6, "q8_0", more=_expert_keys(16, 4, 256)
    ),
}


def choose_type(name: str, shape: Shape) -> Choose:
    """A quant type for all matrices, or a mix: `q4_k_m` (as llama.cpp), `ffn_q8_0` (BF16 elsewhere)."""
    if name == "ffn_q8_0":
        return lambda tensor: QuantType.Q8_0 if "ffn_" in tensor.name else QuantType.BF16
    if name == "q4_k_m":
        return lambda tensor: _q4_k_m(tensor, shape.n_layers)
    return lambda tensor: QuantType[name.upper()]


def _q4_k_m(tensor: Tensor, n_layers: int) -> QuantType:
    if tensor.name == "output.weight":
        return QuantType.Q6_K
    eighth = n_layers // 8
    more_bits = tensor.layer < eighth or tensor.layer >= 7 * n_layers // 8 or (tensor.layer - eighth) % 3 == 2
    sensitive = any(part in tensor.name for part in ("attn_v.", "ffn_down"))
    return QuantType.Q6_K if sensitive and more_bits else QuantType.Q4_K


# ---- tokenizer ---------------------------------------------------------------------------------------------

_SPECIALS = {  # names of the first control tokens; in a vocabulary they are the last ids, as in real files
    "llama-bpe": [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ],
    "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen35": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}
_LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NORMAL, CONTROL = 1, 3


def tokenizer_keys(shape: Shape) -> dict[str, object]:
    """Byte-level BPE with a single merge: 256 bytes, fillers that decode to words, control tokens last."""
    specials = _SPECIALS[shape.tokenizer]
    alphabet = _byte_alphabet()
    n_fillers = shape.n_vocab - len(alphabet) - len(specials)
    first = shape.n_vocab - len(specials)
    is_llama = shape.tokenizer == "llama-bpe"
    keys: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": shape.tokenizer,
        "tokenizer.ggml.tokens": [*alphabet, "Ġw", *(f"Ġw{i}" for i in range(1, n_fillers)), *specials],
        "tokenizer.ggml.token_type": [NORMAL] * first + [CONTROL] * len(specials),
        "tokenizer.ggml.merges": ["Ġ w"],  # none at all would look like a file that lost them
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": shape.n_vocab - 1,  # <|eot_id|>, <|im_end|>
        "tokenizer.ggml.padding_token_id": first,
        "tokenizer.ggml.add_bos_token": is_llama,
        "tokenizer.chat_template": _LLAMA_TEMPLATE if is_llama else _CHATML_TEMPLATE,
    }
    return keys


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(moved)) for byte in range(256)]
