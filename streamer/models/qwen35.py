"""qwen35: three gated delta nets to one gated full attention, dense feed-forward."""

from streamer.models.blocks import Decoder, Sublayer, make_feed_forward
from streamer.models.hparams import HyperParameters
from streamer.models.hybrid import build_hybrid
from streamer.models.weights import WeightSource


def build(hp: HyperParameters, source: WeightSource) -> Decoder:
    return build_hybrid(hp, source, _feed_forward)


def _feed_forward(hp: HyperParameters, source: WeightSource, layer: int) -> Sublayer:
    return make_feed_forward(hp, source, layer, norm="post_attention_norm")
