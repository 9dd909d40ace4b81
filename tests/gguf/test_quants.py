"""The table is ggml's, the numbers are the gguf package's."""

import gguf
import numpy as np
import pytest

from streamer.gguf.quants import QuantType, dequantize, nbytes_of

WEIGHTS = [type for type in QuantType if type.is_dequantizable]


def test_the_table_is_complete_and_equal_to_the_packages():
    theirs = {int(k): (k.name, *v) for k, v in gguf.constants.GGML_QUANT_SIZES.items()}
    ours = {int(t): (t.name, t.block_elements, t.block_nbytes) for t in QuantType}
    assert ours == theirs


@pytest.mark.parametrize("type", WEIGHTS, ids=lambda t: t.name)
def test_dequantize_equals_the_package_bit_for_bit(type):
    shape = (type.block_elements * 3, 5, 2)
    random = np.random.default_rng(int(type))
    data = random.integers(0, 256, nbytes_of(type, shape), dtype=np.uint8)
    values = dequantize(type, data.tobytes(), shape)
    assert values.shape == (2, 5, shape[0])
    assert values.dtype == np.float32
    assert values.flags.writeable
    if type in (QuantType.F64, QuantType.Q1_0):
        return  # the package has none: next tests
    rows = data.reshape(10, -1)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(int(type)))
    assert np.array_equal(values.reshape(10, -1).view(np.uint32), expected.view(np.uint32))


def test_q1_0_is_a_sign_a_bit():
    data = np.float16(0.5).tobytes() + bytes([0b00000101]) + bytes(15)
    values = dequantize(QuantType.Q1_0, data, (128,))
    assert values[:4].tolist() == [0.5, -0.5, 0.5, -0.5]
    assert (values[4:] == -0.5).all()


def test_f64_is_rounded_to_float32():
    assert dequantize(QuantType.F64, np.array([1.0, 1e300]).tobytes(), (2,)).tolist() == [1.0, np.inf]


@pytest.mark.parametrize("type", [t for t in QuantType if not t.is_dequantizable], ids=lambda t: t.name)
def test_types_that_are_no_weights_are_refused(type):
    with pytest.raises(ValueError, match=type.name):
        dequantize(type, bytes(type.block_nbytes), (type.block_elements,))


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="33 bytes"):
        dequantize(QuantType.Q8_0, bytes(33), (32,))
    with pytest.raises(ValueError, match="multiple"):
        nbytes_of(QuantType.Q8_0, (31, 32))
    with pytest.raises(ValueError, match="multiple"):
        nbytes_of(QuantType.F32, ())
