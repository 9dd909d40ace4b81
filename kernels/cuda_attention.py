"""Launchers of rope.cu, attention_decode.cu and attention_prefill.cu, over a cache's pages."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.cuda_limits import Limits, StepShape
from streamer.kernels.launch import Kernel, KernelSource
from streamer.kernels.ops import CacheLayout, CacheStorage, KVLayer, RopePairing

T = {"bf16": "__nv_bfloat16", "f16": "__half"}
MAX_GROUP = 8  # query heads a decode block serves; more are split into parts
MAX_SPLITS = 32
WARPS = 4
DECODE_WARPS = 8
_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


@dataclass(frozen=True)
class HeadShape:
    """What decides a kernel instance: heads of one layer."""

    n_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def parts(self) -> int:
        """Blocks a kv head's group is split over."""
        group = self.n_heads // self.n_kv_heads
        return next(p for p in range(1, group + 1) if group % p == 0 and group // p <= MAX_GROUP)

    @property
    def group(self) -> int:
        return self.n_heads // self.n_kv_heads // self.parts

    @property
    def lanes(self) -> int:
        return next(x for x in (2, 4, 8, 16, 32) if 8 * x >= self.head_dim)

    @property
    def padded_dim(self) -> int:
        return -(-self.head_dim // 16) * 16

    @property
    def tile_tokens(self) -> int:
        return 32 if self.padded_dim > 128 else 64

    def decode_name(self, element: str) -> str:
        return f"attention_decode<{T[element]}, {self.lanes}, {self.group}>"

    def prefill_name(self, element: str) -> str:
        return f"attention_prefill<{T[element]}, {self.padded_dim}, {self.tile_tokens}>"

    @property
    def prefill_shared(self) -> int:
        return 2 * (64 + 2 * self.tile_tokens) * (self.padded_dim + 8)

    def splits(self, rows: int, multiprocessors: int) -> int:
        """Enough blocks for two waves, no more."""
        blocks = self.n_kv_heads * self.parts * rows
        return max(1, min(MAX_SPLITS, -(-2 * multiprocessors // blocks)))

    def scratch_nbytes(self, rows: int, multiprocessors: int) -> int:
        """Partial results of split rows, for the widest split of any row count up to `rows`."""
        cells = max(r * self.splits(r, multiprocessors) for r in range(1, rows + 1))
        return 4 * cells * self.n_heads * (self.head_dim + 2)


def attention_scratch(
    layout: CacheLayout, n_heads: Mapping[int, int], limits: Limits, multiprocessors: int
) -> tuple[int, int]:
    """(partial results, counters) in bytes, used by all layers in turn. `n_heads` by layer."""
    shapes = {HeadShape(n_heads[kv.layer], kv.n_kv_heads, kv.key_length) for kv in layout.kv}
    rows = limits.max_sequences
    partial = max((s.scratch_nbytes(rows, multiprocessors) for s in shapes), default=0)
    counters = max((4 * rows * s.n_kv_heads * s.parts for s in shapes), default=0)
    return partial, counters


class CudaAttention:
    """Writes and reads one cache. Launches only; everything it touches was allocated before."""

    def __init__(
        self, store: KernelSource, cache: CacheStorage, *, partial: int, counters: int, multiprocessors: int
    ) -> None:
        """`partial`, `counters`: device addresses of scratch (`attention_scratch`), counters zero."""
        self._store, self._cache = store, cache
        self._partial, self._counters, self._multiprocessors = partial, counters, multiprocessors
        self._layers = {kv.layer: kv for kv in cache.layout.kv}
        self.head_counts: dict[int, int] = {}  # query heads by layer, as the model calls
        self._rope = store.kernel(
            "rope.cu",
            f"rope_cache_write<{T[cache.element_type]}>",
            [_P] * 7 + [_P] * 6 + [_I] * 8 + [_F] * 3 + [_I] * 2,
        )
        self._decode: dict[HeadShape, Kernel] = {}
        self._prefill: dict[HeadShape, Kernel] = {}

    def kv(self, layer: int) -> KVLayer:
        return self._layers[layer]

    def write(
        self,
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        q_out: DeviceArray,
        gate_out: DeviceArray | None,
        *,
        layer: int,
        n_heads: int,
        pairing: RopePairing,
        n_rot: int,
        inverse_frequency: int,
        attention_factor: float,
        norms: tuple[int, float, int, float],
        step: StepShape,
        stream: int,
    ) -> None:
        """`norms`: address (0: none) and epsilon of the q norm, then of the k norm."""
        kv = self._layers[layer]
        self.head_counts[layer] = n_heads
        q_norm, q_epsilon, k_norm, k_epsilon = norms
        heads = n_heads + 2 * kv.n_kv_heads
        self._rope(
            (step.n_rows, -(-heads // WARPS), 1), 32 * WARPS,
            q.address, k.address, v.address, q_out.address, gate_out.address if gate_out else 0,
            self._cache.keys(layer), self._cache.values(layer), q_norm, k_norm, inverse_frequency,
            step.table("page_table"), step.table("row_span"), step.table("positions"),
            q.row_stride, k.row_stride, v.row_stride, n_heads, kv.n_kv_heads, kv.key_length, n_rot,
            int(pairing is RopePairing.NEOX), attention_factor, q_epsilon, k_epsilon,
            self._cache.layout.page_size, step.layout.shape.max_pages,
            stream=stream,
        )  # fmt: skip

    def attend(
        self,
        q: DeviceArray,
        out: DeviceArray,
        gate: DeviceArray | None,
        *,
        layer: int,
        n_heads: int,
        scale: float,
        softcap: float,
        sliding_window: int,
        step: StepShape,
        stream: int,
    ) -> None:
        """Single rows through the split decode kernel, longer spans through tiles."""
        kv = self._layers[layer]
        shape = HeadShape(n_heads, kv.n_kv_heads, kv.key_length)
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        gate_address, table = gate.address if gate else 0, step.table("page_table")
        page_size, max_pages = self._cache.layout.page_size, step.layout.shape.max_pages
        if step.n_decode:
            splits = shape.splits(step.n_decode, self._multiprocessors)
            self._decode_kernel(shape)(
                (kv.n_kv_heads * shape.parts, splits, step.n_decode), 32 * DECODE_WARPS,
                q.address, out.address, gate_address, keys, values, table, step.table("decode_rows"),
                step.table("row_span"), step.table("positions"), self._partial, self._counters, shape.parts,
                kv.key_length, page_size, max_pages, scale, softcap, sliding_window,
                stream=stream,
            )  # fmt: skip
        if step.n_attention_tiles:
            self._prefill_kernel(shape)(
                (step.n_attention_tiles, n_heads, 1), 32 * WARPS,
                q.address, out.address, gate_address, keys, values, table, step.table("attention_tiles"),
                n_heads, kv.n_kv_heads, kv.key_length, page_size, max_pages, scale, softcap, sliding_window,
                stream=stream,
            )  # fmt: skip

    def _decode_kernel(self, shape: HeadShape) -> Kernel:
        if shape not in self._decode:
            self._decode[shape] = self._store.kernel(
                "attention_decode.cu",
                shape.decode_name(self._cache.element_type),
                [_P] * 11 + [_I] * 4 + [_F] * 2 + [_I],
                shared=4 * DECODE_WARPS * shape.group * (shape.head_dim + 2),
            )
        return self._decode[shape]

    def _prefill_kernel(self, shape: HeadShape) -> Kernel:
        if shape not in self._prefill:
            self._prefill[shape] = self._store.kernel(
                "attention_prefill.cu",
                shape.prefill_name(self._cache.element_type),
                [_P] * 7 + [_I] * 5 + [_F] * 2 + [_I],
                shared=shape.prefill_shared,
            )
        return self._prefill[shape]
