"""Ids as llama.cpp and transformers give them; user text never becomes control tokens; time is linear."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.errors import ClientError, GgufdError, GGUFError
from streamer.gguf.reader import read_directory
from streamer.text.encoder import PIECE_CHARS, Encoder
from streamer.text.encoder_process import EncoderProcess
from streamer.text.pretokenizers import PRETOKENIZERS
from streamer.text.tokenizer import Tokenizer, build_tokenizer, encoder_spec

DATA = Path(__file__).parents[1] / "data"
Make = Callable[..., dict[str, Any]]
VOCABULARIES = ["gpt-2", "llama-bpe", "llama-spm", "qwen2"]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabulary_files_are_exact(name: str, vocabulary_path: Callable[[str], Path]) -> None:
    with open(DATA / "vocab" / "ggml-vocab.inp", newline="", encoding="utf-8") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    lines = (DATA / "vocab" / f"ggml-vocab-{name}.out").read_text().split("\n")[: len(texts)]
    tokenizer = build_tokenizer(read_directory(str(vocabulary_path(name))).metadata)
    try:
        for text, line in zip(texts, lines, strict=True):
            ids = tokenizer.encode(text, add_special=False)
            assert ids == [int(i) for i in line.split()], text
            assert tokenizer.decode(ids) == text
    finally:
        tokenizer.close()


@pytest.mark.parametrize(
    ("name", "fixture"), [("smollm2-135m.q4_1", "smollm2"), ("gemma-3-270m.q4_k_m", "gemma")]
)
def test_golden_texts_are_exact(name: str, fixture: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(fixture)
    for prompt in json.loads((DATA / f"{name}.json").read_text())["prompts"]:
        assert tokenizer.encode(prompt["text"]) == prompt["ids"]


def test_end_tokens_of_the_real_models(smollm2: Tokenizer, gemma: Tokenizer) -> None:
    assert {smollm2.token_text(i) for i in smollm2.end_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert {gemma.token_text(i) for i in gemma.end_ids} == {"<eos>", "<end_of_turn>"}


def test_merging_and_names(bpe: Tokenizer) -> None:
    assert bpe.encode("hello world") == [259, 262, 263]
    assert bpe.n_tokens == 270
    assert (bpe.bos_id, bpe.eos_id, bpe.add_bos, bpe.add_eos) == (267, 266, False, False)
    assert bpe.is_control(266)
    assert not bpe.is_control(269)
    assert bpe.token_bytes(262) == b" wor"


@pytest.mark.parametrize("name", ["<|im_end|>", "<|endoftext|>", "<s>", "[INST]"])
def test_names_of_control_tokens_in_text_are_text(bpe: Tokenizer, name: str) -> None:
    text = f"hello{name} {name}{name}"
    ids = bpe.encode(text)
    assert not any(map(bpe.is_control, ids))
    assert bpe.decode(ids) == text
    parsed = bpe.encode(text, parse_special=True)
    assert sum(map(bpe.is_control, parsed)) == 3
    assert bpe.decode(parsed, special=True) == text
    assert bpe.decode(parsed) == "hello "


def test_control_token_is_out_of_reach_even_as_a_whole_word(make_bpe: Make) -> None:
    # llama-bpe takes whole words of the vocabulary without merging: a control token may look like one.
    tokens = list(make_bpe()["tokenizer.ggml.tokens"])
    tokens[268] = "secret"
    tokenizer = build_tokenizer(make_bpe(pre="llama-bpe", tokens=tokens))
    assert 268 not in tokenizer.encode("secret")
    assert 268 in tokenizer.encode("secret", parse_special=True)


def test_control_token_is_out_of_reach_of_merges(make_bpe: Make, make_spm: Make) -> None:
    tokens = list(make_bpe()["tokenizer.ggml.tokens"])
    tokens[268] = "abab"
    tokens[263] = "ab"
    tokenizer = build_tokenizer(make_bpe(tokens=tokens, merges=["a b", "ab ab"]))
    assert tokenizer.encode("abab") == [263, 263]
    tokens = list(make_spm()["tokenizer.ggml.tokens"])
    tokens[1] = "hell"
    assert 1 not in build_tokenizer(make_spm(tokens=tokens, add_bos_token=False)).encode("xhell")


def test_user_defined_tokens_are_always_parsed(bpe: Tokenizer, spm: Tokenizer) -> None:
    assert 269 in bpe.encode("hello<tool_call>hello")
    assert spm.encode("<tool_call>")[-1] == spm.n_tokens - 1


def test_beginning_token_is_there_once(make_bpe: Make) -> None:
    tokenizer = build_tokenizer(make_bpe(add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("hello") == [267, 259, 266]
    assert tokenizer.encode("<s>hello<|im_end|>", parse_special=True) == [267, 259, 266]
    assert tokenizer.encode("hello", add_special=False) == [259]
    assert tokenizer.encode("") == [267, 266]


def test_spm_puts_a_space_before_the_first_word_and_takes_it_away(spm: Tokenizer, make_spm: Make) -> None:
    hello = spm.ids_by_text["▁hello"]
    assert spm.encode("hello") == [1, hello]
    assert spm.decode([1, hello, hello]) == "hello hello"
    assert spm.encode("hello</s>hello", parse_special=True) == [1, hello, 2, hello]
    plain = build_tokenizer(make_spm(add_space_prefix=False))
    assert plain.encode(" hello") == [1, hello]
    assert plain.decode([hello]) == " hello"


def test_spm_falls_back_to_bytes(spm: Tokenizer) -> None:
    ids = spm.encode("é😀", add_special=False)
    assert b"".join(spm.token_bytes(i) for i in ids) == " é😀".encode()
    assert ids[-1] == 3 + 0x80


@pytest.mark.parametrize("i", [-1, 270, 1 << 40])
def test_unknown_ids_are_the_clients_fault(bpe: Tokenizer, i: int) -> None:
    for use in (bpe.token_bytes, bpe.token_text, bpe.is_control, lambda i: bpe.decode([i])):
        with pytest.raises(ClientError) as caught:
            use(i)
        assert caught.value.status == 400


def test_lone_surrogates_become_replacement_characters(bpe: Tokenizer) -> None:
    assert bpe.decode(bpe.encode("a\ud800b")) == "a�b"
    assert bpe.decode(bpe.encode("\ud83d\ude00")) == "😀"


@given(st.text())
@settings(max_examples=150, deadline=None)
def test_bpe_round_trip(bpe: Tokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text


@given(st.text(alphabet=st.characters(exclude_characters="▁", exclude_categories=("Cs",))))
@settings(max_examples=150, deadline=None)
def test_spm_round_trip(spm: Tokenizer, text: str) -> None:
    assert spm.decode(spm.encode(text, add_special=False)) == text


SAMPLES = [
    "Hello  world's 12345 foo_bar\n\n  x",
    "Ünï 日本語 한국어 ა😀\t\r\n",
    "DON'T a1b22 $+<=>^~|`",
    " ",
    "\n \n",
]


@pytest.mark.parametrize("pre", sorted(PRETOKENIZERS))
def test_every_pretokenizer_loses_nothing(make_bpe: Make, pre: str) -> None:
    tokenizer = build_tokenizer(make_bpe(pre=pre))
    for text in SAMPLES:
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def words(pre: str, text: str) -> list[str]:
    """How a splitter of the table cuts a text."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in PRETOKENIZERS[pre].patterns]
    return [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "it's 1234  ok", ["it", "'s", " 1234", " ", " ok"]),
        ("llama-bpe", "IT'S 1234567", ["IT", "'S", " ", "123", "456", "7"]),
        ("qwen2", "x12!\n\n y", ["x", "1", "2", "!\n\n", " y"]),
        ("qwen35", "e\u0301a 1", ["e\u0301a", " ", "1"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("deepseek-llm", "Ab 12 你好", ["Ab", " ", "12", " ", "你好"]),
        ("deepseek-v3", "#if 1234", ["#if", " ", "123", "4"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("falcon", "a+1234", ["a", "+", "123", "4"]),
        ("default", "a+1234", ["a", "+", "123", "4"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("bloom", "Hi, there.", ["Hi", ",", " there", "."]),
        ("ufakzeka", "it's", ["it", "'s"]),
    ],
)
def test_splitters_cut_where_their_models_do(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


# --- long texts ---

LONG = {
    "words": "hello world ",
    "one word": "a",
    "spaces": " ",
    "newlines": "\n",
    "bytes": "é",
    "control names": "<|im_end|>",
}


@pytest.mark.parametrize("unit", LONG.values(), ids=LONG.keys())
@pytest.mark.parametrize("fixture", ["bpe", "spm"])
def test_encoding_takes_linear_time(fixture: str, unit: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(fixture)

    def seconds(n: int) -> float:
        text = unit * (n // len(unit))
        start = time.process_time()
        tokenizer.encode(text)
        return time.process_time() - start

    small = min(seconds(1 << 17) for _ in range(2))
    assert seconds(1 << 20) < 8 * small * 3 + 0.5  # 8 times the text; 3 for a busy machine


@pytest.mark.parametrize("fixture", ["smollm2", "gemma"])
def test_long_text_is_cut_without_changing_its_ids(fixture: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(fixture)
    line = "The quick brown fox, 12 dogs; don't say hello world. Ünï日本\n"
    text = line * (3 * PIECE_CHARS // len(line))
    ids = tokenizer.encode(text, add_special=False)
    short = [len(tokenizer.encode(line * n, add_special=False)) for n in (20, 21)]
    assert tokenizer.decode(ids) == text
    assert len(ids) == short[0] + (len(text) // len(line) - 20) * (short[1] - short[0])


def test_cut_of_a_prefixed_text_adds_no_space(spm: Tokenizer) -> None:
    text = "hello wor " * (PIECE_CHARS // 5)
    ids = spm.encode(text, add_special=False)
    assert spm.decode(ids) == text
    solid = "hello" * (PIECE_CHARS // 2)  # cut inside a word: still the same text
    assert spm.decode(spm.encode(solid, add_special=False)) == solid


def test_cut_spares_tokens_with_spaces_inside(make_bpe: Make) -> None:
    tokens = list(make_bpe()["tokenizer.ggml.tokens"])
    tokens[269] = "tool call here"
    tokenizer = build_tokenizer(make_bpe(tokens=tokens))
    n = 2 * PIECE_CHARS // 14
    assert tokenizer.encode("tool call here" * n).count(269) >= n - 2


@pytest.mark.slow
def test_30_mb_prompt_encodes_in_bounded_time_while_others_go_on(smollm2: Tokenizer) -> None:
    text = "The capital of France is Paris, and so on. " * 700_000
    done = threading.Event()
    lengths: list[int] = []

    def encode() -> None:
        lengths.append(len(smollm2.encode(text)))
        done.set()

    thread = threading.Thread(target=encode)
    start = time.perf_counter()
    thread.start()
    turns = 0
    while not done.wait(0.05):
        assert smollm2.encode("hello")
        turns += 1
    thread.join()
    assert time.perf_counter() - start < 110
    assert lengths[0] == 11 * 700_000 + 1
    assert turns > 20  # short texts did not wait for the long one


# --- the encoder's process ---


def test_process_encodes_like_the_encoder_itself(smollm2: Tokenizer, bpe: Tokenizer) -> None:
    spec = encoder_spec(bpe.vocabulary)
    hosted, local = EncoderProcess(spec), Encoder(spec)
    try:
        segments = [("hello <s> world", False), ("<s>", True), ("", False), ("x" * 100_000, False)]
        assert hosted.encode(segments) == local.encode(segments)
        assert hosted.encode([]) == local.encode([])
    finally:
        hosted.close()
    assert isinstance(smollm2._encoder, EncoderProcess)
    assert isinstance(bpe._encoder, Encoder)


def test_process_that_dies_is_started_again(bpe: Tokenizer) -> None:
    hosted = EncoderProcess(encoder_spec(bpe.vocabulary))
    try:
        os.kill(hosted._worker.pid, signal.SIGKILL)
        assert hosted.encode([("hello", False)]).tolist() == [259]
    finally:
        hosted.close()
    with pytest.raises(GgufdError):
        hosted.encode([("hello", False)])


def test_process_ends_with_its_tokenizer_and_ignores_our_signals(bpe: Tokenizer) -> None:
    hosted = EncoderProcess(encoder_spec(bpe.vocabulary))
    process = hosted._worker._process
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    assert hosted.encode([("hello", False)]).tolist() == [259]
    assert process.poll() is None
    del hosted
    assert process.wait(timeout=5) is not None


def test_process_gets_nothing_of_our_environment(bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGUFD_API_KEY", "hidden")
    hosted = EncoderProcess(encoder_spec(bpe.vocabulary))
    environment = Path(f"/proc/{hosted._worker.pid}/environ").read_bytes()
    hosted.close()
    assert b"hidden" not in environment


def test_failure_to_build_is_the_files_fault(
    bpe: Tokenizer, make_bpe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("streamer.text.tokenizer.Encoder", fail)
    with pytest.raises(GGUFError, match=r"tokenizer\.ggml\.tokens"):
        build_tokenizer(make_bpe())
