"""Launchers of gated_delta.cu: the mixer between its projections, over the cache's conv and delta state."""

import ctypes

from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.cuda_limits import StepShape
from streamer.kernels.launch import Kernel, KernelSource
from streamer.kernels.ops import CacheStorage, RecurrentLayer

COLUMNS = 16  # of the state, a block
_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


def check_recurrent(layer: RecurrentLayer) -> str | None:
    """Why the kernels cannot run this layer, or None."""
    if layer.k_dim % 32 or layer.k_dim > 256:
        return f"key dimension {layer.k_dim} is not a multiple of 32 up to 256"
    if layer.v_dim % COLUMNS:
        return f"value dimension {layer.v_dim} is not a multiple of {COLUMNS}"
    return None if layer.conv_width == 4 else f"convolution width {layer.conv_width} is not 4"


class CudaDelta:
    """Runs recurrent layers of one cache."""

    def __init__(self, store: KernelSource, cache: CacheStorage) -> None:
        self._cache = cache
        self._layers = {r.layer: r for r in cache.layout.recurrent}
        self._conv = store.kernel("gated_delta.cu", "conv_silu", [_P] * 5 + [_I] * 2)
        self._shift = store.kernel("gated_delta.cu", "conv_state_update", [_P] * 3 + [_I])
        self._norm = store.kernel("gated_delta.cu", "gated_norm", [_P] * 3 + [_I] * 3 + [_F])
        self._delta: dict[int, Kernel] = {
            vecs: store.kernel("gated_delta.cu", f"gated_delta<{vecs}>", [_P] * 8 + [_I] * 5 + [_F])
            for vecs in {r.k_dim // 32 for r in cache.layout.recurrent}
        }

    def convolve(
        self, u: DeviceArray, out: DeviceArray, *, layer: int, weight: int, step: StepShape, stream: int
    ) -> None:
        """out (n_rows, channels) = SiLU(conv(u)); the slots' conv state moves on."""
        r, state = self._layers[layer], self._cache.conv_state(layer)
        wide = -(-r.conv_channels // 256)
        self._conv(
            (wide, step.n_conv_tiles, 1), 256,
            u.address, weight, state, out.address, step.table("conv_tiles"), r.conv_channels,
            int(step.single_rows),
            stream=stream,
        )  # fmt: skip
        if not step.single_rows:
            spans = step.table("spans")
            self._shift((wide, step.n_spans, 1), 256, u.address, state, spans, r.conv_channels, stream=stream)

    def step(
        self,
        mixed: DeviceArray,
        alpha: DeviceArray,
        beta: DeviceArray,
        out: DeviceArray,
        *,
        layer: int,
        n_k_heads: int,
        dt_bias: int,
        a: int,
        epsilon: float,
        step: StepShape,
        stream: int,
    ) -> None:
        """The delta rule over every span; out (n_rows, n_v_heads * v_dim)."""
        r = self._layers[layer]
        self._delta[r.k_dim // 32](
            (r.n_v_heads, r.v_dim // COLUMNS, step.n_spans), 128,
            mixed.address, alpha.address, beta.address, dt_bias, a, self._cache.delta_state(layer),
            out.address,             step.table("spans"), n_k_heads, r.n_v_heads, r.v_dim,
            alpha.row_stride, beta.row_stride, epsilon,
            stream=stream,
        )  # fmt: skip

    def gate(
        self,
        o: DeviceArray,
        z: DeviceArray,
        *,
        layer: int,
        weight: int,
        epsilon: float,
        step: StepShape,
        stream: int,
    ) -> None:
        """o = RMS(o; weight, per head) * SiLU(z), in place."""
        r = self._layers[layer]
        self._norm(
            (step.n_rows, -(-r.n_v_heads // 4), 1), 128,
            o.address, z.address, weight, r.n_v_heads, r.v_dim, z.row_stride, epsilon,
            stream=stream,
        )  # fmt: skip
