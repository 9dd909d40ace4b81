"""Sublayers that architectures share: bound weights and the operator calls of their forward.

Each sublayer takes the residual stream x (n_rows, n_embd) and returns it with its own output added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from streamer.kernels.ops import (
    Activation,
    Array,
    Experts,
    GatedDelta,
    KVLayer,
    Linear,
    Norm,
    Ops,
    RecurrentLayer,
    Rope,
    RopePairing,
    Weight,
)
from streamer.models.hparams import EMBEDDING, HyperParameters
from streamer.models.weights import WeightSource
from streamer.plan.plan import Role


class Sublayer(Protocol):
    def forward(self, ops: Ops, x: Array) -> Array: ...


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with rotary positions; optional head norms, gate, window, output norm."""

    kv: KVLayer
    norm: Norm
    projections: tuple[Linear, ...]  # (q, k, v), or one fused (q rows, then k, then v)
    output: Linear
    n_heads: int
    scale: float
    rope: Rope
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    post_norm: Norm | None = None
    gated_query: bool = False

    def forward(self, ops: Ops, x: Array) -> Array:
        parts = ops.norm_project(x, self.norm, self.projections)
        q, k, v = parts if len(parts) == 3 else ops.split(parts[0], self.widths)
        q, gate = ops.rope_cache_write(
            q,
            k,
            v,
            layer=self.kv.layer,
            n_heads=self.n_heads,
            rope=self.rope,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            gated_query=self.gated_query,
        )
        a = ops.attention(
            q,
            layer=self.kv.layer,
            n_heads=self.n_heads,
            scale=self.scale,
            sliding_window=self.kv.sliding_window,
            gate=gate,
        )
        return ops.project_add(a, self.output, x, post_norm=self.post_norm)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v."""
        return _qkv_widths(self.n_heads, self.kv, self.gated_query)


@dataclass(frozen=True)
class FeedForward:
    """x + down(act(gate(norm x)) * up(norm x))."""

    norm: Norm
    gate: Linear
    up: Linear
    down: Linear
    activation: Activation = Activation.SILU
    post_norm: Norm | None = None

    def forward(self, ops: Ops, x: Array) -> Array:
        return ops.gated_feed_forward(
            x,
            self.norm,
            self.gate,
            self.up,
            self.down,
            activation=self.activation,
            post_norm=self.post_norm,
        )


@dataclass(frozen=True)
class RoutedFeedForward:
    norm: Norm
    experts: Experts

    def forward(self, ops: Ops, x: Array) -> Array:
        return ops.routed_experts(x, self.norm, self.experts)


@dataclass(frozen=True)
class DeltaMixer:
    recurrent: RecurrentLayer
    mixer: GatedDelta

    def forward(self, ops: Ops, x: Array) -> Array:
        return ops.gated_delta(x, self.mixer, layer=self.recurrent.layer)


@dataclass(frozen=True)
class Decoder:
    """A whole model: embedding, sublayers in order, final norm and head."""

    n_vocab: int
    embedding: Weight
    embedding_scale: float
    sublayers: tuple[Sublayer, ...]
    norm: Norm
    output: Linear
    softcap: float | None

    def forward(self, ops: Ops) -> Array:
        """Compute the current batch; returns what `ops.head` returned."""
        x = ops.embed(self.embedding, scale=self.embedding_scale)
        for sublayer in self.sublayers:
            x = sublayer.forward(ops, x)
        return ops.head(x, self.norm, self.output, softcap=self.softcap)

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(s.kv for s in self.sublayers if isinstance(s, Attention))

    @property
    def recurrent_layers(self) -> tuple[RecurrentLayer, ...]:
        return tuple(s.recurrent for s in self.sublayers if isinstance(s, DeltaMixer))


# ---- builders: ask the source in execution order -----------------------------------------------------------


def _qkv_widths(n_heads: int, kv: KVLayer, gated_query: bool) -> tuple[int, int, int]:
    q = n_heads * kv.key_length * (2 if gated_query else 1)
    return q, kv.n_kv_heads * kv.key_length, kv.n_kv_heads * kv.value_length


def make_rope(hp: HyperParameters, source: WeightSource, pairing: RopePairing) -> Rope:
    """The rotation of a model's layers. One object for all of them: backends keep tables by it."""
    name, scaling = "rope_freqs.weight", hp.rope_scaling
    return Rope(
        pairing=pairing,
        n_rot=hp.n_rot,
        base=hp.rope_base,
        scale=1.0 / scaling.factor,
        factors=source.take(name, (hp.n_rot // 2,), Role.TABLE) if source.has(name) else None,
        attention_factor=scaling.attention_factor,
        yarn=scaling.yarn,
    )


def make_attention(
    hp: HyperParameters,
    source: WeightSource,
    layer: int,
    rope: Rope,
    *,
    head_norms: bool = False,
    gated_query: bool = False,
    sliding_window: int | None = None,
    post_norm: str | None = None,
) -> Attention:
    """`post_norm`: suffix of the norm on the sublayer's output, if the architecture has one."""
    role, prefix = Role.ATTENTION, f"blk.{layer}"
    n_heads, n_kv_heads = hp.n_heads[layer], hp.n_kv_heads[layer]
    kv = KVLayer(layer, n_kv_heads, hp.key_length, hp.value_length, sliding_window)
    norm = source.norm(f"{prefix}.attn_norm.weight", hp.n_embd, hp.epsilon, layer)
    widths = _qkv_widths(n_heads, kv, gated_query)
    projections = _qkv(source, prefix, hp.n_embd, widths, layer)
    q_norm = k_norm = None
    if head_norms:
        q_norm = source.norm(f"{prefix}.attn_q_norm.weight", hp.key_length, hp.epsilon, layer)
        k_norm = source.norm(f"{prefix}.attn_k_norm.weight", hp.key_length, hp.epsilon, layer)
    output = source.linear(f"{prefix}.attn_output", n_heads * hp.value_length, hp.n_embd, role, layer)
    after = source.norm(f"{prefix}.{post_norm}.weight", hp.n_embd, hp.epsilon, layer) if post_norm else None
    return Attention(
        kv, norm, projections, output, n_heads, hp.attention_scale, rope, q_norm, k_norm, after, gated_query
    )


def _qkv(
    source: WeightSource, prefix: str, n_embd: int, widths: Sequence[int], layer: int
) -> tuple[Linear, ...]:
    """Separate projections, or the fused one; a fused weight may come with separate biases."""
    role, names = Role.ATTENTION, [f"{prefix}.attn_{x}" for x in "qkv"]
    if not source.has(f"{prefix}.attn_qkv.weight"):
        return source.linears(names, n_embd, widths, role, layer)
    fused = source.linear(f"{prefix}.attn_qkv", n_embd, sum(widths), role, layer)
    if not any(source.has(f"{name}.bias") for name in names):
        return (fused,)
    biases = tuple(
        source.take(f"{name}.bias", (width,), role, layer) for name, width in zip(names, widths, strict=True)
    )
    return (Linear(fused.weight, fused.bias, biases),)


def make_feed_forward(
    hp: HyperParameters,
    source: WeightSource,
    layer: int,
    *,
    norm: str = "ffn_norm",
    activation: Activation = Activation.SILU,
    post_norm: str | None = None,
) -> FeedForward:
    role, prefix, n_ff = Role.FEED_FORWARD, f"blk.{layer}", hp.n_ff[layer]
    if not n_ff:
        raise hp.keys.refuse("feed_forward_length", "missing")
    before = source.norm(f"{prefix}.{norm}.weight", hp.n_embd, hp.epsilon, layer)
    gate, up = source.linears(
        (f"{prefix}.ffn_gate", f"{prefix}.ffn_up"), hp.n_embd, (n_ff, n_ff), role, layer
    )
    down = source.linear(f"{prefix}.ffn_down", n_ff, hp.n_embd, role, layer)
    after = source.norm(f"{prefix}.{post_norm}.weight", hp.n_embd, hp.epsilon, layer) if post_norm else None
    return FeedForward(before, gate, up, down, activation, after)


def make_embedding(hp: HyperParameters, source: WeightSource) -> Weight:
    return source.take(EMBEDDING, (hp.n_embd, hp.n_vocab), Role.EMBEDDING)


def make_head(hp: HyperParameters, source: WeightSource, embedding: Weight) -> tuple[Norm, Linear]:
    """Final norm and output projection; without `output.weight` the embedding serves as it."""
    norm = source.norm("output_norm.weight", hp.n_embd, hp.epsilon, None, Role.OUTPUT)
    if not hp.tied_output:
        return norm, source.linear("output", hp.n_embd, hp.n_vocab, Role.OUTPUT, None)
    bias = source.take("output.bias", (hp.n_vocab,), Role.OUTPUT) if source.has("output.bias") else None
    return norm, Linear(embedding, bias)
