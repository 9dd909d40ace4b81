"""From `general.architecture` to a model: the table of architectures, and what is said about one file."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streamer.errors import GGUFError
from streamer.gguf.cursor import quoted, shown
from streamer.gguf.directory import Directory
from streamer.gguf.kinds import require_model
from streamer.kernels.ops import CacheLayout, Weight
from streamer.models import gemma3, llama, qwen2, qwen3, qwen3moe, qwen35, qwen35moe
from streamer.models.blocks import Decoder
from streamer.models.hparams import HyperParameters, read_hyperparameters
from streamer.models.weights import WeightSource
from streamer.plan.plan import WeightSpec

Build = Callable[[HyperParameters, WeightSource], Decoder]

ARCHITECTURES: Mapping[str, Build] = {
    "gemma3": gemma3.build,
    "llama": llama.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
    "qwen35": qwen35.build,
    "qwen35moe": qwen35moe.build,
    "qwen3moe": qwen3moe.build,
}

# Tensors of a trunk layer that are safe to ignore: tables of converters, computed from metadata here.
_HARMLESS = re.compile(r"blk\.\d+\.(attn_rot_embd|rope_freqs|attn_rotary_emb\..*)(\.weight)?")
# Tensors outside layers that some architecture computes with (llama.cpp's names of them). A file that has one
# which its own architecture does not use is another model; vision towers and the like are called otherwise.
_COMPUTED = re.compile(
    r"(token_embd|token_embd_norm|token_types|position_embd|output|output_norm|rope_freqs"
    r"|rope_factors_long|rope_factors_short|per_layer_token_embd|per_layer_model_proj|per_layer_proj_norm"
    r"|altup_proj|altup_unembd_proj)(\..*)?",
    re.DOTALL,
)
_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Architecture:
    """One file's model before any weight is read: what to load, what to keep, how to compute. Immutable."""

    name: str
    directory: Directory
    hparams: HyperParameters
    n_layers: int
    n_embd: int
    n_vocab: int  # logit rows
    n_valid_ids: int  # ids below it have a token; the others are padding and must never be sampled
    n_ctx_train: int
    notes: tuple[str, ...]  # defaults taken and tensors left out, one line each, for the log
    skipped: tuple[str, ...]  # tensors of the file that are left out on purpose
    _specs: tuple[WeightSpec, ...]
    _layout: CacheLayout
    _build: Build

    def specs(self) -> tuple[WeightSpec, ...]:
        """The weights, in execution order."""
        return self._specs

    def cache_layout(self) -> CacheLayout:
        return self._layout

    def bind(self, weights: Mapping[str, Weight]) -> Decoder:
        """The model over resident weights, by tensor name. KeyError if one is not there (our own fault)."""
        return self._build(self.hparams, WeightSource(self.directory, weights))


def describe(directory: Directory) -> Architecture:
    """What this file needs and computes. GGUFError for an unknown architecture or anything that cannot be."""
    require_model(directory)
    name = directory.architecture
    build = ARCHITECTURES.get(name)
    if build is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise GGUFError(
            directory.path, "general.architecture", f"{quoted(name)} is not supported (supported: {known})"
        )
    hparams = read_hyperparameters(directory)
    source = WeightSource(directory)
    model = build(hparams, source)
    skipped, notes = _left_out(directory, source.specs, hparams)
    return Architecture(
        name=name,
        directory=directory,
        hparams=hparams,
        n_layers=hparams.n_layers,
        n_embd=hparams.n_embd,
        n_vocab=hparams.n_vocab,
        n_valid_ids=hparams.n_valid_ids,
        n_ctx_train=hparams.n_ctx_train,
        notes=(*dict.fromkeys(hparams.keys.notes), *notes),
        skipped=skipped,
        _specs=tuple(source.specs),
        _layout=CacheLayout(model.kv_layers, model.recurrent_layers),
        _build=build,
    )


def _left_out(
    directory: Directory, specs: list[WeightSpec], hp: HyperParameters
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tensors nobody asked for: MTP blocks and strays.

    One of a trunk layer, or around the layers, is refused: leaving a weight out silently gives wrong answers.
    """
    wanted = {spec.name for spec in specs}
    skipped = [name for name in directory.tensors if name not in wanted]
    notes = []
    n_mtp = 0
    for name in skipped:
        block = _BLOCK.match(name)
        if block is None and not _COMPUTED.fullmatch(name):
            notes.append(f"tensor={shown(name)} left_out=true reason=unused")
        elif block is not None and int(block[1]) >= hp.n_layers:
            n_mtp += 1
        elif not _HARMLESS.fullmatch(name):
            reason = f"not known in architecture {directory.architecture}"
            raise GGUFError(directory.path, shown(name), reason)
    if n_mtp:
        notes.append(f"tensors={n_mtp} left_out=true reason=multi-token-prediction-blocks blocks={hp.n_mtp}")
    return tuple(skipped), tuple(notes)
