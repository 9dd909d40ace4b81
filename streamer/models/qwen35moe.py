"""qwen35moe: qwen35's mixers, routed experts with a gated shared expert."""

from streamer.models.blocks import Decoder, Sublayer
from streamer.models.experts import make_routed_feed_forward
from streamer.models.hparams import HyperParameters
from streamer.models.hybrid import build_hybrid
from streamer.models.weights import WeightSource


def build(hp: HyperParameters, source: WeightSource) -> Decoder:
    return build_hybrid(hp, source, _feed_forward)


def _feed_forward(hp: HyperParameters, source: WeightSource, layer: int) -> Sublayer:
    return make_routed_feed_forward(hp, source, layer, norm="post_attention_norm", shared=True)
