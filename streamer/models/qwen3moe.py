"""qwen3moe: qwen3's attention, routed experts in every layer."""

from streamer.kernels.ops import RopePairing
from streamer.models.blocks import Decoder
from streamer.models.dense import build_dense
from streamer.models.experts import make_routed_feed_forward
from streamer.models.hparams import HyperParameters
from streamer.models.weights import WeightSource


def build(hp: HyperParameters, source: WeightSource) -> Decoder:
    return build_dense(hp, source, RopePairing.NEOX, make_routed_feed_forward, head_norms=True)
