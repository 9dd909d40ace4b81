"""What a CUDA executor will need, before there is a device: a dry run of the model. Pure."""

from dataclasses import fields, is_dataclass, replace

from streamer.errors import GGUFError
from streamer.gguf.directory import Directory
from streamer.gguf.quants import QuantType
from streamer.kernels.cuda_build import Survey, survey
from streamer.kernels.cuda_limits import Limits
from streamer.kernels.cuda_matmul import MatmulOptions, ResidentWeight
from streamer.kernels.ops import Weight
from streamer.models.blocks import Decoder, Sublayer
from streamer.models.registry import Architecture
from streamer.plan.layouts import cuda_layout
from streamer.plan.plan import Layout

MATMUL = MatmulOptions()
MULTIPROCESSORS = 132  # of the largest device planned for: more need more scratch


def cuda_workspace(
    directory: Directory, architecture: Architecture, max_rows: int, max_sequences: int
) -> int:
    """Device bytes of executor and scratch, found by a dry run with the longest page tables there can be."""
    refuse_split_biases(directory, architecture)
    pages = -(-architecture.n_ctx_train // architecture.cache_layout().page_size)
    limits = Limits(max_rows, max_sequences, pages)
    return survey_model(
        architecture, limits, "bf16", n_slots=max_sequences, multiprocessors=MULTIPROCESSORS
    ).nbytes


def refuse_split_biases(directory: Directory, architecture: Architecture) -> None:
    """GGUFError for a fused q, k, v weight with separate biases: the kernels take one bias a matrix."""
    names = {spec.name for spec in architecture.specs()}
    for name in sorted(names):
        prefix, fused, _ = name.partition("attn_qkv.weight")
        if fused and f"{prefix}attn_q.bias" in names:
            reason = f"a separate bias beside the fused {name} is not supported on CUDA; --device host is"
            raise GGUFError(directory.path, f"{prefix}attn_q.bias", reason)


def survey_model(
    architecture: Architecture, limits: Limits, kv_type: str, *, n_slots: int, multiprocessors: int
) -> Survey:
    specs = {spec.name: spec for spec in architecture.specs()}
    infos = {name: architecture.directory.tensors[name] for name in specs}
    weights = {
        name: Weight(name, info.type, info.shape, ResidentWeight(0, cuda_layout(info.type, specs[name].role)))
        for name, info in infos.items()
    }
    return survey(
        one_of_a_kind(architecture.bind(weights)),
        architecture.cache_layout(),
        sorted({_product_type(w) for w in weights.values() if len(w.shape) > 1}),
        limits,
        multiprocessors,
        n_embd=architecture.n_embd,
        n_slots=n_slots,
        kv_type=kv_type,
        options=MATMUL,
    )


def one_of_a_kind(model: Decoder) -> Decoder:
    """The model with one sublayer of each shape: the others would ask for nothing new."""
    kinds: dict[object, Sublayer] = {}
    for sublayer in model.sublayers:
        kinds.setdefault(_shape_of(sublayer), sublayer)
    return replace(model, sublayers=tuple(kinds.values()))


def _shape_of(part: object) -> object:
    """What two parts of a model must share to need the same kernels and memory: all but names and layers."""
    if isinstance(part, Weight):
        return part.type, part.shape
    if isinstance(part, tuple):
        return tuple(_shape_of(x) for x in part)
    if is_dataclass(part):
        return type(part), *(_shape_of(getattr(part, f.name)) for f in fields(part) if f.name != "layer")
    return part


def _product_type(weight: Weight) -> QuantType:
    """The type the kernels meet once the layout is applied."""
    return QuantType.BF16 if weight.handle.layout is Layout.BF16 else weight.type
