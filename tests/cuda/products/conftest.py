"""Weights of every type on the device, and references in float64, for the tests of the product kernels."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from streamer.config import cache_directory
from streamer.device.base import CopyKind
from streamer.gguf.quants import QuantType, dequantize
from streamer.kernels.compile import architecture
from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.cuda_matmul import CudaMatmul
from streamer.kernels.launch import KernelStore
from streamer.kernels.matmul_arguments import FLOATS, DeviceMatrix, QuantizedRows, device_matrix
from streamer.kernels.matmul_launch import ROWS_MODULE, product_modules
from streamer.kernels.planes import WeightLayouter
from streamer.plan.layouts import PLANES, resident_nbytes
from streamer.plan.plan import Layout

# Where a block has f16 scales: random bytes there would be infinities.
SCALES = {
    **{t: (0,) for t in (QuantType.Q8_0, QuantType.Q4_0, QuantType.Q5_0, QuantType.IQ4_NL, QuantType.IQ4_XS)},
    **{t: (0, 2) for t in (QuantType.Q4_1, QuantType.Q5_1, QuantType.Q4_K, QuantType.Q5_K)},
    QuantType.Q2_K: (80, 82),
    QuantType.Q3_K: (108,),
    QuantType.Q6_K: (208,),
    **{t: (0,) for t in (QuantType.IQ1_S, QuantType.IQ2_XXS, QuantType.IQ2_XS, QuantType.IQ2_S)},
    **{t: (0,) for t in (QuantType.IQ3_XXS, QuantType.IQ3_S, QuantType.Q1_0)},
    QuantType.TQ1_0: (52,),
    QuantType.TQ2_0: (64,),
}
# What a block's scale is multiplied by, about: weights shall be of size 0.1.
MULTIPLES = {
    QuantType.Q8_0: 74,
    QuantType.Q5_0: 9,
    QuantType.Q5_1: 18,
    QuantType.Q2_K: 17,
    QuantType.Q3_K: 42,
    QuantType.Q4_K: 320,
    QuantType.Q5_K: 650,
    QuantType.Q6_K: 1350,
    QuantType.IQ4_NL: 70,
    QuantType.IQ4_XS: 1300,
}
POISON = 0x7FC0DEAD  # a NaN


class Products:
    """A device with the product kernels compiled, and short ways to use them. Keeps what it puts."""

    def __init__(self, device: Any, types: Iterable[QuantType]) -> None:
        """`types`: those whose kernels are compiled at once; others are when they are first asked for."""
        self.device = device
        self.stream = device.create_stream("products")
        arch = architecture(device.capabilities.compute_capability)
        self.store = KernelStore(device, arch, cache_directory=cache_directory() / "kernels")
        specs = [ROWS_MODULE]
        for type in types:
            for nbytes in (1, 2):
                specs += product_modules(type, gemv_tokens=8, activation_bytes=nbytes)
        with ThreadPoolExecutor(16) as threads:
            self.store.compile(list(dict.fromkeys(specs)), threads)
        self.matmul = CudaMatmul(device, self.store)
        self.launcher = self.matmul.launcher
        self.layouter = WeightLayouter(device, self.store)
        self.buffers: list[Any] = []

    def close(self) -> None:
        self.layouter.close()
        self.matmul.close()
        self.device.close()

    def free(self) -> None:
        self.stream.sync()
        while self.buffers:
            self.buffers.pop().close()

    # ---- arrays -------------------------------------------------------------------------

    def put(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        buffer = self.device.allocate(max(16, array.nbytes))
        self.device.upload(
            buffer, 0, array.ctypes.data, array.nbytes, stream=self.stream, kind=CopyKind.ACTIVATIONS
        )
        self.stream.sync()
        self.buffers.append(buffer)
        return int(buffer.handle)

    def get(self, address: int, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        out = np.empty(shape, dtype)
        self.device.activate()
        self.stream.sync()
        self.device.driver.call("cuMemcpyDtoH", out.ctypes.data, address, out.nbytes)
        return out

    def poisoned(self, rows: int, columns: int, dtype: str = "f32", *, margin: int = 0) -> DeviceArray:
        """NaNs; `margin` more columns a row and rows that nobody may write."""
        n = (rows + (1 if margin else 0)) * (columns + margin)
        kind = np.uint32 if dtype == "f32" else np.uint16
        return DeviceArray(
            self.put(np.full(n, POISON & np.iinfo(kind).max, kind)), rows, columns, dtype, columns + margin
        )

    def read(self, array: DeviceArray) -> np.ndarray:
        """f32 or bf16 results; checks that the margin is untouched."""
        whole = array.row_stride > array.columns
        rows = array.rows + (1 if whole else 0)
        if array.dtype == "f32":
            raw = self.get(array.address, (rows, array.row_stride), np.uint32)
            margin, values = POISON, raw.view(np.float32)
        else:
            raw = self.get(array.address, (rows, array.row_stride), np.uint16)
            margin, values = POISON & 0xFFFF, from_bf16(raw)
        if whole:
            assert (raw[: array.rows, array.columns :] == margin).all(), "wrote beyond the columns"
            assert (raw[array.rows] == margin).all(), "wrote beyond the rows"
        return values[: array.rows, : array.columns]

    # ---- weights ------------------------------------------------------------------------

    def weight(
        self, type: QuantType, n_out: int, n_in: int, seed: int = 0
    ) -> tuple[DeviceMatrix, np.ndarray]:
        """A random resident matrix and its values (n_out, n_in) float32."""
        data = random_weight(type, n_out * n_in, seed)
        values = dequantize(type, data, (n_in, n_out))
        address = self.put(data)
        if type not in FLOATS:
            target = self.put(np.full(resident_nbytes(Layout.PLANES, type, n_out * n_in), 0xA5, np.uint8))
            self.layouter.apply(Layout.PLANES, type, address, target, n_out * n_in, stream=self.stream)
            address = target
        return device_matrix(type, address, n_in, n_out), values

    def quantized(self, x: np.ndarray, nbytes: int) -> tuple[QuantizedRows, np.ndarray]:
        """x as the kernels take it, from the reference quantizer, and the values it stands for (float64)."""
        hi, lo, scale, sums, values = quantize_reference(x, nbytes)
        rows = QuantizedRows(
            self.put(hi), self.put(lo) if nbytes == 2 else 0, self.put(scale), self.put(sums)
        )
        return rows, values

    def bf16(self, x: np.ndarray) -> DeviceArray:
        return DeviceArray(self.put(to_bf16(x)), x.shape[0], x.shape[1], "bf16")

    def f32(self, x: np.ndarray) -> DeviceArray:
        return DeviceArray(self.put(x.astype(np.float32)), x.shape[0], x.shape[1])

    # ---- references, as attributes so that tests need no import ---------------------------

    @staticmethod
    def nmse(got: np.ndarray, want: np.ndarray) -> float:
        assert np.isfinite(got).all(), "not every element was written, or not finite"
        return float(((got - want) ** 2).sum() / (want.astype(np.float64) ** 2).sum())

    @staticmethod
    def round_bf16(x: np.ndarray) -> np.ndarray:
        return from_bf16(to_bf16(x)).astype(np.float64)

    random_weight = staticmethod(lambda *a: random_weight(*a))
    quantize_reference = staticmethod(lambda *a: quantize_reference(*a))
    to_bf16 = staticmethod(lambda x: to_bf16(x))
    activations = staticmethod(lambda *a: activations(*a))


def random_weight(type: QuantType, n: int, seed: int) -> np.ndarray:
    """File bytes of n random elements: any quants, scales of ordinary size and either sign."""
    rng = np.random.default_rng((int(type), n, seed))
    if type in FLOATS or type is QuantType.F64:
        values = rng.standard_normal(n) * 0.05
        kinds = {QuantType.F32: np.float32, QuantType.F16: np.float16, QuantType.F64: np.float64}
        raw = to_bf16(values) if type is QuantType.BF16 else values.astype(kinds[type])
        return raw.view(np.uint8)
    blocks = rng.integers(0, 256, (n // type.block_elements, type.block_nbytes), dtype=np.uint8)
    for offset in SCALES.get(type, ()):
        size = 0.1 / MULTIPLES.get(type, 5)
        d = rng.uniform(0.5 * size, 1.5 * size, len(blocks)) * rng.choice([-1, 1], len(blocks))
        blocks[:, offset : offset + 2] = d.astype(np.float16)[:, None].view(np.uint8)
    if type is QuantType.MXFP4:
        blocks[:, 0] = rng.integers(116, 124, len(blocks))
    if type is QuantType.IQ1_M:  # the f16 scale lies in four top nibbles
        d = rng.uniform(0.001, 0.01, len(blocks)).astype(np.float16).view(np.uint16)
        for i in range(4):
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | ((d >> (4 * i)) & 15).astype(np.uint8) << 4
    return blocks.reshape(-1)


def activations(n_tokens: int, n_in: int, seed: int = 0) -> np.ndarray:
    """Ordinary values with a few outliers, as hidden states have them."""
    rng = np.random.default_rng((n_tokens, n_in, seed))
    x = rng.standard_normal((n_tokens, n_in)).astype(np.float32)
    x[:, rng.integers(0, n_in, max(1, n_in // 200))] *= 20
    return x


def quantize_reference(x: np.ndarray, nbytes: int) -> tuple[np.ndarray, ...]:
    """linear.cuh's quantization in float32: (hi, lo, scale, sum, values in float64)."""
    levels = np.float32(32512 if nbytes == 2 else 127)
    blocks = x.astype(np.float32).reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, levels / largest, np.float32(0)).astype(np.float32)
    q = np.rint(blocks * inverse).astype(np.int32)
    scale = (largest / levels).astype(np.float32)
    hi = (q + 128) >> 8 if nbytes == 2 else q
    lo = q - 256 * hi if nbytes == 2 else np.zeros_like(q)
    sums = (q.reshape(len(x), -1, 2, 16).sum(axis=-1).astype(np.float32) * scale).reshape(len(x), -1)
    values = (q.astype(np.float64) * scale).reshape(x.shape)
    return (
        hi.astype(np.int8).reshape(x.shape),
        lo.astype(np.int8).reshape(x.shape),
        scale[..., 0],
        sums,
        values,
    )


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def types_of(tests: Iterable[Any]) -> list[QuantType]:
    """Types with products among the parameters of the tests that will run."""
    values: list[Any] = []
    for test in tests:
        for value in (getattr(test, "callspec", None) and test.callspec.params.values()) or ():
            values += value if isinstance(value, tuple) else [value]
    found = {v for v in values if isinstance(v, QuantType)}
    return sorted(t for t in (*PLANES, *FLOATS) if t in found)


@pytest.fixture(scope="session")
def products_of_session(request: pytest.FixtureRequest, open_device: Any) -> Iterator[Products]:
    products = Products(open_device(), types_of(request.session.items))
    yield products
    products.close()


@pytest.fixture
def products(products_of_session: Products) -> Iterator[Products]:
    yield products_of_session
    products_of_session.free()
