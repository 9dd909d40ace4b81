"""Broken tokenizer metadata is refused by key; what is odd but clear loads."""

import contextlib
import logging
import time
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.errors import GGUFError
from streamer.gguf.metadata import Metadata
from streamer.gguf.values import StringArray
from streamer.text.tokenizer import build_tokenizer
from streamer.text.vocabulary import MAX_NAMED_CHARS, read_vocabulary

Make = Callable[..., dict[str, Any]]


def refused_key(metadata: Mapping[str, Any]) -> str:
    with pytest.raises(GGUFError) as caught:
        build_tokenizer(metadata, path="x.gguf")
    assert caught.value.path == "x.gguf"
    assert "\n" not in str(caught.value)
    return caught.value.subject.removeprefix("tokenizer.ggml.")


BROKEN_BPE: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": None}),
    ("model", {"model": "bert2"}),
    ("model", {"model": 7}),
    ("pre", {"pre": "qwen99"}),
    ("pre", {"pre": 3}),
    ("tokens", {"tokens": None}),
    ("tokens", {"tokens": []}),
    ("tokens", {"tokens": np.arange(270)}),
    ("tokens", {"tokens": "abc"}),
    ("token_type", {"token_type": np.zeros(269, np.int32)}),
    ("token_type", {"token_type": np.full(270, 7, np.int32)}),
    ("token_type", {"token_type": np.full(270, -1, np.int32)}),
    ("token_type", {"token_type": np.ones(270, np.float32)}),
    ("token_type", {"token_type": "x"}),
    ("merges", {"merges": None}),
    ("merges", {"merges": ["he"]}),
    ("merges", {"merges": ["h e", "l "]}),
    ("merges", {"merges": [" l"]}),
    ("merges", {"merges": [""]}),
    ("merges", {"merges": np.arange(4)}),
    ("bos_token_id", {"bos_token_id": 270}),
    ("eos_token_id", {"eos_token_id": -2}),
    ("eos_token_id", {"eos_token_id": "2"}),
    ("eot_token_id", {"eot_token_id": 1 << 20}),
    ("add_bos_token", {"add_bos_token": 1}),
    ("add_bos_token", {"add_bos_token": True, "bos_token_id": None}),
    ("add_eos_token", {"add_eos_token": True, "eos_token_id": None}),
]


@pytest.mark.parametrize(("key", "changes"), BROKEN_BPE)
def test_broken_bpe_metadata_is_refused_by_key(make_bpe: Make, key: str, changes: dict[str, Any]) -> None:
    assert refused_key(make_bpe(**changes)) == key


@pytest.mark.parametrize("name", ["<0x-1>", "<0x1>", "<0x100>", "0x41", "<0xZZ>", "", "<0x41>\n"])
def test_bad_byte_token_is_refused(make_spm: Make, name: str) -> None:
    tokens = list(make_spm()["tokenizer.ggml.tokens"])
    tokens[3] = name
    assert refused_key(make_spm(tokens=tokens)) == "tokens"


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": np.zeros(3, np.float32)},
        {"scores": np.full(297, np.nan, np.float32)},
        {"scores": ["a"] * 297},
    ],
)
def test_broken_scores_are_refused(make_spm: Make, changes: dict[str, Any]) -> None:
    assert refused_key(make_spm(**changes)) == "scores"


def spm_of_words(words: list[str], kind: int = 1) -> dict[str, Any]:
    """A SentencePiece vocabulary of `<unk>`, `a` and these words of one type."""
    n = len(words) + 2
    values = {
        "model": "llama",
        "tokens": ["<unk>", "a", *words],
        "token_type": np.array([2, 1, *[kind] * len(words)], np.int32),
        "scores": -np.arange(n, dtype=np.float32),
        "bos_token_id": 0xFFFFFFFF,
        "eos_token_id": 0xFFFFFFFF,
        "add_bos_token": False,
        "add_space_prefix": False,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in values.items()}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["a" * 1_000_000], 1),
        (["a" * n for n in range(2, 2000)], 1),
        (["a" * n for n in range(2, 2000)], 4),
        (["a" * (MAX_NAMED_CHARS + 1)], 3),
        ([f"{n:04}" * 1000 for n in range(300)], 3),
    ],
)
def test_tokens_too_long_to_build_an_encoder_are_refused_at_once(words: list[str], kind: int) -> None:
    begin = time.thread_time()
    assert refused_key(spm_of_words(words, kind)) == "tokens"
    assert time.thread_time() - begin < 1


def test_long_tokens_within_bounds_are_built_and_found() -> None:
    tokenizer = build_tokenizer(spm_of_words(["a" * n for n in range(2, 300)]))
    assert tokenizer.encode("a" * 299) == [299]
    tokenizer = build_tokenizer(spm_of_words(["b" * 100_000], 3))
    assert tokenizer.encode("b" * 100_000, parse_special=True) == [2]


@pytest.mark.parametrize("key", ["model", "pre", "add_bos_token", "eos_token_id", "token_type"])
def test_an_array_in_the_wrong_place_is_refused_before_it_is_made(make_bpe: Make, key: str) -> None:
    class Strings(StringArray):
        def value(self) -> list[str]:
            raise AssertionError("made")

    strings = Strings(b"", np.zeros(269, np.int64))
    assert refused_key(Metadata("x.gguf", make_bpe(**{key: strings}))) == key


def test_types_that_are_text_are_refused_without_room_for_the_longest(make_bpe: Make) -> None:
    tracemalloc.start()
    try:
        assert refused_key(make_bpe(token_type=["1" * 1_000_000] + ["1"] * 269)) == "token_type"
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "x" * 1_000_000},
        {"pre": "\n" * 1_000_000},
        {"merges": ["\x1b" * 1_000_000]},
        {"tokens": ["\n" * 1_000_000] * 270, "token_type": np.full(270, 6, np.int32)},
    ],
)
def test_text_in_a_refusal_is_escaped_and_cut(make_bpe: Make, changes: dict[str, Any]) -> None:
    with pytest.raises(GGUFError) as caught:
        build_tokenizer(make_bpe(**changes))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_nothing_is_warned_of_a_vocabulary_that_is_refused(
    make_bpe: Make, caplog: pytest.LogCaptureFixture
) -> None:
    odd = {"pre": None, "token_type": np.ones(270, np.int32), "padding_token_id": 9999}
    read_vocabulary(make_bpe(**odd))
    assert len(caplog.records) == 4  # two names of ends are no control tokens
    caplog.clear()
    for bad in ({"eos_token_id": 9999}, {"merges": ["x"]}, {"add_bos_token": 1}):
        with pytest.raises(GGUFError):
            read_vocabulary(make_bpe(**odd, **bad))
    assert not caplog.records


def test_missing_pretokenizer_is_the_default_and_logged(
    make_bpe: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        vocabulary = read_vocabulary(make_bpe(pre=None))
    assert vocabulary.pre == "default"
    assert "tokenizer.ggml.pre" in caplog.text


@pytest.mark.parametrize("name", ["llama-bpe", "llama3", "llama-v3", "qwen2", "qwen35", "smollm", "default"])
def test_known_pretokenizers_load(make_bpe: Make, name: str) -> None:
    tokenizer = build_tokenizer(make_bpe(pre=name))
    assert tokenizer.decode(tokenizer.encode("hello world 123", add_special=False)) == "hello world 123"


def test_beginning_token_defaults_to_what_the_type_wants(make_bpe: Make, make_spm: Make) -> None:
    assert not read_vocabulary(make_bpe()).add_bos
    assert read_vocabulary(make_bpe(pre="llama-bpe")).add_bos
    assert not read_vocabulary(make_bpe(pre="llama-bpe", add_bos_token=False)).add_bos
    assert not read_vocabulary(make_bpe(pre="llama-bpe", bos_token_id=None)).add_bos
    assert read_vocabulary(make_spm()).add_bos
    assert not read_vocabulary(make_spm(add_bos_token=np.bool_(False))).add_bos


def test_spm_has_its_customary_special_ids(make_spm: Make) -> None:
    assert read_vocabulary(make_spm()).special_ids == {"bos": 1, "eos": 2, "unk": 0}


def test_no_id_written_as_minus_one_is_none(make_bpe: Make) -> None:
    assert "bos" not in read_vocabulary(make_bpe(bos_token_id=0xFFFFFFFF)).special_ids


def test_padding_id_out_of_range_is_only_logged(make_bpe: Make, caplog: pytest.LogCaptureFixture) -> None:
    read_vocabulary(make_bpe(padding_token_id=99999))
    assert "padding_token_id" in caplog.text


def test_merges_of_unknown_tokens_and_repeated_tokens_are_harmless(make_bpe: Make) -> None:
    tokens = list(make_bpe()["tokenizer.ggml.tokens"])
    tokens[260] = "hello"
    tokens[261] = ""
    tokenizer = build_tokenizer(make_bpe(tokens=tokens, merges=["q x", "h e", "l l", "he ll", "hell o"]))
    assert tokenizer.encode("hello") == [259]
    assert tokenizer.token_bytes(260) == b"hello"
    assert tokenizer.token_bytes(261) == b""


def test_merges_may_lack_where_nothing_merges(make_bpe: Make) -> None:
    tokens = list(make_bpe()["tokenizer.ggml.tokens"])[:256]
    metadata = make_bpe(
        tokens=tokens, token_type=np.ones(256, np.int32), merges=None, bos_token_id=None, eos_token_id=1
    )
    assert build_tokenizer(metadata).encode("é") == [0xC3, 0xA9]


def test_end_ids_come_from_metadata_and_names(make_bpe: Make) -> None:
    # <|endoftext|> 264 and <|im_end|> 266 by name, 5 from metadata; <|im_start|> ends nothing.
    assert read_vocabulary(make_bpe(eos_token_id=5)).end_ids == {5, 264, 266}
    assert read_vocabulary(make_bpe(eot_token_id=7, eom_token_id=8)).end_ids == {7, 8, 264, 266}


def test_html_that_looks_like_an_end_is_text_unless_it_is_control(make_bpe: Make) -> None:
    tokens = list(make_bpe()["tokenizer.ggml.tokens"])
    tokens[263] = "</s>"
    assert 263 not in read_vocabulary(make_bpe(tokens=tokens)).end_ids
    types = make_bpe()["tokenizer.ggml.token_type"].copy()
    types[263] = 3
    assert 263 in read_vocabulary(make_bpe(tokens=tokens, token_type=types)).end_ids


def test_end_of_turn_of_the_wrong_type_is_treated_as_control(make_bpe: Make) -> None:
    types = make_bpe()["tokenizer.ggml.token_type"].copy()
    types[266] = 1
    vocabulary = read_vocabulary(make_bpe(token_type=types))
    assert 266 in vocabulary.control_ids
    assert 266 in vocabulary.end_ids


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_control_token_of_one_character_is_never_in_plain_text(kind: str) -> None:
    """Found by the property test below: such a character is a whole symbol of the model."""
    values = {
        "model": kind,
        "pre": "gpt-2",
        "tokens": ["a", "0", "<unk>"],
        "token_type": np.array([1, 3, 2], np.int32),
        "scores": np.zeros(3, np.float32),
        "merges": [],
        "unknown_token_id": 2,
        "add_space_prefix": False,
    }
    tokenizer = build_tokenizer({f"tokenizer.ggml.{k}": v for k, v in values.items()})
    assert 1 not in tokenizer.encode("a0a", add_special=False)
    assert 1 in tokenizer.encode("a0a", add_special=False, parse_special=True)


@pytest.mark.parametrize("name", ["0", "<x>"])
def test_a_control_token_repeated_as_a_users_one_stays_out_of_plain_text(name: str) -> None:
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", name, name],
        "token_type": np.array([1, 3, 4], np.int32),
        "merges": [],
    }
    tokenizer = build_tokenizer({f"tokenizer.ggml.{k}": v for k, v in values.items()})
    assert tokenizer.encode(f"a{name}a", add_special=False) == [0, 0]


TOKENS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        ["<0x41>", "<|im_end|>", "▁a", "▁", "a", "b", "ab", "Ġ", "\n", " ", "a b c", "</s>", "\0"]
    ),
)


@given(
    tokens=st.lists(TOKENS, min_size=1, max_size=12),
    kinds=st.lists(st.integers(0, 6), min_size=12, max_size=12),
    merges=st.lists(st.tuples(TOKENS, TOKENS).map(" ".join) | TOKENS, max_size=6),
    model=st.sampled_from(["gpt2", "llama"]),
    pre=st.sampled_from(["gpt-2", "llama-bpe", "default", "qwen2"]),
    ids=st.lists(st.integers(-2, 13), min_size=3, max_size=3),
    scores=st.lists(st.floats(width=32), min_size=12, max_size=12),
    flags=st.lists(st.booleans(), min_size=3, max_size=3),
    text=st.text(max_size=20) | st.sampled_from(["a b ab▁<|im_end|>", "\n\n a", "abc</s>"]),
)
@settings(max_examples=250, deadline=None)
def test_any_vocabulary_is_refused_or_works(
    tokens: list[str], kinds: list[int], merges: list[str], model: str, pre: str, ids: list[int],
    scores: list[float], flags: list[bool], text: str,
) -> None:  # fmt: skip
    n = len(tokens)
    values = {
        "model": model,
        "pre": pre,
        "tokens": tokens,
        "token_type": np.array(kinds[:n], np.int32),
        "merges": merges,
        "scores": np.array(scores[:n], np.float32),
        **dict(zip(("bos_token_id", "eos_token_id", "unknown_token_id"), ids, strict=True)),
        **dict(zip(("add_bos_token", "add_eos_token", "add_space_prefix"), flags, strict=True)),
    }
    try:
        tokenizer = build_tokenizer({f"tokenizer.ggml.{k}": v for k, v in values.items()})
    except GGUFError:
        return
    encoded = tokenizer.encode(text, add_special=False)
    controls = {i for i in encoded if tokenizer.is_control(i)}
    unknown = {i for i in range(n) if kinds[i] == 2}
    # unknown characters only, or characters the file calls so
    assert controls <= {tokenizer.unk_id, *unknown}
    tokenizer.decode(encoded)
    tokenizer.encode(text, parse_special=True)


KEYS = ["model", "pre", "tokens", "token_type", "merges", "scores", "bos_token_id", "add_bos_token"]


@given(
    key=st.sampled_from(KEYS),
    value=st.none() | st.integers() | st.floats() | st.text() | st.booleans() | st.binary()
    | st.lists(st.integers() | st.text(), max_size=3),
    spm=st.booleans(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_any_value_of_any_key_is_refused_or_works(
    make_bpe: Make, make_spm: Make, key: str, value: Any, spm: bool
) -> None:
    metadata = (make_spm if spm else make_bpe)(**{key: value})
    with contextlib.suppress(GGUFError):
        build_tokenizer(metadata).encode("hello")
