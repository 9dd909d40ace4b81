"""The operators over products: mixed types, every kernel's range of tokens, counted temporaries, capture."""

import itertools

import numpy as np
import pytest

from streamer.gguf.quants import QuantType
from streamer.kernels.cuda_array import Arena
from streamer.kernels.cuda_matmul import CudaMatmul, MatmulOptions, ResidentWeight
from streamer.kernels.matmul_ring import RINGS, RingVariant
from streamer.kernels.ops import Activation, Linear, Norm, Weight
from streamer.plan.plan import Layout

pytestmark = pytest.mark.cuda
N_EMBD, N_FF = 512, 1024
TOLERANCE = {1: 1e-6, 2: 1e-6}  # 16-bit activations; else bf16 weights and activations
BF16 = 2e-4
Q = QuantType
COUNT = itertools.count()  # `CudaMatmul` knows weights by name


class Layer:
    """Weights of a layer with their values."""

    def __init__(self, products, types):
        self.products, self.values = products, {}
        shapes = {
            "q": (N_EMBD, N_EMBD),
            "k": (128, N_EMBD),
            "v": (128, N_EMBD),
            "o": (N_EMBD, N_EMBD),
            "gate": (N_FF, N_EMBD),
            "up": (N_FF, N_EMBD),
            "down": (N_EMBD, N_FF),
        }
        self.linear = {
            name: Linear(self.weight(name, type, *shape))
            for (name, shape), type in zip(shapes.items(), types, strict=True)
        }
        self.norms = {}
        for seed, name in enumerate(("attention", "post", "feed_forward")):
            values = np.random.default_rng(seed).uniform(0.5, 2, N_EMBD).astype(np.float32)
            handle = ResidentWeight(products.put(values), Layout.FILE)
            self.values[name] = values
            self.norms[name] = Norm(Weight(name, Q.F32, (N_EMBD,), handle), 1e-5)

    def weight(self, name, type, n_out, n_in):
        matrix, self.values[name] = self.products.weight(type, n_out, n_in, seed=len(self.values))
        layout = Layout.FILE if matrix.is_float else Layout.PLANES
        return Weight(f"{name} {next(COUNT)}", type, (n_in, n_out), ResidentWeight(matrix.planes[0], layout))

    def normed(self, x, name):
        x = x.astype(np.float64)
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * self.values[name]

    def times(self, x, name):
        return x @ self.values[name].astype(np.float64).T


PLAIN = (Q.Q8_0,) * 7
MIXED = (Q.Q5_K, Q.Q5_K, Q.Q6_K, Q.BF16, Q.Q4_K, Q.Q4_K, Q.Q6_K)
ODD = (Q.F16, Q.Q4_1, Q.F32, Q.IQ4_XS, Q.Q5_0, Q.Q8_0, Q.F16)
QUANTS = (Q.Q4_K, Q.Q4_K, Q.Q6_K, Q.Q4_K, Q.Q5_K, Q.Q5_K, Q.Q8_0)
EVERY = pytest.mark.parametrize("types", [PLAIN, MIXED, ODD], ids=["q8_0", "mixed", "odd"])
TOKENS = pytest.mark.parametrize("n_tokens", [1, 2, 3, 16, 20, 64, 130, 200])


def arena(products):
    buffer = products.poisoned(1, 8 << 20)
    return Arena(buffer.address, 32 << 20)


@EVERY
@TOKENS
def test_norm_then_projections(products, types, n_tokens):
    layer, x = Layer(products, types), products.activations(n_tokens, N_EMBD)
    products.matmul.begin(arena(products), stream=products.stream.handle)
    projections = [layer.linear[name] for name in ("q", "k", "v")]
    outs = products.matmul.norm_project(products.f32(x), layer.norms["attention"], projections)
    h = layer.normed(x, "attention")
    for name, out in zip(("q", "k", "v"), outs, strict=True):
        got = products.read(out)
        assert products.nmse(got, layer.times(h, name)) <= TOLERANCE.get(n_tokens, BF16)


@EVERY
@TOKENS
@pytest.mark.parametrize("post", [False, True])
def test_projection_is_added_in_place(products, types, n_tokens, post):
    layer, a = Layer(products, types), products.activations(n_tokens, N_EMBD, 1)
    residual = products.activations(n_tokens, N_EMBD, 2)
    products.matmul.begin(arena(products), stream=products.stream.handle)
    x = products.f32(residual)
    post_norm = layer.norms["post"] if post else None
    out = products.matmul.project_add(products.f32(a), layer.linear["o"], x, post_norm=post_norm)
    assert out.address == x.address
    y = layer.times(a.astype(np.float64), "o")
    want = residual + (layer.normed(y, "post") if post else y)
    assert products.nmse(products.read(out), want) <= TOLERANCE.get(n_tokens, BF16)


@EVERY
@TOKENS
@pytest.mark.parametrize("activation", list(Activation))
def test_gated_feed_forward(products, types, n_tokens, activation):
    layer, x = Layer(products, types), products.activations(n_tokens, N_EMBD, 3) * np.float32(0.1)
    products.matmul.begin(arena(products), stream=products.stream.handle)
    linears = [layer.linear[name] for name in ("gate", "up", "down")]
    out = products.matmul.gated_feed_forward(
        products.f32(x), layer.norms["feed_forward"], *linears, activation=activation, post_norm=None
    )
    h = layer.normed(x, "feed_forward")
    g, u = layer.times(h, "gate"), layer.times(h, "up")
    if activation is Activation.SILU:
        with np.errstate(over="ignore"):
            g = g / (1 + np.exp(-g))
    else:
        g = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    want = x + layer.times(g * u, "down")
    assert products.nmse(products.read(out), want) <= TOLERANCE.get(n_tokens, BF16)


@EVERY
@TOKENS
def test_dry_run_counts_what_a_real_run_takes(products, types, n_tokens):
    layer, x = Layer(products, types), products.f32(products.activations(n_tokens, N_EMBD))
    counted, real = Arena(0, None), arena(products)
    for a in (counted, real):
        products.matmul.begin(a, stream=products.stream.handle)
        linears = [layer.linear[name] for name in ("gate", "up", "down")]
        products.matmul.gated_feed_forward(
            x,
            layer.norms["feed_forward"],
            *linears,
            activation=Activation.SILU,
            post_norm=layer.norms["post"],
        )
    assert counted.peak == real.peak > 0


@EVERY
@pytest.mark.parametrize("n_tokens", [1, 2, 8, 64])
def test_captured_launches_replay(products, types, n_tokens):
    """Decode's products in a graph: replayed on new activations in the same place."""
    layer, place = Layer(products, types), arena(products)
    x = products.f32(products.activations(n_tokens, N_EMBD, 4))
    linears = [layer.linear[name] for name in ("gate", "up", "down")]

    def launch() -> None:
        place.reset()
        products.matmul.begin(place, stream=products.stream.handle)
        products.matmul.gated_feed_forward(
            x, layer.norms["feed_forward"], *linears, activation=Activation.SILU, post_norm=None
        )

    start = products.activations(n_tokens, N_EMBD, 5)
    driver = products.device.driver

    def set_x() -> None:
        driver.call("cuMemcpyHtoD", x.address, start.ctypes.data, start.nbytes)

    launch()  # loads code
    products.stream.sync()
    set_x()
    launch()
    eager = products.read(x)
    set_x()
    mode = driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    driver.call("cuStreamBeginCapture", products.stream.raw, mode)
    launch()
    graph = driver.call("cuStreamEndCapture", products.stream.raw)
    executable = driver.call("cuGraphInstantiate", graph, 0)
    driver.call("cuGraphLaunch", executable, products.stream.raw)
    replayed = products.read(x)
    driver.call("cuGraphExecDestroy", executable)
    driver.call("cuGraphDestroy", graph)
    assert (replayed == eager).all()


@pytest.mark.parametrize("n_tokens", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        MatmulOptions(rings={}),
        MatmulOptions(rings=dict.fromkeys((*RINGS, Q.Q8_0), (RingVariant(),))),
        MatmulOptions(source_elements=0),
        MatmulOptions(activation_bytes=1),
        MatmulOptions(gemv_tokens=0),
    ],
    ids=["gemv", "ring", "quantized apart", "8 bit", "tensor cores"],
)
def test_every_way_to_compute_a_layer_agrees(products, options, n_tokens):
    layer, x = Layer(products, QUANTS), products.activations(n_tokens, N_EMBD, 6)
    matmul = CudaMatmul(products.device, products.store, options)

    def run(matmul):
        to = products.f32(x)
        matmul.begin(arena(products), stream=products.stream.handle)
        linears = [layer.linear[name] for name in ("gate", "up", "down")]
        norm = layer.norms["feed_forward"]
        matmul.gated_feed_forward(
            to, norm, *linears, activation=Activation.SILU, post_norm=layer.norms["post"]
        )
        return products.read(to)

    try:
        got = run(matmul)
    finally:
        products.stream.sync()
        matmul.close()
    exact = options.activation_bytes == 2 and options.gemv_tokens
    assert products.nmse(got, run(products.matmul).astype(np.float64)) <= (1e-6 if exact else 1e-3)
