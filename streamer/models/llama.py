"""llama: rotation of neighbouring pairs (converters permute q and k rows for it), rope factors.

With `expert_count` the feed-forward is routed (Mixtral's files call themselves llama).
"""

from streamer.kernels.ops import RopePairing
from streamer.models.blocks import Decoder, make_feed_forward
from streamer.models.dense import build_dense
from streamer.models.experts import make_routed_feed_forward
from streamer.models.hparams import HyperParameters
from streamer.models.weights import WeightSource


def build(hp: HyperParameters, source: WeightSource) -> Decoder:
    routed = hp.keys.integer("expert_count", 0, minimum=0) > 0
    return build_dense(
        hp, source, RopePairing.NORM, make_routed_feed_forward if routed else make_feed_forward
    )
