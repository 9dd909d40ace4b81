"""The generator of random models: sane weights in every type, files that the whole house accepts."""

from pathlib import Path

import numpy as np
import pytest

from streamer.gguf.quants import QuantType, dequantize
from streamer.gguf.reader import read_directory
from streamer.text.tokenizer import build_tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ("llama_small", "qwen35_small", "qwen3moe_small")


@pytest.fixture
def make(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import make_gguf

    return make_gguf


@pytest.mark.parametrize("std", [1.0, 1 / 64, 1 / 132])
def test_random_weights_have_the_standard_deviation_asked_for_in_every_type(make, std):
    for type in make.TYPES:
        data = make.random_weights(type, 256 * 400, std, np.random.default_rng(1))
        values = dequantize(type, data, (256, 400))
        tolerance = 0.35 if type is QuantType.MXFP4 else 0.1  # MXFP4's scales are powers of two
        assert abs(values.std() / std - 1) < tolerance, type.name
        assert abs(values.mean()) < 0.12 * std, type.name


@pytest.mark.parametrize("name", SMALL)
def test_a_small_model_passes_every_check_of_the_file(make, tmp_path, name):
    path = tmp_path / "model.gguf"
    shape = make.SHAPES[name]
    nbytes = make.write_model(path, name, shape.type, shape)
    assert path.stat().st_size == nbytes
    make.check_model(path)
    directory = read_directory(path)
    assert directory.architecture == shape.architecture
    tokenizer = build_tokenizer(directory.metadata)
    ids = tokenizer.encode("Hällo wörld", add_special=False)
    assert tokenizer.decode(ids) == "Hällo wörld"
    first = directory.tensors["blk.0.ffn_norm.weight" if name != "qwen35_small" else "blk.0.attn_norm.weight"]
    assert first.type is QuantType.F32


@pytest.mark.parametrize("type", ["q4_k", "q4_k_m", "q6_k", "bf16", "iq4_nl", "mxfp4"])
def test_any_type_can_be_asked_for(make, tmp_path, type):
    path = tmp_path / "model.gguf"
    make.write_model(path, "llama_small", type, make.SHAPES["llama_small"])
    make.check_model(path)


def test_the_same_seed_gives_the_same_file_whatever_the_threads_do(make, tmp_path):
    shape = make.SHAPES["llama_small"]
    for name in ("a", "b"):
        make.write_model(tmp_path / name, "llama_small", "q8_0", shape, seed=3)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("name", "type", "gigabytes"),
    [
        ("llama8b", "q8_0", 8.53),
        ("llama8b", "q4_k_m", 4.91),
        ("qwen35_27b", "ffn_q8_0", 37.75),
        ("qwen3moe_30b", "q8_0", 32.48),
    ],
)
def test_real_shapes_have_the_sizes_of_the_real_files(make, name, type, gigabytes):
    shape = make.SHAPES[name]
    last = make.place(shape, make.choose_type(type, shape))[-1]
    assert round((last.offset + last.nbytes) / 1e9, 2) == gigabytes
