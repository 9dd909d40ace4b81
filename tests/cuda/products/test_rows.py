"""Norms, gates and quantization of activations against float64."""

import numpy as np
import pytest

from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.matmul_arguments import ACTIVATIONS, QuantizedRows, RowsParams
from streamer.kernels.ops import Activation

pytestmark = pytest.mark.cuda
WIDTHS = (32, 64, 96, 576, 640, 2560, 4096, 5120, 14336)
EXACT = 1e-12  # f32 arithmetic: relative errors of 1e-7 in each element, squared


def activate(x: np.ndarray, kind: Activation) -> np.ndarray:
    if kind is Activation.SILU:
        with np.errstate(over="ignore"):
            return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def normed(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * weight


class Case:
    """One launch with every output asked for."""

    def __init__(self, products, x: np.ndarray, nbytes: int, **addresses):
        n, k = x.shape
        self.p, self.shape, self.nbytes = products, (n, k), nbytes
        self.f32, self.bf16 = products.poisoned(n, k), products.poisoned(n, k, "bf16")
        self.q = QuantizedRows(
            products.put(np.full((n, k), 77, np.int8)),
            products.put(np.full((n, k), 77, np.int8)) if nbytes == 2 else 0,
            products.poisoned(n, k // 32).address,
            products.poisoned(n, k // 16).address,
        )
        params = RowsParams(
            x=products.put(x),
            x_stride=k,
            K=k,
            n_tokens=n,
            out=self.f32.address,
            out_bf16=self.bf16.address,
            **addresses,
        )
        params.to = self.q.argument
        products.launcher.rows(params, stream=products.stream.handle)

    def check(self, want: np.ndarray) -> None:
        """f32 near `want`; bf16 and the quantized form exactly what follows from the f32 values."""
        p, (n, k) = self.p, self.shape
        got = p.read(self.f32)
        assert p.nmse(got, want) <= EXACT
        assert (p.get(self.bf16.address, (n, k), np.uint16) == p.to_bf16(got)).all()
        hi, lo, scale, sums, _ = p.quantize_reference(got, self.nbytes)
        assert (p.get(self.q.hi, (n, k), np.int8) == hi).all()
        if self.nbytes == 2:
            assert (p.get(self.q.lo, (n, k), np.int8) == lo).all()
        assert (p.get(self.q.scale, scale.shape) == scale).all()
        assert (p.get(self.q.sum, sums.shape) == sums).all()


@pytest.mark.parametrize("nbytes", [1, 2])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_norm(products, width, n_tokens, nbytes):
    x = products.activations(n_tokens, width)
    weight = np.random.default_rng(width).uniform(0.5, 2, width).astype(np.float32)
    case = Case(products, x, nbytes, weight=products.put(weight), epsilon=1e-5)
    case.check(normed(x, weight, 1e-5))


@pytest.mark.parametrize("width", WIDTHS)
def test_residual_with_post_norm_then_norm(products, width):
    rng = np.random.default_rng(width)
    x, residual = products.activations(3, width), rng.standard_normal((3, width)).astype(np.float32)
    post, weight = (rng.uniform(0.5, 2, width).astype(np.float32) for _ in range(2))
    updated = products.put(residual)
    case = Case(
        products,
        x,
        2,
        residual=updated,
        updated=updated,
        post=products.put(post),
        post_epsilon=1e-6,
        weight=products.put(weight),
        epsilon=1e-5,
    )
    want = residual + normed(x, post, 1e-6)
    assert products.nmse(products.get(updated, x.shape), want) <= EXACT
    case.check(normed(want, weight, 1e-5))


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("width", WIDTHS)
def test_gate_times_up(products, width, activation):
    gate, up = products.activations(4, width, 1), products.activations(4, width, 2)
    case = Case(products, gate, 1, up=products.put(up), activation=ACTIVATIONS[activation])
    case.check(activate(gate.astype(np.float64), activation) * up)


@pytest.mark.parametrize("nbytes", [1, 2])
def test_plain_quantization_of_extremes(products, nbytes):
    x = products.activations(2, 256)
    x[0, :32] = 0
    x[1, 32:64] *= 1e30
    x[1, 64:96] *= 1e-30
    Case(products, x, nbytes).check(x.astype(np.float64))


def test_nan_and_infinity_are_not_lost_in_quantization(products):
    x = products.activations(1, 96)
    x[0, 3], x[0, 40] = np.nan, np.inf
    scale = products.poisoned(1, 3)
    params = RowsParams(x=products.put(x), x_stride=96, K=96, n_tokens=1)
    q = QuantizedRows(*(products.put(np.zeros(96, np.int8)) for _ in range(2)), scale.address, scale.address)
    params.to = QuantizedRows(q.hi, q.lo, scale.address, products.poisoned(1, 6).address).argument
    products.launcher.rows(params, stream=products.stream.handle)
    got = products.get(scale.address, (3,))
    assert np.isnan(got[0])
    assert np.isinf(got[1])
    assert np.isfinite(got[2])


def test_rows_of_a_wider_array(products):
    """A view of columns: x_stride is the array's, results are packed."""
    wide = products.activations(3, 160)
    out = products.poisoned(3, 64)
    x = DeviceArray(products.put(wide), 3, 160).columns_from(32, 64)
    params = RowsParams(x=x.address, x_stride=x.row_stride, K=64, n_tokens=3, out=out.address)
    products.launcher.rows(params, stream=products.stream.handle)
    assert (products.read(out) == wide[:, 32:96]).all()
