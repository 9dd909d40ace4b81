"""Prepared weights: every type's values in their place, neighbours as one product, bytes counted."""

import gguf
import numpy as np
import pytest

from streamer.device.host import HostDevice
from streamer.gguf.directory import TensorInfo
from streamer.gguf.quants import QuantType, dequantize, nbytes_of
from streamer.kernels.host_weights import HostWeights, RawTable, joined_bias, prepared_nbytes, product_of
from streamer.kernels.matmul import read_rows
from streamer.kernels.ops import Linear, Weight

RNG = np.random.default_rng(6)


def info(name, type, *shape):
    return TensorInfo(name, shape, type, nbytes_of(type, shape), 0, 0)


def random_bytes(tensor):
    """File bytes of random values where the gguf package can quantize, else of zeros with finite scales."""
    values = RNG.standard_normal(tuple(reversed(tensor.shape))).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType(int(tensor.type)))
    return np.ascontiguousarray(data).view(np.uint8).reshape(-1)


@pytest.fixture
def prepared():
    device, opened = HostDevice(poison=0xFF), []

    def prepare(*tensors):
        weights = HostWeights(device, tensors)
        opened.append(weights)
        data = {tensor.name: random_bytes(tensor) for tensor in tensors}
        for tensor in reversed(tensors):  # in any order
            weights.prepare(tensor.name, data[tensor.name])
        want = {t.name: dequantize(t.type, data[t.name], t.shape) for t in tensors}
        return weights, want

    yield prepare
    for weights in opened:
        weights.close()
    assert device.statistics().allocated_bytes == 0
    device.close()


def all_rows(weight):
    rows = weight.handle
    return read_rows(rows.blocks, rows.first_row + np.arange(rows.n_out))


@pytest.mark.parametrize(
    "type", [QuantType.F32, QuantType.F16, QuantType.BF16, QuantType.Q8_0, QuantType.Q4_1, QuantType.Q5_0]
)
def test_values_are_the_files(type, prepared):
    weights, want = prepared(info("a", type, 64, 100), info("b", type, 32, 7), info("c", type, 32))
    for name in "ab":
        assert np.array_equal(all_rows(weights.weights[name]), want[name])
    assert np.array_equal(weights.weights["c"].handle, want["c"])


def test_matrix_larger_than_a_group_of_rows(prepared, monkeypatch):
    monkeypatch.setattr("streamer.kernels.host_weights.ROWS_NBYTES", 1)
    weights, want = prepared(info("a", QuantType.Q8_0, 64, 333))
    assert np.array_equal(all_rows(weights.weights["a"]), want["a"])


def test_neighbours_of_one_input_are_one_product(prepared):
    tensors = [info(n, QuantType.F32, 64, rows) for n, rows in (("q", 48), ("k", 24), ("v", 20))]
    weights, want = prepared(*tensors, info("o", QuantType.F32, 48, 64))
    for names in ("qkv", "kv", "qk", "v"):
        product = product_of([Linear(weights.weights[name]) for name in names])
        assert product is not None
        x = RNG.standard_normal((3, 64)).astype(np.float32)
        got = np.concatenate(list(np.matmul(x, product.blocks)), axis=1)[:, product.columns]
        assert np.allclose(got, x @ np.concatenate([want[n] for n in names]).T, atol=1e-4)


def test_projections_apart_are_no_single_product(prepared):
    weights, _ = prepared(*(info(n, QuantType.F32, 64, 32) for n in "abc"), info("d", QuantType.F32, 32, 8))
    linears = {name: Linear(weights.weights[name]) for name in "abcd"}
    assert product_of([linears["a"], linears["c"]]) is None
    assert product_of([linears["b"], linears["a"]]) is None
    assert product_of([linears["c"], linears["d"]]) is None


def test_padding_lanes_are_zero_whatever_memory_held(prepared):
    weights, _ = prepared(info("a", QuantType.F32, 16, 40), info("b", QuantType.F32, 16, 5))
    blocks = weights.weights["a"].handle.blocks
    assert np.isfinite(blocks).all()
    assert not blocks[-1, :, 13:].any()


def test_experts_have_blocks_of_their_own(prepared):
    weights, want = prepared(info("e", QuantType.Q8_0, 32, 40, 3))
    stack = weights.weights["e"].handle
    for expert in range(3):
        assert np.array_equal(read_rows(stack.blocks[expert], np.arange(40)), want["e"][expert])
    assert np.isfinite(stack.blocks).all()


def test_embedding_stays_raw_only_beside_an_output_projection(prepared):
    embedding, output = (
        info("token_embd.weight", QuantType.Q8_0, 32, 64),
        info("output.weight", QuantType.Q8_0, 32, 64),
    )
    weights, _ = prepared(embedding, output)
    assert isinstance(weights.weights["token_embd.weight"].handle, RawTable)
    assert prepared_nbytes([embedding, output]) == prepared_nbytes([embedding]) == 4 * 32 * 64
    tied, want = prepared(embedding)
    assert np.array_equal(all_rows(tied.weights["token_embd.weight"]), want["token_embd.weight"])


def test_biases_are_joined_with_zeros_where_there_is_none():
    def vector(*values):
        return Weight("b", QuantType.F32, (len(values),), np.array(values, np.float32))

    def linear(n, bias=None, parts=()):
        return Linear(Weight("w", QuantType.F32, (4, n), None), bias, parts)

    assert joined_bias([linear(2), linear(3)]) is None
    assert joined_bias([linear(2), linear(1, vector(5.0))]).tolist() == [0, 0, 5]
    assert joined_bias([linear(3, None, (vector(1.0), vector(2.0, 3.0)))]).tolist() == [1, 2, 3]
