"""What llama, qwen2, qwen3 and qwen3moe share: attention and feed-forward in turn over one rotation."""

from collections.abc import Callable

from streamer.kernels.ops import RopePairing
from streamer.models.blocks import (
    Decoder,
    Sublayer,
    make_attention,
    make_embedding,
    make_head,
    make_rope,
)
from streamer.models.hparams import HyperParameters
from streamer.models.weights import WeightSource

MakeFeedForward = Callable[[HyperParameters, WeightSource, int], Sublayer]


def build_dense(
    hp: HyperParameters,
    source: WeightSource,
    pairing: RopePairing,
    make_feed_forward: MakeFeedForward,
    *,
    head_norms: bool = False,
) -> Decoder:
    """x += attention(x); x += feed_forward(x), for each layer; then the head."""
    embedding = make_embedding(hp, source)
    rope = make_rope(hp, source, pairing)
    sublayers: list[Sublayer] = []
    for layer in range(hp.n_layers):
        sublayers.append(make_attention(hp, source, layer, rope, head_norms=head_norms))
        sublayers.append(make_feed_forward(hp, source, layer))
    norm, output = make_head(hp, source, embedding)
    return Decoder(hp.n_vocab, embedding, 1.0, tuple(sublayers), norm, output, None)
