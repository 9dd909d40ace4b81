"""gemma3: norms around each sublayer, GELU, scaled embedding, sliding windows with their own rotation."""

import math
from dataclasses import replace

from streamer.kernels.ops import Activation, Rope, RopePairing
from streamer.models.blocks import (
    Decoder,
    Sublayer,
    make_attention,
    make_embedding,
    make_feed_forward,
    make_head,
    make_rope,
)
from streamer.models.hparams import HyperParameters, read_attention_factor
from streamer.models.keys import Keys
from streamer.models.weights import WeightSource

DEFAULT_PATTERN = 6  # five windows, then one global layer
DEFAULT_WINDOW_ROPE_BASE = 10000.0
LAYERS_OF_27B = 62  # its files carry no attention.scale, and it alone scales by n_embd / n_head


def build(hp: HyperParameters, source: WeightSource) -> Decoder:
    hp = replace(hp, attention_scale=attention_scale(hp))
    windows = sliding_windows(hp.keys, hp.n_layers)
    embedding = make_embedding(hp, source)
    global_rope = make_rope(hp, source, RopePairing.NEOX)
    window_rope = Rope(  # its positions are never scaled
        RopePairing.NEOX,
        hp.n_rot,
        _window_base(hp.keys),
        attention_factor=read_attention_factor(hp.keys),
    )
    sublayers: list[Sublayer] = []
    for layer, window in enumerate(windows):
        sublayers.append(
            make_attention(
                hp,
                source,
                layer,
                global_rope if window is None else window_rope,
                head_norms=True,
                sliding_window=window,
                post_norm="post_attention_norm",
            )
        )
        sublayers.append(
            make_feed_forward(hp, source, layer, activation=Activation.GELU_TANH, post_norm="post_ffw_norm")
        )
    norm, output = make_head(hp, source, embedding)
    softcap = hp.keys.real("final_logit_softcapping", 0.0, positive=False) or None
    return Decoder(hp.n_vocab, embedding, math.sqrt(hp.n_embd), tuple(sublayers), norm, output, softcap)


def attention_scale(hp: HyperParameters) -> float:
    if hp.n_layers == LAYERS_OF_27B and not hp.keys.has("attention.scale"):
        return 1.0 / math.sqrt(hp.n_embd / hp.n_heads[0])
    return hp.attention_scale


def sliding_windows(keys: Keys, n_layers: int) -> tuple[int | None, ...]:
    """Each layer's window, None for global ones: every `sliding_window_pattern`-th layer is global.

    Newer files write the pattern as an array of flags, one a layer: true means a window.
    """
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    if not window:
        return (None,) * n_layers
    key = "attention.sliding_window_pattern"
    if keys.is_array(key):
        return tuple(window if flag else None for flag in keys.flags(key, n_layers))
    pattern = keys.integer(key, DEFAULT_PATTERN, minimum=0)
    if not pattern:
        return (None,) * n_layers
    return tuple(window if layer % pattern < pattern - 1 else None for layer in range(n_layers))


def _window_base(keys: Keys) -> float:
    if not keys.has("rope.freq_base_swa"):
        keys.note("rope.freq_base_swa", DEFAULT_WINDOW_ROPE_BASE)
    return keys.real("rope.freq_base_swa", DEFAULT_WINDOW_ROPE_BASE)
