"""Routed experts on CUDA against float64 over the dequantized weights.

Tolerances: few rows meet 16-bit activations or f32 (FEW); many rows are bf16 in every step (MANY).
Compared is what is added to the residual, so that the residual hides nothing.
"""

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from streamer.gguf.quants import QuantType
from streamer.kernels import cuda_experts
from streamer.kernels.cuda_array import Arena, DeviceArray
from streamer.kernels.cuda_experts import CudaExperts, ExpertOptions
from streamer.kernels.cuda_matmul import ResidentWeight
from streamer.kernels.experts import route_reference
from streamer.kernels.experts_arguments import (
    MAX_EXPERTS,
    TILES,
    RouteParams,
    experts_a_lane,
    most_tiles,
)
from streamer.kernels.launch import ModuleSpec
from streamer.kernels.matmul_arguments import FLOATS
from streamer.kernels.ops import Experts, Linear, Norm, Weight
from streamer.plan.layouts import PLANES
from streamer.plan.plan import Layout

pytestmark = pytest.mark.cuda
Q = QuantType
FEW, MANY = 1e-6, 5e-5
COUNT = itertools.count()  # `CudaMatmul` knows weights by name
NATIVE = (*PLANES, *sorted(FLOATS))


class Layer:
    """Experts with their values; a float64 reference of what they add to the residual."""

    def __init__(self, products, types, *, n_embd=512, n_ff=256, n_experts=16, n_used=4, scale=1.0,
                 merged=False, shared=None, router=None):  # fmt: skip
        """`types`: of gate, up, down. `shared`: (type, width of the shared expert, has a gate)."""
        self.p, self.n_used, self.scale = products, n_used, scale
        gate, up, down = types
        self.values = {}
        stack = (n_embd, n_ff, n_experts)
        both = self.weight("gate_up", gate, (n_embd, 2 * n_ff, n_experts)) if merged else None
        self.norm_values = np.random.default_rng(9).uniform(0.5, 2, n_embd).astype(np.float32)
        if router is None:
            router = np.random.default_rng(8).standard_normal((n_experts, n_embd)) * 0.1
        self.experts = Experts(
            Linear(self.floats("router", router, (n_embd, n_experts))),
            None if merged else self.weight("gate", gate, stack),
            None if merged else self.weight("up", up, stack),
            both,
            self.weight("down", down, (n_ff, n_embd, n_experts)),
            n_used,
            scale,
        )
        self.norm = Norm(self.floats("norm", self.norm_values, (n_embd,)), 1e-5)
        if shared is not None:
            type, width, gated = shared
            self.experts = dataclasses.replace(
                self.experts,
                shared_gate=Linear(self.weight("shared_gate", type, (n_embd, width))),
                shared_up=Linear(self.weight("shared_up", type, (n_embd, width))),
                shared_down=Linear(self.weight("shared_down", type, (width, n_embd))),
            )
            if gated:
                vector = np.random.default_rng(7).standard_normal((1, n_embd)) * 0.05
                shared_router = self.floats("shared_router", vector, (n_embd,))
                self.experts = dataclasses.replace(self.experts, shared_router=shared_router)

    def floats(self, name, values, shape):
        self.values[name] = values.astype(np.float32)
        return self.named(name, Q.F32, shape, self.p.put(self.values[name]), Layout.FILE)

    def weight(self, name, type, shape):
        n_in, n_out = shape[0], int(np.prod(shape[1:]))
        matrix, values = self.p.weight(type, n_out, n_in, len(self.values))
        self.values[name] = values.reshape(*shape[:0:-1], n_in)  # (n_experts, n_out, n_in) or (n_out, n_in)
        layout = Layout.FILE if matrix.is_float else Layout.PLANES
        return self.named(name, type, shape, matrix.planes[0], layout)

    @staticmethod
    def named(name, type, shape, address, layout):
        return Weight(f"{name} {next(COUNT)}", type, shape, ResidentWeight(address, layout))

    # ---- reference ----------------------------------------------------------------------

    def added(self, x):
        """float64 (n_rows, n_embd)"""
        x = x.astype(np.float64)
        h = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * self.norm_values
        chosen, weights = route_reference(
            h @ self.values["router"].astype(np.float64).T, self.n_used, self.scale
        )
        out = np.zeros_like(h)
        for e in np.unique(chosen):
            rows, place = np.nonzero(chosen == e)
            out[rows] += weights[rows, place, None] * self.expert(int(e), h[rows])
        if "shared_down" in self.values:
            y = self.gated(h, *(self.values[f"shared_{n}"] for n in ("gate", "up", "down")))
            gate = self.values.get("shared_router")
            out += y if gate is None else y / (1 + np.exp(-(h @ gate.astype(np.float64).T)))
        return out

    def expert(self, e, h):
        down = self.values["down"][e]
        if "gate_up" in self.values:
            both = self.values["gate_up"][e]
            return self.gated(h, both[: len(both) // 2], both[len(both) // 2 :], down)
        return self.gated(h, self.values["gate"][e], self.values["up"][e], down)

    @staticmethod
    def gated(h, gate, up, down):
        g, u = (h @ w.astype(np.float64).T for w in (gate, up))
        with np.errstate(over="ignore"):
            return (g / (1 + np.exp(-g)) * u) @ down.astype(np.float64).T

    # ---- device -------------------------------------------------------------------------

    def run(self, x, options=None, arena=None):
        """x + what the experts add."""
        place = arena or new_arena(self.p)
        experts = CudaExperts(self.p.store, self.p.matmul, options)
        self.p.matmul.begin(place, stream=self.p.stream.handle)
        experts.begin(place, stream=self.p.stream.handle)
        array = self.p.f32(x)
        assert experts.routed_experts(array, self.norm, self.experts) is array
        return self.p.read(array)

    def check(self, x, tolerance, options=None):
        got = self.run(x, options).astype(np.float64) - x
        assert self.p.nmse(got, self.added(x)) <= tolerance


def new_arena(products):
    return Arena(products.poisoned(1, 16 << 20).address, 64 << 20)


def compile_for(products, layer, tiles=TILES):
    """All kernels of a layer, in threads: what a dry run finds."""
    experts = CudaExperts(products.store, products.matmul)
    counted = Arena(0, None)
    products.matmul.begin(counted, stream=0)
    experts.begin(counted, stream=0)
    n_embd = layer.experts.down.shape[1]
    experts.routed_experts(DeviceArray(0, 8, n_embd), layer.norm, layer.experts)
    wanted = [m for m in experts.modules if m.source != "experts_tiles.cu" or _tile(m) in tiles]
    with ThreadPoolExecutor(16) as threads:
        products.store.compile(wanted, threads)
    return experts


def _tile(module: ModuleSpec) -> int:
    return int(module.instances[0].split(", ")[2])


PLAIN = (Q.Q8_0,) * 3
COMBINATIONS = {
    "q8_0": PLAIN,
    "q4_k_m": (Q.Q4_K, Q.Q4_K, Q.Q6_K),
    "gate and up differ": (Q.Q4_K, Q.Q5_K, Q.Q8_0),
    "small blocks": (Q.Q5_0, Q.Q4_1, Q.Q4_0),
    "bf16": (Q.BF16, Q.BF16, Q.BF16),
    "float and quantized": (Q.F16, Q.Q8_0, Q.BF16),
    "f32": (Q.F32, Q.F32, Q.F32),
    "f32 down": (Q.Q8_0, Q.Q8_0, Q.F32),
}
TOKENS = [1, 2, 4, 5, 7, 33, 64, 65, 300]


def tolerance(types, n_tokens):
    return FEW if n_tokens <= ExpertOptions().gemv_tokens or Q.F32 in types else MANY


@pytest.mark.parametrize("n_tokens", TOKENS)
@pytest.mark.parametrize("types", COMBINATIONS.values(), ids=COMBINATIONS)
def test_routed_experts(products, types, n_tokens):
    layer = Layer(products, types)
    compile_for(products, layer)
    layer.check(products.activations(n_tokens, 512), tolerance(types, n_tokens))


@pytest.mark.parametrize("n_tokens", [3, 40])
@pytest.mark.parametrize("type", NATIVE, ids=lambda t: t.name)
def test_every_type(products, type, n_tokens):
    layer = Layer(products, (type,) * 3)
    compile_for(products, layer, tiles=(32,))
    layer.check(products.activations(n_tokens, 512), tolerance((type,), n_tokens), ExpertOptions(tile=32))


@pytest.mark.parametrize("n_tokens", [1, 3, 20, 200])
@pytest.mark.parametrize("types", [PLAIN, (Q.BF16,) * 3, (Q.Q4_K, Q.Q4_K, Q.Q5_K)], ids=["q8_0", "bf16", "k"])
def test_gate_and_up_in_one_stack(products, types, n_tokens):
    layer = Layer(products, types, merged=True)
    compile_for(products, layer)
    layer.check(products.activations(n_tokens, 512), tolerance(types, n_tokens))


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 16, 100, 150])
@pytest.mark.parametrize("shared", [(Q.Q8_0, 96, True), (Q.BF16, 48, True), (Q.Q4_K, 256, False)],
                         ids=["q8_0", "bf16", "without a gate"])  # fmt: skip
def test_shared_expert(products, shared, n_tokens):
    layer = Layer(products, PLAIN, shared=shared)
    compile_for(products, layer)
    few = n_tokens <= products.matmul.options.gemv_tokens
    layer.check(products.activations(n_tokens, 512), FEW if few else MANY)


@pytest.mark.parametrize("n_tokens", [1, 4, 9, 33, 130])
@pytest.mark.parametrize(("n_ff", "n_experts", "n_used"), [(48, 8, 2), (32, 8, 2), (16, 3, 3), (80, 1, 1)])
def test_tiny_shapes(products, n_ff, n_experts, n_used, n_tokens):
    """Widths below every tile's, and no multiples of 32."""
    layer = Layer(products, (Q.BF16,) * 3, n_embd=64, n_ff=n_ff, n_experts=n_experts, n_used=n_used)
    compile_for(products, layer)
    layer.check(products.activations(n_tokens, 64), tolerance((Q.BF16,), n_tokens))


@pytest.mark.parametrize("n_tokens", [3, 64, 500])
def test_real_widths(products, n_tokens):
    layer = Layer(products, PLAIN, n_embd=2048, n_ff=768, n_experts=24, n_used=8)
    compile_for(products, layer)
    layer.check(products.activations(n_tokens, 2048), tolerance(PLAIN, n_tokens))


@pytest.mark.parametrize("n_tokens", [2, 8, 33, 64, 200])
@pytest.mark.parametrize("n_used", [1, 3])
def test_all_tokens_choose_the_same_experts(products, n_used, n_tokens):
    """A router of zeros: all experts tie, the first are chosen by everybody and the others by nobody."""
    layer = Layer(products, PLAIN, n_used=n_used, router=np.zeros((16, 512)), scale=2.5)
    compile_for(products, layer)
    layer.check(products.activations(n_tokens, 512), tolerance(PLAIN, n_tokens))


@pytest.mark.parametrize("n_used", [10, 32])
@pytest.mark.parametrize("n_tokens", [2, 70])
def test_many_experts_many_choices(products, n_used, n_tokens):
    layer = Layer(products, PLAIN, n_embd=128, n_ff=64, n_experts=320, n_used=n_used)
    compile_for(products, layer)
    layer.check(products.activations(n_tokens, 128), tolerance(PLAIN, n_tokens))


def test_eight_bit_activations(products):
    layer = Layer(products, PLAIN)
    compile_for(products, layer)
    options = products.matmul.options
    try:
        products.matmul.options = dataclasses.replace(options, activation_bytes=1)
        layer.check(products.activations(2, 512), 1e-3)
    finally:
        products.matmul.options = options


@pytest.mark.parametrize("types", [PLAIN, (Q.Q4_K, Q.Q4_K, Q.Q6_K)], ids=["q8_0", "q4_k_m"])
def test_size_of_tiles_and_slices_change_no_bit(products, types, monkeypatch):
    """Every number is summed in one order, whatever tile it falls into."""
    layer, x = Layer(products, types), products.activations(150, 512)
    compile_for(products, layer)
    whole = [layer.run(x, ExpertOptions(tile=tile)) for tile in TILES]
    for other in whole[1:]:
        assert (other == whole[0]).all()
    monkeypatch.setattr(cuda_experts, "SLICE", 64)
    assert (layer.run(x, ExpertOptions(tile=32)) == whole[0]).all()


@pytest.mark.parametrize("n_tokens", [1, 4, 64, 150])
def test_repeated_runs_are_equal(products, n_tokens):
    layer, x = Layer(products, PLAIN), products.activations(n_tokens, 512)
    compile_for(products, layer)
    first = layer.run(x)
    for _ in range(3):
        assert (layer.run(x) == first).all()


def test_a_nan_stays_in_its_row(products):
    layer = Layer(products, PLAIN)
    compile_for(products, layer)
    for n_tokens in (3, 40):
        x = products.activations(n_tokens, 512)
        clean = layer.run(x)
        x[1, 5] = np.nan
        got = layer.run(x)
        assert np.isnan(got[1]).all()
        others = np.arange(n_tokens) != 1
        assert (got[others] == clean[others]).all()


@pytest.mark.parametrize("n_tokens", [1, 4, 5, 64, 65, 300])
def test_dry_run_counts_what_a_real_run_takes(products, n_tokens):
    layer = Layer(products, PLAIN, shared=(Q.Q8_0, 96, True))
    compile_for(products, layer)
    counted, real = Arena(0, None), new_arena(products)
    for arena in (counted, real):
        layer.run(products.activations(n_tokens, 512), arena=arena)
    assert counted.peak == real.peak > 0


@pytest.mark.parametrize("n_tokens", [1, 4, 16, 64])
def test_captured_launches_replay_with_other_tokens(products, n_tokens):
    """The graph routes anew at every replay."""
    layer, place = Layer(products, PLAIN, shared=(Q.Q8_0, 96, True)), new_arena(products)
    compile_for(products, layer)
    experts, x = CudaExperts(products.store, products.matmul), products.f32(np.zeros((n_tokens, 512)))
    driver, stream = products.device.driver, products.stream

    def launch() -> None:
        place.reset()
        products.matmul.begin(place, stream=stream.handle)
        experts.begin(place, stream=stream.handle)
        experts.routed_experts(x, layer.norm, layer.experts)

    launch()  # loads code
    stream.sync()
    mode = driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    driver.call("cuStreamBeginCapture", stream.raw, mode)
    launch()
    graph = driver.call("cuStreamEndCapture", stream.raw)
    executable = driver.call("cuGraphInstantiate", graph, 0)
    for seed in range(3):
        values = products.activations(n_tokens, 512, seed)
        driver.call("cuMemcpyHtoD", x.address, values.ctypes.data, values.nbytes)
        driver.call("cuGraphLaunch", executable, stream.raw)
        got = products.read(x)
        assert (got == layer.run(values)).all()
    driver.call("cuGraphExecDestroy", executable)
    driver.call("cuGraphDestroy", graph)


# ---- routing and grouping alone ---------------------------------------------------------------------------


def route(products, logits, n_used, tile, *, fused, scale=1.0):
    """(ids, weights, order, tiles) of the device, from poisoned memory."""
    n, n_experts = logits.shape
    n_pairs = n * n_used
    n_tiles = most_tiles(n_pairs, n_experts, tile)
    ids, weights, order = (products.poisoned(1, n_pairs) for _ in range(3))
    tiles = products.poisoned(n_tiles, 4)
    params = RouteParams(products.put(logits), ids.address, weights.address, order.address, tiles.address)
    params.scale, params.n_tokens, params.n_experts, params.n_used = scale, n, n_experts, n_used
    params.n_tiles, params.log_tile = n_tiles, tile.bit_length() - 1

    def launch(name, blocks, threads):
        kernel = products.store.kernel("experts_route.cu", name, (RouteParams,))
        kernel((blocks, 1, 1), threads, params, stream=products.stream.handle)

    per = experts_a_lane(n_experts)
    if fused:
        launch(f"route<{per}, true>", 1, MAX_EXPERTS)
    else:
        launch(f"route<{per}, false>", -(-n // 4), 128)
        launch("group<1024>", 1, MAX_EXPERTS)
    return (
        products.get(ids.address, (n, n_used), np.int32),
        products.get(weights.address, (n, n_used)),
        products.get(order.address, (n_pairs,), np.int32),
        products.get(tiles.address, (n_tiles, 4), np.int32),
    )


ROUTES = [(1, 8, 2), (5, 128, 8), (64, 128, 8), (100, 160, 10), (33, 256, 1), (300, 512, 10), (20, 1000, 32)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("n_tokens", "n_experts", "n_used"), ROUTES)
def test_routing_equals_the_reference(products, n_tokens, n_experts, n_used, fused):
    if fused and n_experts > 256:
        pytest.skip("one block has no registers for so many")
    rng = np.random.default_rng((n_tokens, n_experts))
    logits = (2 * rng.standard_normal((n_tokens, n_experts))).astype(np.float32)
    logits[: n_tokens // 3] = np.round(logits[: n_tokens // 3])  # ties
    logits[n_tokens // 2] *= 100  # all but a few underflow
    ids, weights, order, tiles = route(products, logits, n_used, 16, fused=fused, scale=0.7)
    want_ids, want_weights = route_reference(logits, n_used, 0.7)
    assert (ids == want_ids).all()
    np.testing.assert_allclose(weights, want_weights, rtol=2e-5, atol=1e-30)
    check_groups(ids.reshape(-1), order, tiles, 16)


def check_groups(ids, order, tiles, tile):
    """Every pair has one place; tiles are of one expert and hold every place once."""
    assert (np.sort(order) == np.arange(len(ids))).all()
    used = tiles[tiles[:, 2] > 0]
    assert (tiles[len(used) :, 2] == 0).all()
    assert (used[:, 2] <= tile).all()
    places = np.concatenate([np.arange(first, first + n) for _, first, n, _ in used])
    assert (places == np.arange(len(ids))).all()
    for expert, first, n, _ in used:
        assert (ids[order[first : first + n]] == expert).all()
    # no expert has two tiles that are not full
    for expert in np.unique(used[:, 0]):
        assert ((used[used[:, 0] == expert, 2] < tile).sum()) <= 1


def test_nothing_but_numbers_of_experts_comes_out_of_bad_logits(products):
    logits = np.zeros((4, 128), np.float32)
    logits[0], logits[1, 7], logits[2], logits[3, 3] = np.nan, np.nan, -np.inf, np.inf
    for fused in (False, True):
        ids, weights, order, tiles = route(products, logits, 8, 16, fused=fused)
        assert ((ids >= 0) & (ids < 128)).all()
        assert all(len(np.unique(row)) == 8 for row in ids)
        assert np.isnan(weights).all(axis=1).tolist() == [True, True, True, True]
        check_groups(ids.reshape(-1), order, tiles, 16)
