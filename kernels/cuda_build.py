"""From a model to what its executor needs: a dry run over the operators finds kernels, sizes and rotations.

The dry run calls the model's own forward with operators that launch nothing, so what is compiled, planned and
allocated is what the steps will ask for, whatever the architecture.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streamer.device.base import Capabilities
from streamer.gguf.quants import QuantType
from streamer.kernels.cuda_array import Arena
from streamer.kernels.cuda_attention import CudaAttention, attention_scratch
from streamer.kernels.cuda_delta import CudaDelta
from streamer.kernels.cuda_executor import CudaExecutor, graph_shape, table_layouts
from streamer.kernels.cuda_experts import CudaExperts
from streamer.kernels.cuda_limits import LOGIT_ROWS, Limits, StepKind, StepShape
from streamer.kernels.cuda_matmul import CudaMatmul, MatmulOptions, matmul_nbytes, needed_modules
from streamer.kernels.cuda_ops import CudaOps
from streamer.kernels.cuda_sample import CudaSampler, ResultLayout, SampleScratch
from streamer.kernels.cuda_tables import TableLayout
from streamer.kernels.cuda_workspace import Workspace, WorkspaceSizes, workspace_sizes
from streamer.kernels.launch import KernelStore, ModuleSpec
from streamer.kernels.ops import CacheLayout, CacheStorage, Model, Rope


@dataclass(frozen=True)
class Survey:
    """What a dry run found."""

    sizes: WorkspaceSizes
    modules: tuple[ModuleSpec, ...]  # to compile before the first step
    ropes: tuple[Rope, ...]  # distinct by `rope_key`
    head_counts: dict[int, int]  # query heads by layer

    @property
    def nbytes(self) -> int:
        """Device bytes beside weights, cache and landing area."""
        return self.sizes.nbytes + matmul_nbytes() + FREQUENCY_NBYTES


FREQUENCY_NBYTES = 1 << 16  # all rotation tables of a model
RopeKey = tuple[object, ...]


def rope_key(rope: Rope) -> RopeKey:
    """Equal for rotations of equal tables, wherever their factors lie."""
    factors = rope.factors.name if rope.factors is not None else None
    return rope.n_rot, rope.base, rope.scale, factors, rope.yarn


class _DryStore:
    """Hands out kernels that do nothing and remembers which were asked for."""

    def __init__(self) -> None:
        self.asked: dict[ModuleSpec, None] = {}

    def kernel(self, source: str, name: str, types: Sequence[type], *, shared: int = 0) -> Any:
        self.asked[ModuleSpec(source, (name,) if "<" in name else ())] = None
        return lambda *_, **__: None


class _DryBuffer:
    handle, nbytes = 0, 0

    def close(self) -> None: ...


class _DryStream:
    handle = 0

    def sync(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class _DryDevice:
    """Allocates nothing."""

    capabilities: Capabilities

    def allocate(self, nbytes: int, *, what: str = "") -> _DryBuffer:
        return _DryBuffer()

    def create_stream(self, name: str) -> _DryStream:
        return _DryStream()

    def fill(self, buffer: Any, offset: int, nbytes: int, value: int, *, stream: Any) -> None: ...


@dataclass
class _DryCache:
    """Addresses of nothing."""

    layout: CacheLayout
    element_type: str
    n_pages: int = 0
    n_slots: int = 0

    def keys(self, layer: int) -> int:
        return 0

    values = conv_state = delta_state = keys


@dataclass
class _Places:
    residual: int = 0
    hidden: int = 0
    last_ids: int = 0
    resolved_ids: int = 0
    results: int = 0


@dataclass
class _Recorder:
    """Stands for the table of rotation tables: remembers what it is asked for."""

    ropes: dict[RopeKey, Rope] = field(default_factory=dict)

    def __call__(self, rope: Rope) -> int:
        self.ropes.setdefault(rope_key(rope), rope)
        return 0


def survey(
    model: Model,
    layout: CacheLayout,
    types: Sequence[QuantType],
    limits: Limits,
    multiprocessors: int,
    *,
    n_embd: int,
    n_slots: int,
    kv_type: str,
    options: MatmulOptions,
) -> Survey:
    """Run `model` (bound to weights without memory) dry. `types`: quant types its products will meet."""
    store, recorder = _DryStore(), _Recorder()
    arena = Arena(0, None)
    cache: Any = _DryCache(layout, kv_type)
    attention = CudaAttention(
        store,
        cache,
        partial=0,
        counters=0,
        multiprocessors=multiprocessors,
    )
    delta = CudaDelta(store, cache) if layout.recurrent else None
    matmul = CudaMatmul(
        _DryDevice(Capabilities("cuda", "dry", multiprocessors=multiprocessors)), store, options
    )
    sampler = CudaSampler(store, SampleScratch(model.n_vocab), 0, n_valid=model.n_vocab)
    experts = CudaExperts(store, matmul)
    ops = CudaOps(matmul, experts, attention, delta, sampler, _Places(), arena, recorder)
    layouts = table_layouts(limits, -(-model.n_vocab // 32))
    for shape in _shapes(limits, layouts):
        ops.begin(shape, ResultLayout(shape.layout.shape.n_logits), stream=0)
        model.forward(ops)
    most = max(attention.head_counts.values(), default=0)  # for layers that the dry run left out
    counts = {kv.layer: attention.head_counts.get(kv.layer, most) for kv in layout.kv}
    sizes = workspace_sizes(
        n_embd=n_embd,
        n_vocab=model.n_vocab,
        n_slots=n_slots,
        limits=limits,
        layouts=layouts,
        attention=attention_scratch(layout, counts, limits, multiprocessors),
        arena=arena.peak,
    )
    modules = dict.fromkeys((*store.asked, *experts.modules, *needed_modules(types, options)))
    return Survey(sizes, tuple(modules), tuple(recorder.ropes.values()), counts)


def _shapes(limits: Limits, layouts: dict[StepKind, TableLayout]) -> list[StepShape]:
    """Steps that between them ask for every kernel and the most memory."""
    graphs = [graph_shape(kind, layouts[kind], 0) for kind in limits.graphs]
    eager = graph_shape(limits.eager, layouts[limits.eager], 0)
    prefill = replace(eager, n_logits=LOGIT_ROWS, n_top=1)
    return [*graphs, prefill, replace(eager, want_hidden=True)]


def build_executor(
    device: Any,
    store: KernelStore,
    model: Model,
    cache: CacheStorage,
    found: Survey,
    limits: Limits,
    frequencies: dict[RopeKey, int],
    *,
    n_embd: int,
    n_valid: int,
    options: MatmulOptions,
) -> CudaExecutor:
    """Allocate workspace and scratch, put the operators together. `frequencies`: tables by rotation."""
    workspace = Workspace(device, found.sizes, n_embd)
    try:
        matmul = CudaMatmul(device, store, options)
    except BaseException:
        workspace.close()
        raise
    attention = CudaAttention(
        store,
        cache,
        partial=workspace.attention_partial,
        counters=workspace.attention_counters,
        multiprocessors=device.capabilities.multiprocessors,
    )
    delta = CudaDelta(store, cache) if cache.layout.recurrent else None
    sampler = CudaSampler(store, SampleScratch(model.n_vocab), workspace.sampling, n_valid=n_valid)
    arena = Arena(workspace.arena, found.sizes.arena)
    experts = CudaExperts(store, matmul)
    ops = CudaOps(
        matmul,
        experts,
        attention,
        delta,
        sampler,
        workspace,
        arena,
        lambda rope: frequencies[rope_key(rope)],
    )
    stream = device.create_stream("compute")
    return CudaExecutor(
        device, stream, model, ops, cache, workspace, limits, closers=(matmul.close, stream.close)
    )
