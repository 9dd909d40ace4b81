"""A plan as `ggufd inspect` shows it: a table for people, the same as data for machines. Pure."""

from collections import Counter
from dataclasses import dataclass

from streamer.errors import one_line, readable
from streamer.gguf.cursor import shown
from streamer.gguf.directory import Directory
from streamer.plan.memory import readable_nbytes
from streamer.plan.plan import Plan, PlannedWeight, Role, Segment


@dataclass(frozen=True)
class ExpertCount:
    """The routed experts of one layer. `nbytes_each` is what one expert's matrices take in the file."""

    layer: int
    n_experts: int
    nbytes_each: int


def experts_of(plan: Plan) -> tuple[ExpertCount, ...]:
    """Layers with expert stacks ([n_in, n_out, n_experts]), in order."""
    found: dict[int, list[PlannedWeight]] = {}
    for weight in plan.weights:
        if weight.role is Role.EXPERTS and weight.layer is not None and len(weight.tensor.shape) == 3:
            found.setdefault(weight.layer, []).append(weight)
    return tuple(
        ExpertCount(
            layer, stacks[0].tensor.shape[2], sum(w.tensor.nbytes // w.tensor.shape[2] for w in stacks)
        )
        for layer, stacks in found.items()
    )


def plan_as_data(directory: Directory, plan: Plan) -> dict[str, object]:
    """Everything of the plan that JSON can hold; sizes in bytes."""
    return {
        "model": readable(directory.path),
        "architecture": directory.architecture,
        "version": directory.version,
        "shards": [{"path": readable(shard.path), "nbytes": shard.nbytes} for shard in directory.shards],
        "n_tensors": len(plan.weights),
        "n_layers": plan.n_layers,
        "nbytes": plan.nbytes,
        "types": _types(plan.weights),
        "segments": [_segment_as_data(segment, plan) for segment in plan.segments],
        "experts": [
            {"layer": e.layer, "n_experts": e.n_experts, "nbytes_each": e.nbytes_each}
            for e in experts_of(plan)
        ],
        "skipped": list(plan.skipped),
        "n_ctx": plan.n_ctx,
        "n_pages": plan.n_pages,
        "max_sequences": plan.max_sequences,
        "kv_nbytes_per_token": plan.kv_nbytes_per_token,
        "kv_nbytes_per_sequence": plan.kv_nbytes_per_token * plan.n_ctx,
        "state_nbytes_per_sequence": plan.state_nbytes_per_sequence,
        "memory": _memory_as_data(plan),
        "free_bytes": plan.free_bytes,
        "fits": plan.fits,
    }


def _memory_as_data(plan: Plan) -> dict[str, int]:
    memory = plan.memory
    return {
        "weights": memory.weights,
        "kv_cache": memory.kv_cache,
        "recurrent_state": memory.recurrent_state,
        "workspace": memory.workspace,
        "reserve": memory.reserve,
        "total": memory.total,
    }


def _segment_as_data(segment: Segment, plan: Plan) -> dict[str, object]:
    return {
        "name": segment.name,
        "layer": segment.layer,
        "nbytes": segment.nbytes,
        "weights": [_weight_as_data(plan.weights[index]) for index in segment.weights],
    }


def _weight_as_data(weight: PlannedWeight) -> dict[str, object]:
    return {
        "order": weight.index,
        "name": weight.name,
        "role": weight.role.value,
        "type": weight.tensor.type.name,
        "shape": list(weight.tensor.shape),
        "nbytes": weight.tensor.nbytes,
        "shard": weight.tensor.shard,
        "file_offset": weight.tensor.offset,
        "layout": weight.layout.value,
        "resident_nbytes": weight.resident_nbytes,
        "destination_offset": weight.destination_offset,
    }


def _types(weights: tuple[PlannedWeight, ...]) -> dict[str, dict[str, int]]:
    types: dict[str, dict[str, int]] = {}
    for weight in weights:
        row = types.setdefault(weight.tensor.type.name, {"tensors": 0, "nbytes": 0, "resident_nbytes": 0})
        row["tensors"] += 1
        row["nbytes"] += weight.tensor.nbytes
        row["resident_nbytes"] += weight.resident_nbytes
    return dict(sorted(types.items(), key=lambda item: -item[1]["nbytes"]))


def render_plan(directory: Directory, plan: Plan) -> str:
    """The plan as a table of about forty lines; alike layers in a row are one line."""
    shards = f", {len(directory.shards)} shards" if len(directory.shards) > 1 else ""
    lines = [
        f"{one_line(directory.path)}: {directory.architecture}, GGUF version {directory.version}{shards}",
        f"{len(plan.weights)} tensors, {plan.n_layers} layers, {readable_nbytes(plan.nbytes)} to upload",
        "",
        *_table(("in order", "tensors", "file", "device", "types"), _segment_rows(plan)),
        "",
        *_table(("type", "tensors", "file", "device"), _type_rows(plan)),
        "",
        *_expert_lines(directory, plan),
        *_cache_lines(plan),
        *_memory_lines(plan),
    ]
    if plan.skipped:
        lines += ["", f"left out: {len(plan.skipped)} tensors ({_listed(plan.skipped)})"]
    return "\n".join(lines)


def _segment_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []  # ("layer 3", tensors, file, device, types)
    runs: list[tuple[int, int]] = []  # first and last layer of a row; (-1, -1) where it is no layer
    for segment in plan.segments:
        weights = [plan.weights[index] for index in segment.weights]
        types = Counter(weight.tensor.type.name for weight in weights)
        cells = (
            str(len(weights)),
            readable_nbytes(sum(weight.tensor.nbytes for weight in weights)),
            readable_nbytes(segment.nbytes),
            ", ".join(f"{name} x{count}" for name, count in types.most_common()),
        )
        layer = -1 if segment.layer is None else segment.layer
        if layer >= 0 and rows and rows[-1][1:] == cells and runs[-1][1] == layer - 1:
            runs[-1] = (runs[-1][0], layer)
            rows[-1] = (f"layers {runs[-1][0]}-{layer}, each", *cells)
        else:
            runs.append((layer, layer))
            rows.append((segment.name, *cells))
    return rows


def _type_rows(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (name, str(row["tensors"]), readable_nbytes(row["nbytes"]), readable_nbytes(row["resident_nbytes"]))
        for name, row in _types(plan.weights).items()
    ]


def _expert_lines(directory: Directory, plan: Plan) -> list[str]:
    counts = Counter((e.n_experts, e.nbytes_each) for e in experts_of(plan))
    if not counts:
        return []
    used = directory.metadata.get_int(f"{directory.architecture}.expert_used_count", 0)
    return [
        f"experts: {n_layers} layers with {n} experts of {readable_nbytes(nbytes)}"
        + (f", {used} used a token" if used else "")
        for (n, nbytes), n_layers in counts.items()
    ]


def _cache_lines(plan: Plan) -> list[str]:
    kv = readable_nbytes(plan.kv_nbytes_per_token * plan.n_ctx)
    lines = [
        f"context: {plan.n_ctx} tokens a sequence, {plan.max_sequences} sequences, {plan.n_pages} pages",
        f"KV cache: {readable_nbytes(plan.kv_nbytes_per_token)} a token, {kv} a full sequence",
    ]
    if plan.state_nbytes_per_sequence:
        lines.append(f"recurrent state: {readable_nbytes(plan.state_nbytes_per_sequence)} a sequence")
    return lines


def _memory_lines(plan: Plan) -> list[str]:
    parts = [(name, nbytes) for name, nbytes in _memory_as_data(plan).items() if nbytes and name != "total"]
    text = " + ".join(f"{name.replace('_', ' ')} {readable_nbytes(nbytes)}" for name, nbytes in parts)
    lines = [f"memory: {text} = {readable_nbytes(plan.memory.total)}"]
    if plan.free_bytes is None:
        return lines
    verdict = "fits in" if plan.fits else "does not fit in"
    return [*lines, f"{verdict} {readable_nbytes(plan.free_bytes)}"]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their cells; numbers (all but the first and a `types` column) to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: tuple[str, ...]) -> str:
        cells = (
            cell.ljust(width) if i == 0 or head[i] == "types" else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return [line(head), *map(line, rows)]


def _listed(names: tuple[str, ...], limit: int = 4) -> str:
    return ", ".join(map(shown, names[:limit])) + (", ..." if len(names) > limit else "")
