"""qwen3: RMS norms per head on q and k before the rotation; head size from key_length."""

from streamer.kernels.ops import RopePairing
from streamer.models.blocks import Decoder, make_feed_forward
from streamer.models.dense import build_dense
from streamer.models.hparams import HyperParameters
from streamer.models.weights import WeightSource


def build(hp: HyperParameters, source: WeightSource) -> Decoder:
    return build_dense(hp, source, RopePairing.NEOX, make_feed_forward, head_norms=True)
