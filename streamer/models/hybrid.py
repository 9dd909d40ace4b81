"""What qwen35 and qwen35moe share: which layers are recurrent, and the gated delta net mixer."""

from collections.abc import Callable
from dataclasses import dataclass

from streamer.kernels.ops import GatedDelta, RecurrentLayer, RopePairing
from streamer.models.blocks import (
    Decoder,
    DeltaMixer,
    Sublayer,
    make_attention,
    make_embedding,
    make_head,
    make_rope,
)
from streamer.models.hparams import HyperParameters
from streamer.models.keys import Keys
from streamer.models.weights import WeightSource
from streamer.plan.plan import Role

MakeFeedForward = Callable[[HyperParameters, WeightSource, int], Sublayer]


@dataclass(frozen=True)
class DeltaShape:
    conv_width: int
    n_k_heads: int
    n_v_heads: int
    k_dim: int
    v_dim: int

    @property
    def k_width(self) -> int:
        return self.n_k_heads * self.k_dim

    @property
    def v_width(self) -> int:
        return self.n_v_heads * self.v_dim


def read_delta_shape(keys: Keys) -> DeltaShape:
    """`ssm.*`: k heads are groups, v heads the time-step rank, the inner size all v heads together."""
    n_k_heads = keys.integer("ssm.group_count", maximum=2**16)
    n_v_heads = keys.integer("ssm.time_step_rank", maximum=2**16)
    inner = keys.integer("ssm.inner_size", maximum=2**24)
    if n_v_heads % n_k_heads:
        raise keys.refuse("ssm.time_step_rank", f"is {n_v_heads}, no multiple of {n_k_heads} key heads")
    if inner % n_v_heads:
        raise keys.refuse("ssm.inner_size", f"is {inner}, no multiple of {n_v_heads} value heads")
    return DeltaShape(
        conv_width=keys.integer("ssm.conv_kernel", minimum=2, maximum=64),
        n_k_heads=n_k_heads,
        n_v_heads=n_v_heads,
        k_dim=keys.integer("ssm.state_size", maximum=2**14),
        v_dim=inner // n_v_heads,
    )


def recurrent_layers(keys: Keys, n_layers: int) -> tuple[bool, ...]:
    """Which layers are recurrent: the array form, else all but every `full_attention_interval`-th."""
    if keys.has("attention.recurrent_layers"):
        return keys.flags("attention.recurrent_layers", n_layers)
    interval = keys.integer("full_attention_interval", 4)
    if not keys.has("full_attention_interval"):
        keys.note("full_attention_interval", interval)
    return tuple((layer + 1) % interval != 0 for layer in range(n_layers))


def build_hybrid(hp: HyperParameters, source: WeightSource, make_feed_forward: MakeFeedForward) -> Decoder:
    """Gated delta net and gated full attention in turn, each followed by the given feed-forward.

    `post_attention_norm` is the norm before the feed-forward here (in gemma3 it follows the mixer).
    M-RoPE's sections carry the same position for text, so the plain partial rotation is exact.
    """
    shape, recurrent = read_delta_shape(hp.keys), recurrent_layers(hp.keys, hp.n_layers)
    embedding = make_embedding(hp, source)
    rope = make_rope(hp, source, RopePairing.NEOX)
    sublayers: list[Sublayer] = []
    for layer in range(hp.n_layers):
        if recurrent[layer]:
            sublayers.append(make_delta_mixer(hp, source, layer, shape))
        else:
            sublayers.append(make_attention(hp, source, layer, rope, head_norms=True, gated_query=True))
        sublayers.append(make_feed_forward(hp, source, layer))
    norm, output = make_head(hp, source, embedding)
    return Decoder(hp.n_vocab, embedding, 1.0, tuple(sublayers), norm, output, None)


def make_delta_mixer(hp: HyperParameters, source: WeightSource, layer: int, shape: DeltaShape) -> DeltaMixer:
    role, prefix, n_v = Role.RECURRENT, f"blk.{layer}", shape.n_v_heads
    channels = 2 * shape.k_width + shape.v_width
    norm = source.norm(f"{prefix}.attn_norm.weight", hp.n_embd, hp.epsilon, layer)
    names = [f"{prefix}.{x}" for x in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")]
    qkv, gate, alpha, beta = source.linears(
        names, hp.n_embd, (channels, shape.v_width, n_v, n_v), role, layer
    )
    mixer = GatedDelta(
        norm=norm,
        qkv=qkv,
        gate=gate,
        alpha=alpha,
        beta=beta,
        conv=source.take(f"{prefix}.ssm_conv1d.weight", (shape.conv_width, channels), role, layer),
        dt_bias=source.take(f"{prefix}.ssm_dt.bias", (n_v,), role, layer),
        a=source.take(f"{prefix}.ssm_a", (n_v,), role, layer),
        out_norm=source.norm(f"{prefix}.ssm_norm.weight", shape.v_dim, hp.epsilon, layer, role),
        out=source.linear(f"{prefix}.ssm_out", shape.v_width, hp.n_embd, role, layer),
        n_k_heads=shape.n_k_heads,
        n_v_heads=n_v,
        k_dim=shape.k_dim,
        v_dim=shape.v_dim,
        conv_width=shape.conv_width,
    )
    state = RecurrentLayer(layer, channels, shape.conv_width, n_v, shape.k_dim, shape.v_dim)
    return DeltaMixer(state, mixer)
