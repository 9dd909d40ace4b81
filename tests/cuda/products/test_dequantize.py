"""Layouts and dequantization on the device: the file's numbers, bit for bit in float32."""

import numpy as np
import pytest

from streamer.gguf.quants import dequantize
from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.matmul_arguments import FLOATS, device_matrix
from streamer.kernels.planes import CODEBOOKS, planes_reference
from streamer.plan.layouts import PLANES, plane_offsets, resident_nbytes
from streamer.plan.plan import Layout

pytestmark = pytest.mark.cuda
NATIVE = (*PLANES, *sorted(FLOATS))
by_name = {"ids": lambda type: type.name}


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Bit equality; any NaN equals any other."""
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), f"{(~same).sum()} of {same.size} differ"


@pytest.mark.parametrize("type", PLANES, **by_name)
def test_planes_hold_what_the_reference_says(products, type):
    n = 7 * 11 * type.block_elements
    data = products.random_weight(type, n, 1)
    nbytes = resident_nbytes(Layout.PLANES, type, n)
    target = products.put(np.zeros(nbytes + 16, np.uint8))
    products.layouter.apply(Layout.PLANES, type, products.put(data), target, n, stream=products.stream)
    got = products.get(target, (nbytes + 16,), np.uint8)
    assert (got[:nbytes] == planes_reference(type, data)).all()
    assert (got[nbytes:] == 0).all()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("type", NATIVE, **by_name)
def test_dequantized_rows_equal_the_reference_bit_for_bit(products, type, dtype):
    n_in, n_out, first, n_rows = 768, 21, 3, 17
    matrix, values = products.weight(type, n_out, n_in)
    out = products.poisoned(n_rows, n_in, dtype)
    products.launcher.dequantize(
        matrix, out.address, first, n_rows, stream=products.stream.handle, dtype=dtype
    )
    want = values[first : first + n_rows]
    if dtype == "bf16":
        assert (products.get(out.address, want.shape, np.uint16) == products.to_bf16(want)).all()
    else:
        assert_same_bits(products.read(out), want)


@pytest.mark.parametrize("type", PLANES, **by_name)
def test_any_scale_a_file_can_hold_comes_out_right(products, type):
    """Subnormal, zero and infinite scales too: blocks of entirely random bytes."""
    n = 64 * type.block_elements
    data = np.random.default_rng(int(type)).integers(0, 256, n // type.block_elements * type.block_nbytes)
    data = data.astype(np.uint8)
    target = products.put(np.zeros(resident_nbytes(Layout.PLANES, type, n), np.uint8))
    products.layouter.apply(Layout.PLANES, type, products.put(data), target, n, stream=products.stream)
    out = products.poisoned(64, type.block_elements)
    matrix = device_matrix(type, target, type.block_elements, 64)
    products.launcher.dequantize(matrix, out.address, 0, 64, stream=products.stream.handle, dtype="f32")
    want = dequantize(type, data, (type.block_elements, 64))
    assert_same_bits(products.get(out.address, want.shape), want)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("type", CODEBOOKS, **by_name)
def test_codebook_types_decode_bit_for_bit(products, type, dtype):
    n = 37 * max(type.block_elements, 8)
    data = products.random_weight(type, n, 2)
    out = products.poisoned(1, n, dtype)
    products.layouter.decode(type, products.put(data), out.address, n, stream=products.stream, dtype=dtype)
    want = dequantize(type, data, (n,))
    if dtype == "bf16":
        assert (products.get(out.address, want.shape, np.uint16) == products.to_bf16(want)).all()
    else:
        assert_same_bits(products.get(out.address, want.shape), want)


@pytest.mark.parametrize("type", NATIVE, **by_name)
def test_embedding_takes_rows_by_id_and_scales(products, type):
    table, values = products.weight(type, 40, 512)
    ids = np.array([39, 0, -1, 7, 40], np.int32)  # -1: the slot's last id; 40: not in the table
    last, slots = np.array([5, 11], np.int32), np.array([0, 0, 1, 0, 0], np.int32)
    out = products.poisoned(5, 512)
    products.launcher.embed(
        table,
        products.put(ids),
        out,
        stream=products.stream.handle,
        scale=2.5,
        last=(products.put(last), products.put(slots)),
    )
    got = products.get(out.address, (5, 512))
    assert_same_bits(got[:4], values[[39, 0, 11, 7]] * np.float32(2.5))
    assert np.isnan(got[4]).all()


def test_planes_lie_where_the_plan_counts_them():
    for type in PLANES:
        n = 5 * type.block_elements
        offsets, nbytes = plane_offsets(type, n), resident_nbytes(Layout.PLANES, type, n)
        assert offsets[0] == 0
        assert all(offset % 16 == 0 for offset in offsets)
        assert offsets[-1] + 5 * PLANES[type][-1] <= nbytes
        assert len(offsets) == len(PLANES[type])


def test_array_is_not_touched_beyond_its_rows(products):
    """The poison check itself: a short write is seen."""
    out = products.poisoned(2, 32, margin=4)
    products.device.activate()
    products.device.driver.call("cuMemsetD8", out.address, 0, 4 * 36)
    with pytest.raises(AssertionError, match="beyond the columns"):
        products.read(DeviceArray(out.address, 2, 32, "f32", 36))
