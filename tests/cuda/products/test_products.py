"""Products of every type and number of tokens against float64.

Two tolerances: EMULATED against the reference over the very numbers the kernel multiplies (quantized or bf16
activations, bf16 weights), where only the order of f32 additions differs; TRUE against unrounded numbers.
"""

import numpy as np
import pytest

from streamer.gguf.quants import QuantType
from streamer.kernels.matmul_arguments import FLOATS, NextRows, Output, QuantizedRows
from streamer.kernels.matmul_launch import GemvVariant
from streamer.kernels.ops import Activation
from streamer.plan.layouts import PLANES

pytestmark = pytest.mark.cuda
EMULATED = 1e-10
TRUE = {1: 5e-4, 2: 1e-7, "f32": 1e-10, "bf16": 5e-5}
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
    call.run([Output(matrix, out)], variant=GemvVariant(threads=threads))
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


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("n_out", [32, 576, 4096])
@pytest.mark.parametrize("nbytes", [1, 2])
@pytest.mark.parametrize("n_tokens", [1, 3, 8])
@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.Q4_K], **by_name)
def test_gemv_quantizes_its_result_for_the_next(products, type, n_tokens, nbytes, n_out, with_norm):
    n_in = 512
    call = Gemv(products, type, n_tokens, n_in, nbytes)
    matrix, _ = products.weight(type, n_out, n_in)
    out = products.poisoned(n_tokens, n_out)
    norm = np.random.default_rng(3).uniform(0.5, 2, n_out).astype(np.float32)
    squares = products.poisoned(n_tokens, n_out // 32)
    to = QuantizedRows(
        products.put(np.zeros((n_tokens, n_out), np.int8)),
        products.put(np.zeros((n_tokens, n_out), np.int8)) if nbytes == 2 else 0,
        products.poisoned(n_tokens, n_out // 32).address,
        products.poisoned(n_tokens, n_out // 16).address,
    )
    following = NextRows(to, products.put(norm), squares.address) if with_norm else NextRows(to)
    for _ in range(3):  # the counters must be back at zero each time
        call.run([Output(matrix, out)], next_rows=following)
    y = products.read(out)
    hi, lo, scale, sums, _ = products.quantize_reference(y * norm if with_norm else y, nbytes)
    assert (products.get(to.scale, scale.shape) == scale).all()
    assert (products.get(to.hi, hi.shape, np.int8) == hi).all()
    assert nbytes == 1 or (products.get(to.lo, lo.shape, np.int8) == lo).all()
    assert (products.get(to.sum, sums.shape) == sums).all()
    if with_norm:
        want = (y.astype(np.float64) ** 2).reshape(n_tokens, -1, 32).sum(axis=-1)
        assert products.nmse(products.read(squares), want) <= EMULATED


def test_gemv_divides_by_a_deferred_norm(products):
    n_tokens, n_in = 3, 1024
    x = products.activations(n_tokens, n_in)
    norm = np.random.default_rng(4).uniform(0.5, 2, n_in).astype(np.float32)
    rows, values = products.quantized(x * norm, 2)
    squares = (x.astype(np.float64) ** 2).reshape(n_tokens, -1, 32).sum(axis=-1).astype(np.float32)
    matrix, weight = products.weight(QuantType.Q8_0, 100, n_in)
    out = products.poisoned(n_tokens, 100)
    products.launcher.gemv(
        [Output(matrix, out)],
        rows,
        n_tokens,
        stream=products.stream.handle,
        squares=(products.put(squares), 1e-5),
    )
    scale = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    assert products.nmse(products.read(out), values @ weight.astype(np.float64).T * scale) <= EMULATED


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
