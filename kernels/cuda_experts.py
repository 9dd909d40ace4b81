"""Routed experts on CUDA: routing on the device, then products that read only the chosen experts' rows.

| rows | what is launched after norm, router, and the shared expert's products |
|---|---|
| to `gemv_tokens`; F32 stacks always | route, expert_gate_up, expert_down: a pair (token, choice) at a time |
| to FUSED_GROUPING | route and group in one block, expert_tiles twice, combine |
| more | route, group, expert_tiles twice, combine, for SLICE rows at a time |

Nothing here allocates, waits or reads back: grids are of the most work there can be, tables are the device's.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

from streamer.errors import PlanError
from streamer.kernels.cuda_array import Arena, DeviceArray
from streamer.kernels.cuda_matmul import CudaMatmul, Form, Rows
from streamer.kernels.experts_arguments import (
    GATE_ROWS,
    MAX_EXPERTS,
    MAX_FUSED_EXPERTS,
    TILE_ROWS,
    TILES,
    CombineParams,
    ExpertParams,
    RouteParams,
    Stacks,
    TileParams,
    down_name,
    down_rows,
    expert_modules,
    experts_a_lane,
    gate_up_name,
    most_tiles,
    refusal,
    tile_of,
    tiles_name,
    tiles_shared,
)
from streamer.kernels.launch import KernelSource, ModuleSpec
from streamer.kernels.matmul_arguments import CHUNK, DeviceMatrix, QuantizedRows
from streamer.kernels.matmul_launch import group_threads
from streamer.kernels.ops import Activation, Experts, Linear, Norm

FUSED_GROUPING = 64  # rows that one block routes and groups
SLICE = 4096  # rows whose pairs are in memory at once


@dataclass(frozen=True)
class ExpertOptions:
    gemv_tokens: int = 4  # up to so many rows pairs are computed one by one
    tile: int = 0  # pairs a tile; 0: by `tile_of`


@dataclass(frozen=True)
class Routing:
    """Device arrays of one call: who goes where, and what is added beside the experts."""

    logits: DeviceArray  # (n_rows, n_experts) f32
    ids: DeviceArray  # (n_rows, n_used) i32
    weights: DeviceArray  # (n_rows, n_used) f32
    scale: float
    shared: DeviceArray | None  # (n_rows, n_embd) f32: the shared expert
    shared_gate: DeviceArray | None  # (n_rows, 1) f32, before the sigmoid


# ---- launches ------------------------------------------------------------------------------------


class CudaExperts:
    """Routed feed-forwards over the products of a `CudaMatmul`. Launches from one thread, on one stream."""

    def __init__(self, store: KernelSource, matmul: CudaMatmul, options: ExpertOptions | None = None) -> None:
        self.options = options or ExpertOptions()
        self.modules: dict[ModuleSpec, None] = {}  # what dry runs found to be needed
        self._store, self._matmul = store, matmul
        self._kernels: dict[tuple[str, int], Any] = {}
        self._stacks: dict[str, Stacks] = {}
        self._arena = Arena(0, None)
        self._stream = 0

    def begin(self, arena: Arena, *, stream: int) -> None:
        """As `CudaMatmul.begin`, and with the same arena."""
        self._arena, self._stream = arena, stream

    def routed_experts(self, x: DeviceArray, norm: Norm, experts: Experts) -> DeviceArray:
        """x += sum of the chosen experts' SwiGLU + shared expert, in place. PlanError: cannot be computed."""
        stacks = self._stacks_of(experts)
        if not self._matmul.is_live:
            self.modules |= dict.fromkeys(expert_modules(stacks, self._matmul.options.activation_bytes))
        one_by_one = x.rows <= self.options.gemv_tokens or stacks.products_only
        rows, routing = self._prepared(x, norm, experts, stacks, one_by_one)
        if one_by_one:
            self._pair_by_pair(x, rows, stacks, routing)
        else:
            self._grouped(x, rows, stacks, routing)
        return x

    # ---- before the experts ----------------------------------------------------------------------

    def _stacks_of(self, experts: Experts) -> Stacks:
        found = self._stacks.get(experts.down.name)
        if found is None:
            reason = refusal(experts)
            if reason is not None:
                raise PlanError(f"{experts.down.name}: {reason}")
            found = self._stacks[experts.down.name] = self._make_stacks(experts)
        return found

    def _make_stacks(self, experts: Experts) -> Stacks:
        matrix, merged = self._matmul.matrix, experts.gate_up
        n_ff, n_embd, n_experts = experts.down.shape
        down = matrix(experts.down)
        if merged is not None:
            both = matrix(merged)
            return Stacks(both, both, down, 2 * n_ff, n_ff, n_embd, n_ff, n_experts, experts.n_used)
        assert experts.gate is not None
        assert experts.up is not None
        gate, up = matrix(experts.gate), matrix(experts.up)
        return Stacks(gate, up, down, n_ff, 0, n_embd, n_ff, n_experts, experts.n_used)

    def _prepared(
        self, x: DeviceArray, norm: Norm, experts: Experts, stacks: Stacks, one_by_one: bool
    ) -> tuple[Rows, Routing]:
        """The normed rows in every form wanted, router and shared expert launched, room for the routing."""
        matmul, shared_expert = self._matmul, _shared_parts(experts)
        routers = [experts.router]
        if experts.shared_router is not None and shared_expert is not None:
            routers.append(Linear(experts.shared_router))
        weights = [*(r.weight for r in routers), *(p.weight for p in (shared_expert or ())[:2])]
        also = Form.BF16
        if one_by_one:
            also = _form(stacks.gate) | _form(stacks.up)
        rows = matmul.prepare(x, weights, norm=norm, also=also)
        logits = self._arena.take(x.rows, stacks.n_experts)
        outs = [logits, *(self._arena.take(x.rows, 1) for _ in routers[1:])]
        matmul.project(rows, [matmul.output(r, out) for r, out in zip(routers, outs, strict=True)])
        shared = None
        if shared_expert is not None:
            gate, up, down = shared_expert
            hidden = matmul.gated(rows, gate, up, down, Activation.SILU)
            shared = self._arena.take(x.rows, stacks.n_embd)
            matmul.project(hidden, [matmul.output(down, shared)])
        ids = self._arena.take(x.rows, stacks.n_used, "i32")
        chosen = self._arena.take(x.rows, stacks.n_used)
        gate_logits = outs[1] if len(outs) > 1 else None
        return rows, Routing(logits, ids, chosen, experts.weight_scale, shared, gate_logits)

    # ---- few rows --------------------------------------------------------------------------------

    def _pair_by_pair(self, x: DeviceArray, rows: Rows, stacks: Stacks, routing: Routing) -> None:
        n_pairs, nbytes = x.rows * stacks.n_used, self._matmul.options.activation_bytes
        self._route(self._route_params(stacks, routing))
        gate = _expert_params(stacks.gate, stacks.up, stacks.n_ff, stacks.gate_rows, stacks, routing)
        gate.up_offset = stacks.up_offset
        down = _expert_params(stacks.down, stacks.down, stacks.n_embd, stacks.n_embd, stacks, routing)
        _give(gate, rows.quantized, rows.f32)
        if stacks.down.is_float:
            hidden = self._arena.take(n_pairs, stacks.n_ff)
            gate.out = hidden.address
            _give(down, None, hidden)
        else:
            quantized = self._matmul.take_quantized(n_pairs, stacks.n_ff)
            gate.next = quantized.argument
            _give(down, quantized, None)
        name, threads = gate_up_name(stacks.gate.type, stacks.up.type, nbytes)
        tiles = -(-stacks.n_ff // GATE_ROWS)
        self._launch("experts_gemv.cu", name, (n_pairs * tiles, 1, 1), threads, gate)
        down.out = x.address
        down.shared = routing.shared.address if routing.shared else 0
        down.shared_gate = routing.shared_gate.address if routing.shared_gate else 0
        chunks = stacks.n_used * (stacks.n_ff // CHUNK[stacks.down.type])
        blocks = x.rows * -(-stacks.n_embd // down_rows(stacks.down.type))
        threads = max(32, group_threads(chunks))
        self._launch("experts_gemv.cu", down_name(stacks.down.type, nbytes), (blocks, 1, 1), threads, down)

    # ---- many rows -------------------------------------------------------------------------------

    def _grouped(self, x: DeviceArray, rows: Rows, stacks: Stacks, routing: Routing) -> None:
        """Slices of rows in turn; what a slice needs is taken once, for the largest."""
        assert rows.bf16 is not None
        n = min(x.rows, SLICE)
        n_pairs = n * stacks.n_used
        order = self._arena.take(1, n_pairs, "i32")
        tiles = self._arena.take(most_tiles(n_pairs, stacks.n_experts, TILES[0]), 4, "i32")
        hidden = self._arena.take(n_pairs, stacks.n_ff, "bf16")
        y = self._arena.take(n_pairs, stacks.n_embd, "bf16")
        fused = x.rows <= FUSED_GROUPING and stacks.n_experts <= MAX_FUSED_EXPERTS
        if not fused:
            self._route(self._route_params(stacks, routing))
        for first in range(0, x.rows, SLICE):
            part = _slice_of(routing, first, min(SLICE, x.rows - first))
            n_rows = part.ids.rows
            params = self._route_params(stacks, part)
            tile = self._tile(stacks, n_rows)
            params.order, params.tiles, params.log_tile = order.address, tiles.address, tile.bit_length() - 1
            params.n_tiles = most_tiles(n_rows * stacks.n_used, stacks.n_experts, tile)
            if fused:
                self._route(params, group=True)
            else:
                self._launch("experts_route.cu", "group<1024>", (1, 1, 1), MAX_EXPERTS, params)
            x_slice = _rows_from(rows.bf16, first, n_rows)
            self._multiply_tiles(stacks, params, tile, x_slice.address, hidden.address, gated=True)
            self._multiply_tiles(stacks, params, tile, hidden.address, y.address, gated=False)
            self._combine(_rows_from(x, first, n_rows), y, stacks, part)

    def _tile(self, stacks: Stacks, n_rows: int) -> int:
        types = frozenset((stacks.gate.type, stacks.up.type, stacks.down.type))
        return self.options.tile or tile_of(n_rows, stacks.n_used, stacks.n_experts, types)

    def _multiply_tiles(
        self, stacks: Stacks, routing: RouteParams, tile: int, x: int, out: int, *, gated: bool
    ) -> None:
        first, second = (stacks.gate, stacks.up) if gated else (stacks.down, stacks.down)
        rows, results = (stacks.n_ff, TILE_ROWS // 2) if gated else (stacks.n_embd, TILE_ROWS)
        params = TileParams(
            _planes(first), _planes(second), x, routing.order, routing.tiles, out, first.n_in, rows
        )
        params.rows_an_expert, params.up_offset = rows, 0
        if gated:
            params.rows_an_expert, params.up_offset = stacks.gate_rows, stacks.up_offset
        params.n_used = stacks.n_used
        name = tiles_name(first.type, second.type, tile, gated=gated)
        grid = (-(-rows // results), routing.n_tiles, 1)
        self._launch("experts_tiles.cu", name, grid, 256, params, shared=tiles_shared(tile))

    def _combine(self, x: DeviceArray, y: DeviceArray, stacks: Stacks, routing: Routing) -> None:
        params = CombineParams(x.address, y.address, routing.weights.address)
        params.n_used, params.columns = stacks.n_used, stacks.n_embd
        params.shared = routing.shared.address if routing.shared else 0
        params.shared_gate = routing.shared_gate.address if routing.shared_gate else 0
        grid = (-(-stacks.n_embd // 2048), x.rows, 1)
        name = f"combine<{str(routing.shared is not None).lower()}>"
        self._launch("experts_route.cu", name, grid, 256, params)

    # ---- single launches -------------------------------------------------------------------------

    def _route_params(self, stacks: Stacks, routing: Routing) -> RouteParams:
        ids, weights = routing.ids.address, routing.weights.address
        params = RouteParams(routing.logits.address, ids, weights, scale=routing.scale)
        params.n_tokens, params.n_experts, params.n_used = routing.ids.rows, stacks.n_experts, stacks.n_used
        return params

    def _route(self, params: RouteParams, *, group: bool = False) -> None:
        name = f"route<{experts_a_lane(params.n_experts)}, {str(group).lower()}>"
        blocks, threads = (1, MAX_EXPERTS) if group else (-(-params.n_tokens // 4), 128)
        self._launch("experts_route.cu", name, (blocks, 1, 1), threads, params)

    def _launch(
        self,
        source: str,
        name: str,
        grid: tuple[int, int, int],
        block: int,
        params: ctypes.Structure,
        *,
        shared: int = 0,
    ) -> None:
        if not self._matmul.is_live:
            return
        kernel = self._kernels.get((name, shared))
        if kernel is None:
            kernel = self._store.kernel(source, name, (type(params),), shared=shared)
            self._kernels[name, shared] = kernel
        kernel(grid, block, params, stream=self._stream)


def _shared_parts(experts: Experts) -> tuple[Linear, Linear, Linear] | None:
    gate, up, down = experts.shared_gate, experts.shared_up, experts.shared_down
    return None if gate is None or up is None or down is None else (gate, up, down)


def _form(matrix: DeviceMatrix) -> Form:
    return Form.F32 if matrix.is_float else Form.QUANTIZED


def _planes(matrix: DeviceMatrix) -> Any:
    return (ctypes.c_uint64 * 4)(*matrix.planes)


def _expert_params(
    first: DeviceMatrix,
    second: DeviceMatrix,
    rows: int,
    rows_an_expert: int,
    stacks: Stacks,
    routing: Routing,
) -> ExpertParams:
    params = ExpertParams(_planes(first), _planes(second), K=first.n_in, rows=rows, n_used=stacks.n_used)
    params.rows_an_expert = rows_an_expert
    params.ids, params.weights = routing.ids.address, routing.weights.address
    return params


def _give(params: ExpertParams, quantized: QuantizedRows | None, f32: DeviceArray | None) -> None:
    if quantized is not None:
        params.x = quantized.argument
    if f32 is not None:
        params.x_float = f32.address


def _rows_from(array: DeviceArray, first: int, n_rows: int) -> DeviceArray:
    one = DeviceArray(0, 1, array.row_stride, array.dtype).nbytes
    return DeviceArray(array.address + first * one, n_rows, array.columns, array.dtype, array.stride)


def _slice_of(routing: Routing, first: int, n_rows: int) -> Routing:
    def cut(array: DeviceArray | None) -> DeviceArray | None:
        return None if array is None else _rows_from(array, first, n_rows)

    return Routing(
        _rows_from(routing.logits, first, n_rows),
        _rows_from(routing.ids, first, n_rows),
        _rows_from(routing.weights, first, n_rows),
        routing.scale,
        cut(routing.shared),
        cut(routing.shared_gate),
    )
