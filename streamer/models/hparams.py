"""The hyperparameters all architectures share, read once and refused where they cannot be. Pure."""

import math
from dataclasses import dataclass, field

from streamer.errors import GGUFError
from streamer.gguf.cursor import quoted
from streamer.gguf.directory import Directory, TensorInfo
from streamer.kernels.ops import Yarn
from streamer.models.keys import MOST_LAYERS, Keys

DEFAULT_ROPE_BASE = 10000.0
EMBEDDING = "token_embd.weight"


@dataclass(frozen=True)
class RopeScaling:
    """How positions beyond the trained context are squeezed. `factor` 1: not at all."""

    factor: float = 1.0
    attention_factor: float = 1.0
    yarn: Yarn | None = None


@dataclass(frozen=True)
class HyperParameters:
    """What the shared blocks need. Tuples have one entry a trunk layer."""

    keys: Keys = field(repr=False)
    n_layers: int  # trunk: block_count without the MTP blocks
    n_mtp: int
    n_embd: int
    n_vocab: int  # logit rows, padding included
    n_valid_ids: int  # ids that have a token; rows from there on are padding and never sampled
    n_ctx_train: int
    n_ff: tuple[int, ...]
    n_heads: tuple[int, ...]
    n_kv_heads: tuple[int, ...]
    key_length: int
    value_length: int
    attention_scale: float
    epsilon: float
    n_rot: int
    rope_base: float
    rope_scaling: RopeScaling

    @property
    def tied_output(self) -> bool:
        return "output.weight" not in self.keys.directory.tensors


def read_hyperparameters(directory: Directory) -> HyperParameters:
    """Read what all architectures share. GGUFError names the key or tensor that cannot be."""
    keys = Keys(directory)
    _refuse_bidirectional(keys)
    embedding = _embedding(directory)
    n_embd = keys.integer("embedding_length", maximum=2**20)
    if embedding.shape[0] != n_embd:
        raise GGUFError(
            directory.path, EMBEDDING, f"has rows of {embedding.shape[0]}, embedding_length is {n_embd}"
        )
    n_blocks = keys.integer("block_count", maximum=MOST_LAYERS)
    n_mtp = keys.integer("nextn_predict_layers", 0, minimum=0)
    if n_mtp >= n_blocks:
        raise keys.refuse("nextn_predict_layers", f"is {n_mtp} of {n_blocks} blocks")
    n_layers = n_blocks - n_mtp
    n_heads = keys.per_layer("attention.head_count", n_layers, maximum=2**16)
    n_kv_heads = _kv_heads(keys, n_layers, n_heads)
    key_length = _head_length(keys, "attention.key_length", n_embd, n_heads)
    n_vocab = embedding.shape[1]
    return HyperParameters(
        keys=keys,
        n_layers=n_layers,
        n_mtp=n_mtp,
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_valid_ids=_n_valid_ids(directory, n_vocab),
        n_ctx_train=keys.integer("context_length"),
        n_ff=keys.per_layer("feed_forward_length", n_layers, None),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        key_length=key_length,
        value_length=_head_length(keys, "attention.value_length", n_embd, n_heads),
        attention_scale=keys.real("attention.scale", 1.0 / math.sqrt(key_length)),
        epsilon=keys.real("attention.layer_norm_rms_epsilon"),
        n_rot=_n_rot(keys, key_length),
        rope_base=_rope_base(keys),
        rope_scaling=read_rope_scaling(keys),
    )


def _refuse_bidirectional(keys: Keys) -> None:
    if not keys.flag("attention.causal", True):
        raise keys.refuse("attention.causal", "is false; only causal models generate")


def _embedding(directory: Directory) -> TensorInfo:
    embedding = directory.tensors.get(EMBEDDING)
    if embedding is None:
        raise GGUFError(directory.path, EMBEDDING, "missing")
    if len(embedding.shape) != 2:
        raise GGUFError(directory.path, EMBEDDING, f"has {len(embedding.shape)} dimensions instead of 2")
    return embedding


def _kv_heads(keys: Keys, n_layers: int, n_heads: tuple[int, ...]) -> tuple[int, ...]:
    if not keys.has("attention.head_count_kv"):
        return n_heads
    n_kv_heads = keys.per_layer("attention.head_count_kv", n_layers, maximum=2**16)
    for heads, kv_heads in zip(n_heads, n_kv_heads, strict=True):
        if heads % kv_heads:
            raise keys.refuse(
                "attention.head_count_kv", f"is {kv_heads}, which does not divide {heads} heads"
            )
    return n_kv_heads


def _head_length(keys: Keys, key: str, n_embd: int, n_heads: tuple[int, ...]) -> int:
    """Of a key or a value; either that is missing is n_embd / n_head, whatever the other one is."""
    length = keys.integer(key, None, maximum=2**14)
    if length is not None:
        return length
    if n_embd % n_heads[0]:
        raise keys.refuse("attention.head_count", f"is {n_heads[0]}, which does not divide {n_embd} channels")
    return n_embd // n_heads[0]


def _n_rot(keys: Keys, key_length: int) -> int:
    n_rot = keys.integer("rope.dimension_count", key_length, minimum=2, maximum=key_length)
    if n_rot % 2:
        raise keys.refuse("rope.dimension_count", f"is {n_rot}; rotation is by pairs")
    return n_rot


def _rope_base(keys: Keys) -> float:
    if not keys.has("rope.freq_base"):
        keys.note("rope.freq_base", DEFAULT_ROPE_BASE)
    return keys.real("rope.freq_base", DEFAULT_ROPE_BASE)


def read_attention_factor(keys: Keys) -> float:
    """`rope.scaling.attn_factor`: multiplies cos and sin whatever the type of scaling, windows included."""
    return keys.real("rope.scaling.attn_factor", 1.0)


def read_rope_scaling(keys: Keys) -> RopeScaling:
    """`rope.scaling.*` as llama.cpp reads them: none, linear or yarn; a factor without a type is linear.

    GGUFError for any other type: a guess would be silently wrong.
    """
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0))
    attention_factor = read_attention_factor(keys)
    if kind == "none":
        return RopeScaling(1.0, attention_factor)
    if kind == "linear":
        return RopeScaling(factor, attention_factor)
    if kind != "yarn":
        raise keys.refuse("rope.scaling.type", f"{quoted(kind)} is not known (known: none, linear, yarn)")
    if keys.real("rope.freq_base", DEFAULT_ROPE_BASE) == 1.0:
        raise keys.refuse("rope.freq_base", "is 1, so all pairs turn alike and yarn has none to choose")
    extrapolation = keys.real("rope.scaling.yarn_ext_factor", 1.0, positive=False)
    yarn = Yarn(
        factor=factor,
        original_context=keys.integer("rope.scaling.original_context_length", keys.integer("context_length")),
        beta_fast=keys.real("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.real("rope.scaling.yarn_beta_slow", 1.0),
        extrapolation_factor=extrapolation if extrapolation >= 0 else 1.0,  # negative: not set
    )
    # YaRN scales attention's temperature through cos and sin: 1 + 0.1 ln(factor) (arXiv 2309.00071, eq. 22);
    # without extrapolation it is linear scaling, which does not
    if yarn.extrapolation_factor and factor > 1:
        attention_factor *= 1.0 + 0.1 * math.log(factor)
    return RopeScaling(factor, attention_factor, yarn)


def _n_valid_ids(directory: Directory, n_vocab: int) -> int:
    """Ids with a token. Files pad the embedding's rows; without a tokenizer every row counts."""
    key = "tokenizer.ggml.tokens"
    n = directory.metadata.length(key) or 0  # does not make the strings
    if n > n_vocab:
        raise GGUFError(directory.path, key, f"has {n} tokens for {n_vocab} embedding rows")
    return n or n_vocab
