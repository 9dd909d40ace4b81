"""Vocabularies for the text tests: tiny ones made here, llama.cpp's test files, the two real models."""

import lzma
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamer.gguf.reader import read_directory
from streamer.text.tokenizer import Tokenizer, build_tokenizer

DATA = Path(__file__).parents[1] / "data"
Metadata = dict[str, Any]


def byte_characters() -> list[str]:
    """GPT-2's alphabet in the order of its bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    of = {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}
    return [of[b] for b in range(256)]


def bpe_metadata(**changes: Any) -> Metadata:
    """Byte-level: 256 bytes, a few words, control tokens 264..268, a user-defined token 269."""
    words = ["he", "ll", "hell", "hello", "Ġw", "or", "Ġwor", "ld"]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "[INST]"]
    tokens = [*byte_characters(), *words, *control, "<tool_call>"]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": np.array([1] * 264 + [3] * len(control) + [4], np.int32),
        "merges": ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d"],
        "bos_token_id": 267,
        "eos_token_id": 266,
    }
    return _keys(metadata, changes)


def spm_metadata(**changes: Any) -> Metadata:
    """SentencePiece: <unk> <s> </s>, 256 byte tokens, letters and a few words, user-defined <tool_call>."""
    joined = ["he", "ll", "▁he", "▁hell", "▁hello", "▁w", "or", "▁wor", "ld"]
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz", *joined]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, "<tool_call>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words), 4]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array([0.0] * 259 + [-float(i) for i in range(len(words))] + [0.0], np.float32),
        "token_type": np.array(types, np.int32),
    }
    return _keys(metadata, changes)


def _keys(metadata: Metadata, changes: Mapping[str, Any]) -> Metadata:
    """`changes` over `metadata`; None removes a key."""
    merged = {**metadata, **changes}
    return {f"tokenizer.ggml.{k}": v for k, v in merged.items() if v is not None}


@pytest.fixture(scope="session")
def make_bpe() -> Callable[..., Metadata]:
    return bpe_metadata


@pytest.fixture(scope="session")
def make_spm() -> Callable[..., Metadata]:
    return spm_metadata


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    return build_tokenizer(bpe_metadata())


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    return build_tokenizer(spm_metadata())


@pytest.fixture(scope="session")
def vocabulary_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """llama.cpp's vocabulary-only file of a name, unpacked."""
    folder = tmp_path_factory.mktemp("vocab")

    def unpack(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.exists():
            path.write_bytes(lzma.decompress((DATA / "vocab" / f"ggml-vocab-{name}.gguf.xz").read_bytes()))
        return path

    return unpack


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[Tokenizer]:
    tokenizer = build_tokenizer(read_directory(str(smollm2_path)).metadata)
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="session")
def gemma(gemma_path: Path) -> Iterator[Tokenizer]:
    tokenizer = build_tokenizer(read_directory(str(gemma_path)).metadata)
    yield tokenizer
    tokenizer.close()
