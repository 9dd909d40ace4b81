"""Routed feed-forwards: separate or merged expert stacks, and a shared expert where the file has one."""

import math

from streamer.kernels.ops import Experts, Linear, Weight
from streamer.models.blocks import RoutedFeedForward
from streamer.models.hparams import HyperParameters
from streamer.models.weights import WeightSource
from streamer.plan.plan import Role


def make_routed_feed_forward(
    hp: HyperParameters, source: WeightSource, layer: int, *, norm: str = "ffn_norm", shared: bool = False
) -> RoutedFeedForward:
    """`shared`: the architecture has a gated shared expert beside the routed ones."""
    keys, prefix = hp.keys, f"blk.{layer}"
    n_experts = keys.integer("expert_count", maximum=2**16)
    n_used = keys.integer("expert_used_count", maximum=n_experts)
    before = source.norm(f"{prefix}.{norm}.weight", hp.n_embd, hp.epsilon, layer)
    router = source.linear(f"{prefix}.ffn_gate_inp", hp.n_embd, n_experts, Role.EXPERTS, layer)
    n_ff = _expert_width(hp, source, prefix, layer)
    gate, up, merged = _gate_and_up(source, prefix, (hp.n_embd, n_ff, n_experts), layer)
    down = source.take(f"{prefix}.ffn_down_exps.weight", (n_ff, hp.n_embd, n_experts), Role.EXPERTS, layer)
    shared_parts = _shared_expert(hp, source, prefix, layer) if shared else (None, None, None, None)
    return RoutedFeedForward(
        before,
        Experts(router, gate, up, merged, down, n_used, _weight_scale(hp), *shared_parts),
    )


def _weight_scale(hp: HyperParameters) -> float:
    """A missing or zero `expert_weights_scale` means 1, as converters write it."""
    if not hp.keys.has("expert_weights_scale"):
        return 1.0
    return hp.keys.real("expert_weights_scale", positive=False) or 1.0


def _expert_width(hp: HyperParameters, source: WeightSource, prefix: str, layer: int) -> int:
    """`expert_feed_forward_length`; old files have only `feed_forward_length`."""
    width = hp.keys.integer("expert_feed_forward_length", 0, minimum=0) or hp.n_ff[layer]
    if not width:
        raise hp.keys.refuse("expert_feed_forward_length", "missing")
    return width


def _gate_and_up(
    source: WeightSource, prefix: str, shape: tuple[int, int, int], layer: int
) -> tuple[Weight | None, Weight | None, Weight | None]:
    n_embd, n_ff, n_experts = shape
    merged = f"{prefix}.ffn_gate_up_exps.weight"
    if source.has(merged):
        return None, None, source.take(merged, (n_embd, 2 * n_ff, n_experts), Role.EXPERTS, layer)
    gate = source.take(f"{prefix}.ffn_gate_exps.weight", shape, Role.EXPERTS, layer)
    return gate, source.take(f"{prefix}.ffn_up_exps.weight", shape, Role.EXPERTS, layer), None


def _shared_expert(
    hp: HyperParameters, source: WeightSource, prefix: str, layer: int
) -> tuple[Weight | None, Linear | None, Linear | None, Linear | None]:
    """(router, gate, up, down), or nothing where the file has none. Its width is that of its tensors."""
    name = f"{prefix}.ffn_gate_shexp.weight"
    if not source.has(name):
        return None, None, None, None
    width = hp.keys.integer(
        "expert_shared_feed_forward_length", math.prod(source.directory.tensors[name].shape[1:])
    )
    router = source.take(f"{prefix}.ffn_gate_inp_shexp.weight", (hp.n_embd,), Role.EXPERTS, layer)
    gate, up = source.linears(
        (f"{prefix}.ffn_gate_shexp", f"{prefix}.ffn_up_shexp"), hp.n_embd, (width, width), Role.EXPERTS, layer
    )
    down = source.linear(f"{prefix}.ffn_down_shexp", width, hp.n_embd, Role.EXPERTS, layer)
    return router, gate, up, down
