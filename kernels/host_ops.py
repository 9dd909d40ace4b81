"""The operators in numpy over prepared weights (`host_weights.py`). One thread computes."""

from collections.abc import Sequence

import numpy as np

from streamer.kernels.attention import attention_reference
from streamer.kernels.embed import embed_reference
from streamer.kernels.experts import experts_reference, route_reference
from streamer.kernels.feed_forward import gated_reference, sigmoid_reference, silu_reference
from streamer.kernels.gated_delta import (
    causal_conv_reference,
    decay_reference,
    delta_rule_chunked_reference,
    delta_rule_recurrent_reference,
    l2_norm_reference,
)
from streamer.kernels.host_batch import HostBatch, SpanView, for_each_span, sequence_view
from streamer.kernels.host_threads import HostProducts
from streamer.kernels.host_weights import Product, RawTable, Rows, product_of
from streamer.kernels.matmul import read_rows
from streamer.kernels.norm import rms_norm_reference
from streamer.kernels.ops import (
    Activation,
    CacheStorage,
    Experts,
    Float32s,
    GatedDelta,
    Linear,
    Norm,
    Rope,
    Weight,
)
from streamer.kernels.rope import Complex64s, inverse_frequencies, rope_reference, rotations

PIECE_ROWS = 64  # of a prompt's attention, computed by one thread
FEW_ROWS = 8  # up to here the delta rule goes token by token; chunks cost more to set up


class HostOps:
    """`Ops` over numpy arrays (n_rows, ..) float32. `begin` sets the batch the operators then work on."""

    def __init__(self, cache: CacheStorage, products: HostProducts) -> None:
        self._cache, self._products = cache, products
        self._page_size = cache.layout.page_size
        layers = [kv.layer for kv in cache.layout.kv]
        self._keys = {layer: cache.keys(layer).transpose(1, 0, 2, 3) for layer in layers}
        self._values = {layer: cache.values(layer).transpose(1, 0, 2, 3) for layer in layers}
        self._joined: dict[tuple[str, int], Product | None] = {}  # by first weight and number of projections
        self._conv_weights: dict[str, Float32s] = {}
        self._inverse: dict[int, tuple[Rope, np.ndarray]] = {}  # by identity: layers share their Rope
        self._turns: dict[int, Complex64s] = {}
        self._batch: HostBatch

    def begin(self, batch: HostBatch) -> None:
        self._batch = batch
        self._turns.clear()

    # ---- embedding and head --------------------------------------------------------------------------------

    def embed(self, table: Weight, *, scale: float = 1.0) -> Float32s:
        ids = self._batch.ids
        if isinstance(table.handle, RawTable):
            x = embed_reference(table.handle.data, table.type, table.shape, ids)
        else:
            x = read_rows(table.handle.blocks, ids + table.handle.first_row)
        if scale != 1.0:
            x *= np.float32(scale)
        return x

    def head(self, x: Float32s, norm: Norm, output: Linear, *, softcap: float | None = None) -> Float32s:
        batch = self._batch.batch
        h = self._norm(x[batch.logit_rows], norm)
        if batch.want_hidden or not len(h):
            return h
        logits = self._project(h, (output,))
        if softcap is not None:
            logits /= np.float32(softcap)
            np.tanh(logits, out=logits)
            logits *= np.float32(softcap)
        return logits

    # ---- projections ---------------------------------------------------------------------------------------

    def norm_project(self, x: Float32s, norm: Norm, projections: Sequence[Linear]) -> tuple[Float32s, ...]:
        y = self._project(self._norm(x, norm), projections)
        return self.split(y, [linear.n_out for linear in projections])

    def split(self, x: Float32s, widths: Sequence[int]) -> tuple[Float32s, ...]:
        if len(widths) == 1:
            return (x,)
        parts, start = [], 0
        for width in widths:
            parts.append(x[:, start : start + width])
            start += width
        return tuple(parts)

    def project_add(
        self, a: Float32s, projection: Linear, residual: Float32s, *, post_norm: Norm | None = None
    ) -> Float32s:
        y = self._project(a, (projection,))
        if post_norm is not None:
            y = self._norm(y, post_norm)
        y += residual
        return y

    def _norm(self, x: Float32s, norm: Norm) -> Float32s:
        return rms_norm_reference(x, norm.weight.handle, norm.epsilon)

    def _project(self, h: Float32s, projections: Sequence[Linear]) -> Float32s:
        """(n_rows, sum of n_out): one product where the weights lie under each other."""
        key = (projections[0].weight.name, len(projections))
        if key not in self._joined:
            self._joined[key] = product_of(projections)
        product = self._joined[key]
        if product is None:
            return np.concatenate([self._project(h, (linear,)) for linear in projections], axis=1)
        y = self._products.multiply(h, product.blocks)[:, product.columns]
        if product.bias is not None:
            y += product.bias
        return y

    # ---- attention -----------------------------------------------------------------------------------------

    def rope_cache_write(
        self,
        q: Float32s,
        k: Float32s,
        v: Float32s,
        *,
        layer: int,
        n_heads: int,
        rope: Rope,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        gated_query: bool = False,
    ) -> tuple[Float32s, Float32s | None]:
        keys, values = self._keys[layer], self._values[layer]  # (n_kv_heads, n_pages, page_size, length)
        n_rows, n_kv_heads = len(q), len(keys)
        q, gate = q.reshape(n_rows, n_heads, -1), None
        if gated_query:
            gate = q[..., keys.shape[-1] :]
            q = q[..., : keys.shape[-1]]
        k = k.reshape(n_rows, n_kv_heads, -1)
        if q_norm is not None:
            q = self._norm(q, q_norm)
        if k_norm is not None:
            k = self._norm(k, k_norm)
        turn = self._turn(rope)
        q, k = rope_reference(q, turn, rope.pairing), rope_reference(k, turn, rope.pairing)
        self._write(keys, k)
        self._write(values, v.reshape(n_rows, n_kv_heads, -1))
        return q, gate

    def _turn(self, rope: Rope) -> Complex64s:
        """(n_rows, n_rot / 2): worked out once a step for all layers that share the rotation."""
        key = id(rope)
        if key not in self._turns:
            if key not in self._inverse:
                factors = rope.factors.handle if rope.factors is not None else None
                self._inverse[key] = (rope, inverse_frequencies(rope, factors))
            positions = self._batch.batch.positions
            self._turns[key] = rotations(positions, self._inverse[key][1], rope.attention_factor)
        return self._turns[key]

    def _write(self, pages: Float32s, rows: Float32s) -> None:
        """rows (n_rows, n_kv_heads, length) into their places."""
        flat = pages.reshape(pages.shape[0], -1, pages.shape[-1])  # a view: pages of a head are contiguous
        places = self._batch.places
        flat[:, places] = rows[0] if isinstance(places, int) else rows.transpose(1, 0, 2)

    def attention(
        self,
        q: Float32s,
        *,
        layer: int,
        n_heads: int,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        gate: Float32s | None = None,
    ) -> Float32s:
        out = np.empty((len(q), n_heads * self._values[layer].shape[-1]), np.float32)
        for view in self._batch.spans:
            self._attend(q, out, view, layer, scale, sliding_window, softcap)
        if gate is not None:
            out *= sigmoid_reference(gate).reshape(out.shape)
        return out

    def _attend(
        self,
        q: Float32s,
        out: Float32s,
        view: SpanView,
        layer: int,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> None:
        """One sequence's rows of `out`; a long prompt's are cut among the team."""
        keys, first = sequence_view(self._keys[layer], view, self._page_size, sliding_window)
        values, _ = sequence_view(self._values[layer], view, self._page_size, sliding_window)
        begin, end = view.rows.start, view.rows.stop

        def attend(piece: int) -> None:
            start = begin + piece * PIECE_ROWS
            stop = min(start + PIECE_ROWS, end)
            visible = keys.shape[1] - (end - stop)
            out[start:stop] = attention_reference(
                q[start:stop],
                keys[:, :visible],
                values[:, :visible],
                scale=scale,
                first_key=first,
                sliding_window=sliding_window,
                softcap=softcap,
            )

        if end - begin <= PIECE_ROWS:
            attend(0)
        else:
            self._products.team.run(-(-(end - begin) // PIECE_ROWS), attend)

    # ---- feed-forwards -------------------------------------------------------------------------------------

    def gated_feed_forward(
        self,
        x: Float32s,
        norm: Norm,
        gate: Linear,
        up: Linear,
        down: Linear,
        *,
        activation: Activation,
        post_norm: Norm | None = None,
    ) -> Float32s:
        a = self._gated(self._norm(x, norm), gate, up, activation)
        return self.project_add(a, down, x, post_norm=post_norm)

    def _gated(self, h: Float32s, gate: Linear, up: Linear, activation: Activation) -> Float32s:
        g, u = self.split(self._project(h, (gate, up)), (gate.n_out, up.n_out))
        return gated_reference(g, u, activation)

    def routed_experts(self, x: Float32s, norm: Norm, experts: Experts) -> Float32s:
        h = self._norm(x, norm)
        chosen, weights = route_reference(
            self._project(h, (experts.router,)), experts.n_used, experts.weight_scale
        )
        out = experts_reference(h, chosen, weights, lambda e, rows: self._expert(experts, e, rows))
        shared = self._shared_expert(h, experts)
        if shared is not None:
            out += shared
        out += x
        return out

    def _expert(self, experts: Experts, e: int, rows: Float32s) -> Float32s:
        """One expert's SwiGLU: (n_rows, n_embd)."""
        if experts.gate_up is not None:
            both = self._expert_product(rows, experts.gate_up, e)
            half = both.shape[1] // 2
            gate, up = both[:, :half], both[:, half:]
        else:
            assert experts.gate is not None
            assert experts.up is not None
            gate = self._expert_product(rows, experts.gate, e)
            up = self._expert_product(rows, experts.up, e)
        return self._expert_product(gated_reference(gate, up, Activation.SILU), experts.down, e)

    def _expert_product(self, rows: Float32s, stack: Weight, e: int) -> Float32s:
        return self._products.multiply(rows, stack.handle.blocks[e])[:, : stack.handle.n_out]

    def _shared_expert(self, h: Float32s, experts: Experts) -> Float32s | None:
        gate, up, down = experts.shared_gate, experts.shared_up, experts.shared_down
        if gate is None or up is None or down is None:
            return None
        y = self._project(self._gated(h, gate, up, Activation.SILU), (down,))
        if experts.shared_router is not None:
            y *= sigmoid_reference(h @ _vector(experts.shared_router)[:, None])
        return y

    # ---- gated delta net -----------------------------------------------------------------------------------

    def gated_delta(self, x: Float32s, mixer: GatedDelta, *, layer: int) -> Float32s:
        u, z, alpha, beta = self.norm_project(x, mixer.norm, (mixer.qkv, mixer.gate, mixer.alpha, mixer.beta))
        log_decay = decay_reference(alpha, mixer.dt_bias.handle, mixer.a.handle)
        beta = sigmoid_reference(beta)
        conv_weight = self._conv_weight(mixer.conv)
        conv, delta = self._cache.conv_state(layer), self._cache.delta_state(layer)

        def mix(view: SpanView) -> Float32s:
            slot, rows = view.span.slot, view.rows
            mixed, conv[slot] = causal_conv_reference(u[rows], conv[slot], conv_weight)
            q, k, v = _delta_heads(mixed, mixer)
            rule = (
                delta_rule_recurrent_reference
                if view.span.n_rows <= FEW_ROWS
                else delta_rule_chunked_reference
            )
            out, delta[slot] = rule(q, k, v, log_decay[rows], beta[rows], delta[slot])
            return out

        o = self._norm(for_each_span(self._batch, mix), mixer.out_norm)  # (n_rows, n_v_heads, v_dim)
        y = o.reshape(len(x), -1)
        y *= silu_reference(z)
        return self.project_add(y, mixer.out, x)

    def _conv_weight(self, conv: Weight) -> Float32s:
        """(conv_width, channels), out of its blocks once."""
        if conv.name not in self._conv_weights:
            rows: Rows = conv.handle
            channels = read_rows(rows.blocks, rows.first_row + np.arange(rows.n_out))
            self._conv_weights[conv.name] = np.ascontiguousarray(channels.T)
        return self._conv_weights[conv.name]


def _vector(weight: Weight) -> Float32s:
    """(n_in,) of a weight with shape [n_in] or [n_in, 1]."""
    if isinstance(weight.handle, Rows):
        return read_rows(weight.handle.blocks, np.array([weight.handle.first_row])).reshape(-1)
    vector: Float32s = weight.handle
    return vector


def _delta_heads(mixed: Float32s, mixer: GatedDelta) -> tuple[Float32s, Float32s, Float32s]:
    """q, k (n_rows, n_v_heads, k_dim), normed, q scaled; v (n_rows, n_v_heads, v_dim)."""
    n, width = len(mixed), mixer.n_k_heads * mixer.k_dim
    repeat = mixer.n_v_heads // mixer.n_k_heads  # tiled: value head h uses key head h % n_k_heads
    epsilon = mixer.norm.epsilon
    q = l2_norm_reference(mixed[:, :width].reshape(n, mixer.n_k_heads, mixer.k_dim), epsilon)
    k = l2_norm_reference(mixed[:, width : 2 * width].reshape(n, mixer.n_k_heads, mixer.k_dim), epsilon)
    q *= np.float32(mixer.k_dim**-0.5)
    v = mixed[:, 2 * width :].reshape(n, mixer.n_v_heads, mixer.v_dim)
    return np.tile(q, (1, repeat, 1)), np.tile(k, (1, repeat, 1)), v
