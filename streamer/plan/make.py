"""A directory and a model's specs become a Plan. Pure: nothing is read, nothing is allocated.

Order: the specs' own. A segment is one device allocation: consecutive weights of a layer, of the embedding,
of the tables, of the output. What does not fit is refused here, before any allocation, with its sum.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from streamer.errors import GGUFError, PlanError, one_line
from streamer.gguf.cursor import shown
from streamer.gguf.directory import Directory, TensorInfo
from streamer.plan.layouts import Layouts, resident_nbytes
from streamer.plan.memory import CacheNeeds, CacheSize, PlanOptions, describe_lack, size_cache
from streamer.plan.plan import Layout, MemorySum, Plan, PlannedWeight, Role, Segment, WeightSpec

DESTINATION_ALIGNMENT = 256  # bytes: what the device's allocations have, and any load width divides
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_DERIVED = frozenset({"attn_rot_embd.weight", "attn_rot_embd"})  # in old files; computed from keys instead


def make_plan(
    directory: Directory,
    specs: Iterable[WeightSpec],
    *,
    layouts: Layouts,
    cache: CacheNeeds,
    options: PlanOptions,
    free_bytes: int | None,
) -> Plan:
    """Plan the residency of `specs` (execution order), with the cache beside them.

    `free_bytes` is the device's free memory; None plans without a device, and everything fits. GGUFError
    names a tensor that is missing, has another shape or a type that is no weight's, or that is a layer's but
    no spec's. PlanError when the sum does not fit.
    """
    wanted = _wanted(directory, specs)
    skipped = _skipped(directory, {spec.name for spec, _ in wanted})
    weights, segments = _lay_out(wanted, layouts, options.chunk_nbytes)
    size = size_cache(cache, options, directory.path)
    weights_nbytes = sum(segment.nbytes for segment in segments)
    workspace = options.workspace_nbytes + _landing(weights, options)
    n_pages, memory = _budget(directory.path, weights_nbytes, workspace, size, options, free_bytes)
    return Plan(
        weights=weights,
        segments=segments,
        n_layers=len({weight.layer for weight in weights if weight.layer is not None}),
        chunk_nbytes=options.chunk_nbytes,
        skipped=skipped,
        memory=memory,
        free_bytes=free_bytes,
        n_ctx=size.n_ctx,
        n_pages=n_pages,
        max_sequences=options.max_sequences,
        kv_nbytes_per_token=cache.kv_nbytes_per_token,
        state_nbytes_per_sequence=cache.state_nbytes_per_sequence,
    )


def _wanted(directory: Directory, specs: Iterable[WeightSpec]) -> list[tuple[WeightSpec, TensorInfo]]:
    """Each spec with its tensor. A tensor asked for twice (tied output) is there once, at its first use."""
    wanted: dict[str, tuple[WeightSpec, TensorInfo]] = {}
    for spec in specs:
        tensor = directory.tensors.get(spec.name)
        if tensor is None:
            if not spec.optional:
                raise GGUFError(directory.path, spec.name, f"tensor is missing (a {spec.role} weight)")
            continue
        if _trimmed(tensor.shape) != _trimmed(spec.shape):
            have, want = list(tensor.shape), list(spec.shape)
            raise GGUFError(
                directory.path, spec.name, f"tensor has shape {have}, the metadata ask for {want}"
            )
        if not tensor.type.is_dequantizable:
            raise GGUFError(directory.path, spec.name, f"tensor type {tensor.type.name} cannot be a weight's")
        wanted.setdefault(spec.name, (spec, replace(tensor, shape=spec.shape)))
    return list(wanted.values())


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without trailing ones, which the format leaves to the writer."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _skipped(directory: Directory, planned: set[str]) -> tuple[str, ...]:
    """Tensors left out on purpose: next-token-prediction blocks, and what belongs to no layer.

    A layer's unknown tensor is refused: leaving a weight out silently gives wrong answers.
    """
    architecture = directory.architecture
    n_blocks = directory.metadata.get_int(f"{architecture}.block_count", 0)
    n_trunk = n_blocks - directory.metadata.get_int(f"{architecture}.nextn_predict_layers", 0)
    skipped = [name for name in directory.tensors if name not in planned]
    for name in skipped:
        block = _BLOCK.fullmatch(name)
        if block is None or n_trunk <= int(block[1]) < n_blocks or block[2] in _DERIVED:
            continue
        raise GGUFError(
            directory.path, shown(name), f"tensor is not known in a layer of {shown(architecture)}"
        )
    return tuple(skipped)


@dataclass
class _Draft:
    """A segment while it grows."""

    name: str
    layer: int | None
    nbytes: int = 0
    weights: list[int] = field(default_factory=list)


def _segment_name(spec: WeightSpec) -> str:
    if spec.layer is not None:
        return f"layer {spec.layer}"
    return {Role.EMBEDDING: "embedding", Role.TABLE: "tables"}.get(spec.role, "output")


def _lay_out(
    wanted: list[tuple[WeightSpec, TensorInfo]], layouts: Layouts, chunk_nbytes: int
) -> tuple[tuple[PlannedWeight, ...], tuple[Segment, ...]]:
    weights: list[PlannedWeight] = []
    drafts: list[_Draft] = []
    for index, (spec, tensor) in enumerate(wanted):
        name = _segment_name(spec)
        if not drafts or drafts[-1].name != name:
            drafts.append(_Draft(name, spec.layer))
        draft = drafts[-1]
        layout = layouts(tensor.type, spec.role)
        nbytes = resident_nbytes(layout, tensor.type, tensor.n_elements)
        weight = PlannedWeight(
            index=index,
            name=spec.name,
            role=spec.role,
            layer=spec.layer,
            tensor=tensor,
            segment=len(drafts) - 1,
            destination_offset=draft.nbytes,
            resident_nbytes=nbytes,
            layout=layout,
        )
        draft.nbytes += -(-nbytes // DESTINATION_ALIGNMENT) * DESTINATION_ALIGNMENT
        draft.weights.append(index)
        weights.append(weight)
    segments = tuple(
        Segment(i, draft.name, draft.layer, draft.nbytes, tuple(draft.weights))
        for i, draft in enumerate(drafts)
    )
    return tuple(weights), segments


def _landing(weights: tuple[PlannedWeight, ...], options: PlanOptions) -> int:
    """Device bytes where file bytes land before a layout transform: the largest such weight, unless told."""
    if options.landing_nbytes is not None:
        return options.landing_nbytes
    return max((w.tensor.nbytes for w in weights if w.layout is not Layout.FILE), default=0)


def _budget(
    path: str, weights: int, workspace: int, size: CacheSize, options: PlanOptions, free_bytes: int | None
) -> tuple[int, MemorySum]:
    """Pages for all sequences at full context, fewer where memory ends, but one context; and the sum."""

    def total(n_pages: int) -> MemorySum:
        return MemorySum(
            weights=weights,
            kv_cache=n_pages * size.page_nbytes,
            recurrent_state=size.state_nbytes,
            workspace=workspace,
            reserve=options.reserve_nbytes,
        )

    n_pages = size.pages_per_sequence * options.max_sequences
    if free_bytes is None:
        return n_pages, total(n_pages)
    if size.page_nbytes:
        n_pages = min(n_pages, (free_bytes - total(0).total) // size.page_nbytes)
    least = total(size.pages_per_sequence)
    if n_pages < size.pages_per_sequence or least.total > free_bytes:
        raise PlanError(f"{one_line(path)}: {describe_lack(least, size, options, free_bytes)}")
    return n_pages, total(n_pages)
