"""The operators on CUDA: each queues a few kernels on one stream; nothing here allocates or waits.

The residual stream x lives in one buffer, updated in place; everything else of a sublayer comes from an
arena that the next sublayer takes over. Eagerly or while a graph is captured, the calls are the same.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from streamer.kernels.cuda_array import Arena, DeviceArray
from streamer.kernels.cuda_attention import CudaAttention
from streamer.kernels.cuda_delta import CudaDelta
from streamer.kernels.cuda_limits import LOGIT_ROWS, StepShape
from streamer.kernels.cuda_sample import CudaSampler, ResultLayout
from streamer.kernels.ops import Activation, Experts, GatedDelta, Linear, Norm, Rope, Weight


class Products(Protocol):
    """The matrix side (cuda_matmul.py): norms, projections, feed-forwards; arrays from the arena."""

    def begin(self, arena: Arena, *, stream: int) -> None: ...
    def embed(self, table: Weight, ids: int, out: DeviceArray, *, scale: float) -> None: ...
    def norm(self, x: DeviceArray, norm: Norm, out: DeviceArray) -> None: ...
    def norm_project(
        self, x: DeviceArray, norm: Norm, projections: Sequence[Linear]
    ) -> tuple[DeviceArray, ...]: ...
    def project_add(
        self, a: DeviceArray, projection: Linear, residual: DeviceArray, *, post_norm: Norm | None
    ) -> DeviceArray: ...
    def gated_feed_forward(
        self, x: DeviceArray, norm: Norm, gate: Linear, up: Linear, down: Linear, *, activation: Activation,
        post_norm: Norm | None,
    ) -> DeviceArray: ...  # fmt: skip
    def head(self, x: DeviceArray, norm: Norm, output: Linear, logits: DeviceArray) -> None: ...


class RoutedProducts(Protocol):
    """Mixtures of experts (cuda_experts.py); arrays from the same arena."""

    def begin(self, arena: Arena, *, stream: int) -> None: ...
    def routed_experts(self, x: DeviceArray, norm: Norm, experts: Experts) -> DeviceArray: ...


class Places(Protocol):
    """Fixed device addresses of an executor's buffers."""

    @property
    def residual(self) -> int: ...  # (max_rows, n_embd) f32
    @property
    def last_ids(self) -> int: ...  # (n_slots,) int32
    @property
    def resolved_ids(self) -> int: ...  # (max_rows,) int32
    @property
    def results(self) -> int: ...  # ResultLayout
    @property
    def hidden(self) -> int: ...  # (LOGIT_ROWS, n_embd) f32: rows gathered for the head


class CudaOps:
    """`Ops` over device addresses. `begin` sets the step that every operator then works on."""

    def __init__(
        self,
        products: Products,
        experts: RoutedProducts,
        attention: CudaAttention,
        delta: CudaDelta | None,
        sampler: CudaSampler,
        places: Places,
        arena: Arena,
        frequency_table: Callable[[Rope], int],
    ) -> None:
        """`frequency_table` gives the address of a rotation's table."""
        self._products, self._experts = products, experts
        self._attention, self._delta, self._sampler = attention, delta, sampler
        self._places, self._arena, self._frequency_table = places, arena, frequency_table
        self._step: StepShape
        self._results: ResultLayout
        self._stream = 0

    def begin(self, step: StepShape, results: ResultLayout, *, stream: int) -> None:
        self._step, self._results, self._stream = step, results, stream
        self._arena.reset()
        self._products.begin(self._arena, stream=stream)
        self._experts.begin(self._arena, stream=stream)

    # ---- embedding and head ----------------------------------------------------------------------

    def embed(self, table: Weight, *, scale: float = 1.0) -> DeviceArray:
        n_rows, places = self._step.n_rows, self._places
        self._sampler.resolve(self._step, places.last_ids, places.resolved_ids, stream=self._stream)
        x = DeviceArray(places.residual, n_rows, table.shape[0])
        self._products.embed(table, places.resolved_ids, x, scale=scale)
        return x

    def head(
        self, x: DeviceArray, norm: Norm, output: Linear, *, softcap: float | None = None
    ) -> DeviceArray:
        """Logits and samples, LOGIT_ROWS rows at a time; or the hidden states of all wanted rows."""
        step = self._step
        if step.want_hidden:
            return self._hidden(x, norm)
        every_row = step.n_logits == step.n_rows and step.n_rows <= LOGIT_ROWS
        logits = self._sampler.logits(min(step.n_logits, LOGIT_ROWS))
        for first in range(0, step.n_logits, LOGIT_ROWS):
            n = min(LOGIT_ROWS, step.n_logits - first)
            self._arena.reset()
            rows = x
            if not every_row:
                rows = DeviceArray(self._places.hidden, n, x.columns)
                self._sampler.gather(x, step.table("logit_rows", first), rows, stream=self._stream)
            logits = self._sampler.logits(n)
            self._products.head(rows, norm, output, logits)
            if softcap is not None:
                self._sampler.softcap(n, softcap, stream=self._stream)
            self._sampler.sample(
                step,
                first,
                n,
                self._places.last_ids,
                self._places.results,
                self._results,
                stream=self._stream,
            )
            if step.n_top:
                self._sampler.top(
                    first, n, step.n_top, self._places.results, self._results, stream=self._stream
                )
        return logits

    def top(self, n: int, n_top: int, results: ResultLayout, *, stream: int) -> None:
        """After a replayed step of n logit rows: its most likely ids, which graphs leave out."""
        self._sampler.top(0, n, n_top, self._places.results, results, stream=stream)

    def _hidden(self, x: DeviceArray, norm: Norm) -> DeviceArray:
        """Normed hidden states of the wanted rows, from the arena."""
        self._arena.reset()
        rows = self._arena.take(self._step.n_logits, x.columns)
        self._sampler.gather(x, self._step.table("logit_rows"), rows, stream=self._stream)
        out = self._arena.take(self._step.n_logits, x.columns)
        self._products.norm(rows, norm, out)
        return out

    # ---- projections and feed-forwards -----------------------------------------------------------

    def norm_project(
        self, x: DeviceArray, norm: Norm, projections: Sequence[Linear]
    ) -> tuple[DeviceArray, ...]:
        self._arena.reset()
        return self._products.norm_project(x, norm, projections)

    def split(self, x: DeviceArray, widths: Sequence[int]) -> tuple[DeviceArray, ...]:
        starts = np.cumsum([0, *widths])
        return tuple(x.columns_from(int(at), width) for at, width in zip(starts[:-1], widths, strict=True))

    def project_add(
        self, a: DeviceArray, projection: Linear, residual: DeviceArray, *, post_norm: Norm | None = None
    ) -> DeviceArray:
        return self._products.project_add(a, projection, residual, post_norm=post_norm)

    def gated_feed_forward(
        self,
        x: DeviceArray,
        norm: Norm,
        gate: Linear,
        up: Linear,
        down: Linear,
        *,
        activation: Activation,
        post_norm: Norm | None = None,
    ) -> DeviceArray:
        self._arena.reset()
        return self._products.gated_feed_forward(
            x, norm, gate, up, down, activation=activation, post_norm=post_norm
        )

    def routed_experts(self, x: DeviceArray, norm: Norm, experts: Experts) -> DeviceArray:
        self._arena.reset()
        return self._experts.routed_experts(x, norm, experts)

    # ---- attention -------------------------------------------------------------------------------

    def rope_cache_write(
        self,
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        *,
        layer: int,
        n_heads: int,
        rope: Rope,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        gated_query: bool = False,
    ) -> tuple[DeviceArray, DeviceArray | None]:
        columns = n_heads * self._attention.kv(layer).key_length
        q_out = self._arena.take(q.rows, columns)
        gate = self._arena.take(q.rows, columns) if gated_query else None
        self._attention.write(
            q,
            k,
            v,
            q_out,
            gate,
            layer=layer,
            n_heads=n_heads,
            pairing=rope.pairing,
            n_rot=rope.n_rot,
            inverse_frequency=self._frequency_table(rope),
            attention_factor=rope.attention_factor,
            norms=(*_address_and_epsilon(q_norm), *_address_and_epsilon(k_norm)),
            step=self._step,
            stream=self._stream,
        )
        return q_out, gate

    def attention(
        self,
        q: DeviceArray,
        *,
        layer: int,
        n_heads: int,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        gate: DeviceArray | None = None,
    ) -> DeviceArray:
        out = self._arena.take(q.rows, n_heads * self._attention.kv(layer).value_length)
        self._attention.attend(
            q,
            out,
            gate,
            layer=layer,
            n_heads=n_heads,
            scale=scale,
            softcap=softcap or 0.0,
            sliding_window=sliding_window or 0,
            step=self._step,
            stream=self._stream,
        )
        return out

    # ---- gated delta net -------------------------------------------------------------------------

    def gated_delta(self, x: DeviceArray, mixer: GatedDelta, *, layer: int) -> DeviceArray:
        assert self._delta is not None
        u, z, alpha, beta = self.norm_project(x, mixer.norm, (mixer.qkv, mixer.gate, mixer.alpha, mixer.beta))
        mixed = self._arena.take(u.rows, u.columns)
        out = self._arena.take(u.rows, z.columns)
        step, stream = self._step, self._stream
        self._delta.convolve(
            u, mixed, layer=layer, weight=mixer.conv.handle.address, step=step, stream=stream
        )
        self._delta.step(
            mixed,
            alpha,
            beta,
            out,
            layer=layer,
            n_k_heads=mixer.n_k_heads,
            dt_bias=mixer.dt_bias.handle.address,
            a=mixer.a.handle.address,
            epsilon=mixer.norm.epsilon,
            step=step,
            stream=stream,
        )
        norm = mixer.out_norm
        self._delta.gate(
            out,
            z,
            layer=layer,
            weight=norm.weight.handle.address,
            epsilon=norm.epsilon,
            step=step,
            stream=stream,
        )
        return self._products.project_add(out, mixer.out, x, post_norm=None)


def _address_and_epsilon(norm: Norm | None) -> tuple[int, float]:
    return (norm.weight.handle.address, norm.epsilon) if norm is not None else (0, 0.0)
