"""Products of every type and number of tokens against float64.

Two tolerances: EMULATED against the reference over the very numbers the kernel multiplies (quantized or bf16
activations, bf16 weights), where only the order of f32 additions differs; TRUE against unrounded numbers.
"""

import numpy as np
import pytest

from streamer.gguf.quants import QuantType
from streamer.kernels.matmul_arguments import FLOATS, Output, SourceRows
from streamer.kernels.matmul_ring import RINGS, RingVariant, ring_fits
from streamer.kernels.ops import Activation
from streamer.plan.layouts import PLANES

pytestmark = pytest.mark.cuda
EMULATED = 1e-10
TRUE = {1: 5e-4, 2: 1e-6, "f32": 1e-10, "bf16": 5e-5}
NATIVE = (*PLANES, *sorted(FLOATS))
QUANTIZED = tuple(PLANES)
ON_TENSOR_CORES = tuple(t for t in NATIVE if t is not QuantType.F32)
by_name = {"ids": lambda type: type.name}


def activate(x, kind):
    if kind is Activation.SILU:
        with np.errstate(over="ignore"):
            return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def width_of(type, blocks=3):
    """An awkward K: no multiple of a warp's or a stage's share."""
    return blocks * max(32, type.block_elements)


class Gemv:
    """One call with every number of tokens' references at hand."""

    def __init__(self, products, type, n_tokens, n_in, nbytes=2):
        self.p, self.type, self.x = products, type, products.activations(n_tokens, n_in)
        if type in FLOATS:
            self.rows, self.values, self.true = products.f32(self.x), self.x.astype(np.float64), TRUE["f32"]
        else:
            self.rows, self.values = products.quantized(self.x, nbytes)
            self.true = TRUE[nbytes]

    def run(self, outputs, **options):
        self.p.launcher.gemv(outputs, self.rows, len(self.x), stream=self.p.stream.handle, **options)

    def check(self, got, weight, extra=0.0):
        weight = weight.astype(np.float64)
        assert self.p.nmse(got, self.values @ weight.T + extra) <= EMULATED
        assert self.p.nmse(got, self.x.astype(np.float64) @ weight.T + extra) <= self.true


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 5, 7, 8, 9, 16, 33])
@pytest.mark.parametrize("type", NATIVE, **by_name)
def test_gemv(products, type, n_tokens):
    n_in, n_out = width_of(type), 101
    call = Gemv(products, type, n_tokens, n_in)
    matrix, weight = products.weight(type, n_out, n_in)
    out = products.poisoned(n_tokens, n_out, margin=3)
    call.run([Output(matrix, out)])
    call.check(products.read(out), weight)


@pytest.mark.parametrize("nbytes", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2, 5, 16, 18, 20, 36, 112, 448])
@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.Q4_0, QuantType.Q6_K, QuantType.BF16], **by_name)
def test_gemv_of_any_width(products, type, blocks, nbytes):
    n_in = width_of(type, blocks) if type.block_elements < 256 else 256 * max(1, blocks // 8)
    call = Gemv(products, type, 2, n_in, nbytes)
    matrix, weight = products.weight(type, 48, n_in)
    out = products.poisoned(2, 48)
    call.run([Output(matrix, out)])
    call.check(products.read(out), weight)


@pytest.mark.parametrize("threads", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("n_tokens", [1, 8])
def test_gemv_with_any_number_of_lanes_a_row(products, n_tokens, threads):
    call = Gemv(products, QuantType.Q8_0, n_tokens, 1056)
    matrix, weight = products.weight(QuantType.Q8_0, 70, 1056)
    out = products.poisoned(n_tokens, 70, margin=1)
    call.run([Output(matrix, out)], threads=threads)
    call.check(products.read(out), weight)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 8])
@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.Q4_K, QuantType.BF16], **by_name)
def test_gemv_of_several_matrices_with_bias_and_residual(products, type, n_tokens):
    n_in = width_of(type, 4)
    call = Gemv(products, type, n_tokens, n_in)
    sizes = (65, 7, 32, 1)
    made = [products.weight(type, n, n_in, seed=n) for n in sizes]
    outs = [products.poisoned(n_tokens, n, margin=2) for n in sizes]
    bias = np.random.default_rng(1).standard_normal(65).astype(np.float32)
    outputs = [Output(matrix, out) for (matrix, _), out in zip(made, outs, strict=True)]
    outputs[0] = Output(outputs[0].matrix, outs[0], bias=products.put(bias))
    residual = np.random.default_rng(2).standard_normal((n_tokens, 32)).astype(np.float32)
    outs[2] = products.f32(residual)
    outputs[2] = Output(outputs[2].matrix, outs[2], residual=outs[2].address)  # in place
    call.run(outputs)
    extras = (bias, 0.0, residual, 0.0)
    for (_, weight), out, extra in zip(made, outs, extras, strict=True):
        call.check(products.read(out), weight, extra)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("n_tokens", [1, 2, 5, 8])
@pytest.mark.parametrize("type", NATIVE, **by_name)
def test_gemv_gated(products, type, n_tokens, activation):
    n_in, n_out = width_of(type), 96
    call = Gemv(products, type, n_tokens, n_in)
    (gate, gate_values), (up, up_values) = (products.weight(type, n_out, n_in, seed=s) for s in (1, 2))
    out = products.poisoned(n_tokens, n_out)
    call.run([Output(gate, out), Output(up, out)], activation=activation)
    g, u = (call.values @ v.astype(np.float64).T for v in (gate_values, up_values))
    assert products.nmse(products.read(out), activate(g, activation) * u) <= EMULATED


class Ring(Gemv):
    """The same through gemv_ring; `source`: f32 rows that the launch norms and quantizes itself."""

    def __init__(self, products, type, n_tokens, n_in, nbytes=2, source=False, norm=None):
        super().__init__(products, type, n_tokens, n_in, nbytes)
        self.nbytes = nbytes
        self.variant = RINGS.get(type, (RingVariant(),))[0]
        if source or type in FLOATS:
            weight = 0
            if norm is not None:
                weight = products.put(norm)
                wide = self.x.astype(np.float64)
                self.x = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * norm
            self.rows = SourceRows(products.f32(wide if norm is not None else self.x), weight, 1e-5)
            self.values = self.x.astype(np.float64)

    def run(self, outputs, **options):
        options = {"activation_bytes": self.nbytes, "variant": self.variant} | options
        self.p.launcher.gemv_ring(outputs, self.rows, len(self.x), stream=self.p.stream.handle, **options)


def ring_width(type, at_least=1):
    """The narrowest width that gemv_ring takes, and that is no whole number of its pieces."""
    return next(n for n in range(256 * at_least, 16384, 256) if ring_fits(type, n))


@pytest.mark.parametrize("nbytes", [1, 2])
@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("type", [t for t in NATIVE if t is not QuantType.F32], **by_name)
def test_ring(products, type, n_tokens, nbytes):
    n_in, n_out = ring_width(type, 3), 1101
    call = Ring(products, type, n_tokens, n_in, nbytes)
    matrix, weight = products.weight(type, n_out, n_in)
    out = products.poisoned(n_tokens, n_out, margin=3)
    call.run([Output(matrix, out)])
    call.check(products.read(out), weight)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("nbytes", [1, 2])
@pytest.mark.parametrize("n_tokens", [1, 2])
@pytest.mark.parametrize(
    "type", [QuantType.Q8_0, QuantType.Q4_K, QuantType.Q6_K, QuantType.Q2_K, QuantType.BF16], **by_name
)
def test_ring_norms_and_quantizes_its_input(products, type, n_tokens, nbytes, with_norm):
    n_in = ring_width(type, 5)
    norm = np.random.default_rng(4).uniform(0.5, 2, n_in).astype(np.float32) if with_norm else None
    call = Ring(products, type, n_tokens, n_in, nbytes, source=True, norm=norm)
    matrix, weight = products.weight(type, 300, n_in)
    out = products.poisoned(n_tokens, 300, margin=1)
    call.run([Output(matrix, out)])
    want = call.values @ weight.astype(np.float64).T
    assert products.nmse(products.read(out), want) <= call.true


@pytest.mark.parametrize(
    "variant",
    [RingVariant(2, 4, 4), RingVariant(8, 1, 4), RingVariant(4, 2, 4, blocks=2), RingVariant(4, 1, 16)],
    ids=str,
)
@pytest.mark.parametrize("n_in", [256, 512, 4096, 14336])
def test_ring_however_it_is_cut(products, n_in, variant):
    call = Ring(products, QuantType.Q8_0, 1, n_in)
    matrix, weight = products.weight(QuantType.Q8_0, 2500, n_in)
    out = products.poisoned(1, 2500, margin=1)
    call.run([Output(matrix, out)], variant=variant)
    call.check(products.read(out), weight)


@pytest.mark.parametrize("n_tokens", [1, 2])
@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.Q4_K, QuantType.BF16], **by_name)
def test_ring_of_several_matrices_with_bias_and_residual(products, type, n_tokens):
    n_in = 768
    call = Ring(products, type, n_tokens, n_in)
    sizes = (65, 7, 32, 1)
    made = [products.weight(type, n, n_in, seed=n) for n in sizes]
    outs = [products.poisoned(n_tokens, n, margin=2) for n in sizes]
    bias = np.random.default_rng(1).standard_normal(65).astype(np.float32)
    outputs = [Output(matrix, out) for (matrix, _), out in zip(made, outs, strict=True)]
    outputs[0] = Output(outputs[0].matrix, outs[0], bias=products.put(bias))
    residual = np.random.default_rng(2).standard_normal((n_tokens, 32)).astype(np.float32)
    outs[2] = products.f32(residual)
    outputs[2] = Output(outputs[2].matrix, outs[2], residual=outs[2].address)  # in place
    call.run(outputs)
    for (_, weight), out, extra in zip(made, outs, (bias, 0.0, residual, 0.0), strict=True):
        call.check(products.read(out), weight, extra)


@pytest.mark.parametrize("n_tokens", [1, 2, 4])
@pytest.mark.parametrize("type", [t for t in NATIVE if t is not QuantType.F32], **by_name)
def test_ring_gated(products, type, n_tokens):
    n_in, n_out = ring_width(type, 2), 97
    call = Ring(products, type, n_tokens, n_in)
    (gate, gate_values), (up, up_values) = (products.weight(type, n_out, n_in, seed=s) for s in (1, 2))
    bias = np.random.default_rng(1).standard_normal(n_out).astype(np.float32)
    out = products.poisoned(n_tokens, n_out)
    call.run([Output(gate, out), Output(up, out, bias=products.put(bias))], activation=Activation.SILU)
    g, u = (call.values @ v.astype(np.float64).T for v in (gate_values, up_values))
    assert products.nmse(products.read(out), activate(g, Activation.SILU) * (u + bias)) <= EMULATED


def on_tensor_cores(products, type, n_tokens, n_in):
    """(x on the device, its values) and the rounding of weights."""
    x = products.activations(n_tokens, n_in)
    return products.bf16(x), products.round_bf16(x), x.astype(np.float64)


@pytest.mark.parametrize("n_tokens", [1, 2, 8, 9, 16, 17, 33, 64, 65, 128])
@pytest.mark.parametrize("type", ON_TENSOR_CORES, **by_name)
def test_mma(products, type, n_tokens):
    n_in, n_out = width_of(type, 5), 157
    x, values, true = on_tensor_cores(products, type, n_tokens, n_in)
    matrix, weight = products.weight(type, n_out, n_in)
    out = products.poisoned(n_tokens, n_out, margin=3)
    products.launcher.mma([Output(matrix, out)], x, stream=products.stream.handle)
    got = products.read(out)
    assert products.nmse(got, values @ products.round_bf16(weight).T) <= EMULATED
    assert products.nmse(got, true @ weight.astype(np.float64).T) <= TRUE["bf16"]


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("n_in", [32, 64, 96, 576, 2048, 4128])
@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.Q4_1, QuantType.BF16], **by_name)
def test_mma_of_any_width(products, type, n_in, tiled):
    x, values, _ = on_tensor_cores(products, type, 13, n_in)
    matrix, weight = products.weight(type, 70, n_in)
    out = products.poisoned(13, 70)
    products.launcher.mma([Output(matrix, out)], x, stream=products.stream.handle, tiled=tiled)
    assert products.nmse(products.read(out), values @ products.round_bf16(weight).T) <= EMULATED


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize("n_tokens", [20, 64, 100])
@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.Q4_K, QuantType.Q2_K], **by_name)
def test_mma_with_k_split_over_blocks(products, type, n_tokens, splits):
    x, values, _ = on_tensor_cores(products, type, n_tokens, 4096)
    matrix, weight = products.weight(type, 300, 4096)
    out, again = products.poisoned(n_tokens, 300), products.poisoned(n_tokens, 300)
    for target in (out, again):
        products.launcher.mma([Output(matrix, target)], x, stream=products.stream.handle, splits=splits)
    got = products.read(out)
    assert products.nmse(got, values @ products.round_bf16(weight).T) <= EMULATED
    assert (got == products.read(again)).all()  # parts are added in one order, whoever comes last


@pytest.mark.parametrize("n_tokens", [3, 16, 40, 64])
@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.Q4_K, QuantType.F16], **by_name)
def test_mma_of_several_matrices_with_bias_and_residual(products, type, n_tokens):
    n_in = width_of(type, 4)
    x, values, _ = on_tensor_cores(products, type, n_tokens, n_in)
    sizes = (65, 7, 160, 1)
    made = [products.weight(type, n, n_in, seed=n) for n in sizes]
    outs = [products.poisoned(n_tokens, n, margin=2) for n in sizes]
    bias = np.random.default_rng(1).standard_normal(65).astype(np.float32)
    outputs = [Output(matrix, out) for (matrix, _), out in zip(made, outs, strict=True)]
    outputs[0] = Output(outputs[0].matrix, outs[0], bias=products.put(bias))
    residual = np.random.default_rng(2).standard_normal((n_tokens, 160)).astype(np.float32)
    outs[2] = products.f32(residual)
    outputs[2] = Output(outputs[2].matrix, outs[2], residual=outs[2].address)
    products.launcher.mma(outputs, x, stream=products.stream.handle)
    for (_, weight), out, extra in zip(made, outs, (bias, 0.0, residual, 0.0), strict=True):
        want = values @ products.round_bf16(weight).T + extra
        assert products.nmse(products.read(out), want) <= EMULATED


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("n_tokens", [2, 16, 31, 64, 120])
@pytest.mark.parametrize("type", ON_TENSOR_CORES, **by_name)
def test_mma_gated(products, type, n_tokens, dtype):
    n_in, n_out = width_of(type), 160
    x, values, _ = on_tensor_cores(products, type, n_tokens, n_in)
    (gate, gate_values), (up, up_values) = (products.weight(type, n_out, n_in, seed=s) for s in (1, 2))
    out = products.poisoned(n_tokens, n_out, dtype, margin=8)
    products.launcher.mma(
        [Output(gate, out), Output(up, out)], x, stream=products.stream.handle, activation=Activation.SILU
    )
    g, u = (values @ products.round_bf16(v).T for v in (gate_values, up_values))
    tolerance = EMULATED if dtype == "f32" else 1e-5  # the result's own rounding to 8 bits
    assert products.nmse(products.read(out), activate(g, Activation.SILU) * u) <= tolerance
