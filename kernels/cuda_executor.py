"""Steps a model on a CUDA device: tables up, a graph or eager launches, results back. One thread's.

A decode step replays the graph of the smallest batch size that holds it; a short prefill or mixed step,
that of its rows. Anything else (long chunks, whose launches the device hides, and embeddings) is launched
eagerly. No request waits for a graph: those not captured before READY are captured when nothing runs, and
until then a larger one does, or the launches one by one. A step costs one upload of tables, one replay and
one small download; only `PendingStep.result` waits, so the next step may be queued before it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streamer.device.base import CopyKind, Event, PinnedBuffer
from streamer.errors import DeviceError
from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.cuda_graph import Graph
from streamer.kernels.cuda_limits import Limits, StepKind, StepShape
from streamer.kernels.cuda_ops import CudaOps
from streamer.kernels.cuda_sample import ResultLayout
from streamer.kernels.cuda_tables import Packed, TableLayout, TableShape, Views, pack
from streamer.kernels.cuda_workspace import Workspace
from streamer.kernels.ops import Batch, ExecutorStatistics, Model, SamplingBatch, StepResult

IN_FLIGHT = 3  # steps whose host buffers are not reused yet
EAGER_WARM_ROWS = 160  # enough for every kernel of long prefills
MISSES = 64  # steps without the graph they want, after which it is captured although others wait
ADJUSTMENTS_A_ROW = 2048  # sparse logit adjustments there is room for, on average over the sequences


def table_layouts(limits: Limits, mask_words: int) -> dict[StepKind, TableLayout]:
    """The tables of every kind of step."""
    return {
        kind: TableLayout(
            TableShape(
                n_rows=kind.n_rows,
                n_spans=kind.n_spans,
                n_logits=kind.n_logits,
                max_pages=limits.max_pages,
                n_adjust=ADJUSTMENTS_A_ROW * limits.max_sequences,
                n_masks=limits.max_sequences,
                mask_words=mask_words,
            )
        )
        for kind in limits.kinds
    }


def graph_shape(kind: StepKind, layout: TableLayout, base: int) -> StepShape:
    """What a graph of this kind launches: room for all it may hold."""
    return StepShape(
        base=base,
        layout=layout,
        n_rows=kind.n_rows,
        n_decode=kind.n_spans,
        n_attention_tiles=0 if kind.decode else layout.shape.n_attention_tiles,
        n_conv_tiles=kind.n_rows if kind.decode else layout.shape.n_conv_tiles,
        n_spans=kind.n_spans,
        n_logits=kind.n_logits,
        single_rows=kind.decode,
        sampled=True,
        n_top=0,
        want_hidden=False,
    )


@dataclass
class _Turn:
    """Host buffers of one step in flight."""

    tables: PinnedBuffer
    results: PinnedBuffer
    views: dict[StepKind, Views]
    event: Event | None = None  # after the step's last copy


@dataclass(frozen=True)
class Pending:
    """A step on its way. `result` may be called once, before IN_FLIGHT - 1 further steps."""

    event: Event
    read: Callable[[], StepResult]

    def result(self) -> StepResult:
        self.event.sync()
        return self.read()


class CudaExecutor:
    """`Executor` over one CUDA device. Owns graphs, host buffers, workspace; not weights, cache, device."""

    def __init__(
        self,
        device: Any,
        stream: Any,
        model: Model,
        ops: CudaOps,
        cache: Any,
        workspace: Workspace,
        limits: Limits,
        *,
        closers: Sequence[Callable[[], None]] = (),
    ) -> None:
        """`device` a CudaDevice, `stream` for compute, `cache` a PagedCache there; `closers` run last."""
        self._device, self._stream, self._model, self._ops, self._cache = device, stream, model, ops, cache
        self._workspace, self._limits = workspace, limits
        self._layouts = table_layouts(limits, -(-model.n_vocab // 32))
        self._results = {kind: ResultLayout(kind.n_logits) for kind in self._layouts}
        self._turns: list[_Turn] = []
        self._graphs: dict[StepKind, Graph] = {}
        self._missed: Counter[StepKind] = Counter()  # steps that had to do without their graph
        self._steps = self._replays = 0
        self._closers = list(closers)
        self._n_embd = workspace.n_embd

    # ---- before READY ----------------------------------------------------------------------------

    def warm(self) -> None:
        """Host buffers, one eager step, the first graphs captured and replayed once."""
        table_nbytes = max(layout.nbytes for layout in self._layouts.values())
        result_nbytes = max(layout.nbytes for layout in self._results.values())
        for _ in range(IN_FLIGHT):
            tables = self._device.allocate_pinned(table_nbytes)
            results = self._device.allocate_pinned(result_nbytes)
            views = {kind: layout.views(tables.view) for kind, layout in self._layouts.items()}
            self._turns.append(_Turn(tables, results, views))
        self._warm_eager()
        for kind in self._limits.first_graphs:
            self._graphs[kind] = self._captured(kind)
        for kind in self._graphs:
            self._replay_padding(kind)
        self._stream.sync()

    def prepare_more(self) -> bool:
        """Capture the next graph, and replay it once. Takes tens of milliseconds."""
        lacking = (kind for kind in self._limits.graphs if kind not in self._graphs)
        kind = next(lacking, None)
        if kind is None:
            return False
        self._graphs[kind] = self._captured(kind)
        self._replay_padding(kind)
        self._stream.sync()
        return True

    def _captured(self, kind: StepKind) -> Graph:
        shape = graph_shape(kind, self._layouts[kind], self._workspace.tables)
        return Graph(self._device, self._stream.raw, lambda: self._queue(shape, kind))

    def _warm_eager(self) -> None:
        """A long step of padding rows. It opens cuBLASLt, which allocates: not while a graph is captured."""
        rows = min(self._limits.max_rows, EAGER_WARM_ROWS)
        self._step_tables(self._limits.eager, _padding_batch(), _padding_sampling())
        self._queue(self._eager_shape_of(rows), self._limits.eager)

    def _replay_padding(self, kind: StepKind) -> None:
        """With padding rows only: a first launch loads code."""
        self._step_tables(kind, _padding_batch(), _padding_sampling())
        self._graphs[kind].replay(stream=self._stream.handle)

    def _eager_shape_of(self, n_rows: int) -> StepShape:
        """An eager step of padding rows and one logit row."""
        eager = self._limits.eager
        shape = graph_shape(eager, self._layouts[eager], self._workspace.tables)
        return replace(shape, n_rows=n_rows, n_logits=1)

    # ---- steps -----------------------------------------------------------------------------------

    def step(self, batch: Batch, sampling: SamplingBatch) -> Pending:
        """Queue one step. Raises DeviceError; the arrays of `batch` are read before it returns."""
        n_logits = len(batch.logit_rows)
        kind = self._limits.eager if batch.want_hidden else self._kind_of(batch)
        turn, packed = self._step_tables(kind, batch, sampling)
        self._steps += 1
        if kind.eager:
            out = self._queue(self._eager_shape(batch, packed), kind)
            if batch.want_hidden:
                return self._pending_hidden(turn, out, n_logits)
        else:
            self._graphs[kind].replay(stream=self._stream.handle)
            self._replays += 1
            if packed.n_top and n_logits:
                self._ops.top(n_logits, packed.n_top, self._results[kind], stream=self._stream.handle)
        return self._pending(turn, kind, n_logits, packed.n_top)

    def _kind_of(self, batch: Batch) -> StepKind:
        """The cheapest kind that holds the step and has its graph."""
        n_spans, n_logits, decode = len(batch.spans), len(batch.logit_rows), batch.is_decode
        wanted = self._limits.choose(batch.n_rows, n_spans, n_logits, decode=decode)
        if wanted.eager or wanted in self._graphs:
            return wanted
        self._missed[wanted] += 1
        if self._missed[wanted] > MISSES:
            self._graphs[wanted] = self._captured(wanted)
        return self._limits.choose(batch.n_rows, n_spans, n_logits, decode=decode, among=self._graphs)

    def _step_tables(self, kind: StepKind, batch: Batch, sampling: SamplingBatch) -> tuple[_Turn, Packed]:
        turn = self._turns[self._steps % IN_FLIGHT]
        if turn.event is not None:
            turn.event.sync()  # the device has read the tables this turn held
        packed = pack(batch, sampling, self._layouts[kind], turn.views[kind])
        self._device.upload(
            self._workspace.buffer,
            self._workspace.tables - self._workspace.buffer.handle,
            turn.tables.address,
            packed.nbytes,
            stream=self._stream,
            kind=CopyKind.TABLES,
        )
        turn.event = self._stream.record()
        return turn, packed

    def _eager_shape(self, batch: Batch, packed: Packed) -> StepShape:
        return StepShape(
            base=self._workspace.tables,
            layout=self._layouts[self._limits.eager],
            n_rows=batch.n_rows,
            n_decode=packed.n_decode,
            n_attention_tiles=packed.n_attention_tiles,
            n_conv_tiles=packed.n_conv_tiles,
            n_spans=packed.n_spans,
            n_logits=len(batch.logit_rows),
            single_rows=packed.single_rows,
            sampled=packed.sampled,
            n_top=packed.n_top,
            want_hidden=batch.want_hidden,
        )

    def _queue(self, shape: StepShape, kind: StepKind) -> Any:
        self._ops.begin(shape, self._results[kind], stream=self._stream.handle)
        return self._model.forward(self._ops)

    def _pending(self, turn: _Turn, kind: StepKind, n_rows: int, n_top: int) -> Pending:
        layout = self._results[kind]
        nbytes = layout.nbytes if n_top else layout.fixed_nbytes
        offset = self._workspace.results - self._workspace.buffer.handle
        self._device.download(
            self._workspace.buffer, offset, turn.results.address, nbytes, stream=self._stream
        )
        turn.event = self._stream.record()
        return Pending(turn.event, lambda: layout.read(turn.results.view, n_rows, n_top))

    def _pending_hidden(self, turn: _Turn, out: DeviceArray, n_rows: int) -> Pending:
        hidden = np.empty((n_rows, self._n_embd), np.float32)
        offset = out.address - self._workspace.buffer.handle
        self._device.download(
            self._workspace.buffer, offset, hidden.ctypes.data, hidden.nbytes, stream=self._stream
        )
        turn.event = self._stream.record()
        return Pending(turn.event, lambda: _hidden_result(hidden))

    # ---- state -----------------------------------------------------------------------------------

    def copy_state(self, source_slot: int, target_slot: int) -> None:
        for address, nbytes in self._state_slots():
            self._device.driver.call(
                "cuMemcpyDtoDAsync",
                address + target_slot * nbytes,
                address + source_slot * nbytes,
                nbytes,
                self._stream.raw,
            )

    def reset_state(self, slot: int) -> None:
        for address, nbytes in self._state_slots():
            self._device.driver.call("cuMemsetD8Async", address + slot * nbytes, 0, nbytes, self._stream.raw)

    def _state_slots(self) -> list[tuple[int, int]]:
        """(address of slot 0, bytes a slot) of every layer's conv and delta state."""
        self._device.activate()
        base = self._cache.state_address
        return [
            pair
            for region in self._cache.state_regions
            for pair in (
                (base + region.conv_offset, region.conv_slot_nbytes),
                (base + region.delta_offset, region.delta_slot_nbytes),
            )
        ]

    # ---- account and end -------------------------------------------------------------------------

    def statistics(self) -> ExecutorStatistics:
        nodes = max((graph.n_nodes for graph in self._graphs.values()), default=0)
        details = {"replays": self._replays, "graphs": len(self._graphs), "graph_nodes": nodes}
        return ExecutorStatistics(self._steps, self._workspace.buffer.nbytes, details)

    def close(self) -> None:
        """Wait for the stream, then free graphs, host buffers and workspace. Idempotent."""
        with suppress(DeviceError):  # after a lost context there is nothing to wait for
            self._stream.sync()
        while self._graphs:
            self._graphs.popitem()[1].close()
        while self._turns:
            turn = self._turns.pop()
            turn.views.clear()
            turn.tables.close()
            turn.results.close()
        self._workspace.close()
        while self._closers:
            self._closers.pop(0)()


def _hidden_result(hidden: np.ndarray[Any, np.dtype[np.float32]]) -> StepResult:
    n = len(hidden)
    zeros, nothing = np.zeros(n, np.float32), np.zeros((n, 0), np.float32)
    finite = np.isfinite(hidden).all(axis=1)
    return StepResult(np.zeros(n, np.int32), zeros, zeros, nothing.astype(np.int32), nothing, finite, hidden)


def _padding_batch() -> Batch:
    none = np.zeros(0, np.int32)
    return Batch(none, none, (), none)


def _padding_sampling() -> SamplingBatch:
    i, f = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return SamplingBatch(f, i, f, f, f, i, i, i, i, f, f)
