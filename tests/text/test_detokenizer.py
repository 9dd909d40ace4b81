"""Streams out whole characters, invents nothing, leaks no stop string."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.text.detokenizer import Detokenizer, StopMatcher
from streamer.text.tokenizer import Tokenizer


def pushed(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def test_character_split_over_tokens_comes_when_it_is_whole(bpe: Tokenizer, spm: Tokenizer) -> None:
    assert pushed(Detokenizer(bpe), list(b"\xf0\x9f\x98\x80")) == ["", "", "", "😀", ""]
    assert pushed(Detokenizer(spm), [3 + b for b in b"\xf0\x9f\x98\x80a"]) == ["", "", "", "😀", "a", ""]


def test_invalid_bytes_become_replacement_characters_only_when_certain(bpe: Tokenizer) -> None:
    assert pushed(Detokenizer(bpe), [0xF0, 0x9F, ord("a")]) == ["", "", "�a", ""]
    assert pushed(Detokenizer(bpe), [0xFF]) == ["�", ""]
    assert pushed(Detokenizer(bpe), [0xE2, 0x82]) == ["", "", "�"]


def test_control_tokens_are_hidden_unless_asked_for(bpe: Tokenizer) -> None:
    ids = [259, 266, 269]
    assert "".join(pushed(Detokenizer(bpe), ids)) == "hello<tool_call>"
    assert "".join(pushed(Detokenizer(bpe, special=True), ids)) == "hello<|im_end|><tool_call>"
    assert "".join(pushed(Detokenizer(bpe, shown={266}), [*ids, 267])) == "hello<|im_end|><tool_call>"


def test_continuation_keeps_its_leading_space(spm: Tokenizer) -> None:
    hello = spm.ids_by_text["▁hello"]
    assert "".join(pushed(Detokenizer(spm), [hello, hello])) == " hello hello"
    assert "".join(pushed(Detokenizer(spm, at_start=True), [1, hello, hello])) == "hello hello"


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("fixture", ["bpe", "spm"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_together_are_the_whole_decoding(
    fixture: str, special: bool, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(fixture)
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_tokens - 1), max_size=40))
    pieces = pushed(Detokenizer(tokenizer, special=special, at_start=True), ids)
    assert "".join(pieces) == tokenizer.decode(ids, special=special)
    for piece in pieces:
        piece.encode()


# --- stop strings ---


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the first stop string to be completed, a character at a time."""
    for end in range(1, len(text) + 1):
        found = max((s for s in stops if s and text[:end].endswith(s)), key=len, default=None)
        if found is not None:
            return text[: end - len(found)], found
    return text, None


TEXT = st.text(alphabet="abc", max_size=40)


@given(
    text=TEXT,
    stops=st.lists(st.text(alphabet="abc", max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 40)),
)
@settings(max_examples=400, deadline=None)
def test_stop_matcher_equals_the_naive_search_over_any_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    bounds = sorted({0, len(text), *(c for c in cuts if c <= len(text))})
    emitted = ""
    for start, end in itertools.pairwise(bounds):
        piece, stopped = matcher.push(text[start:end])
        emitted += piece
        assert not any(s in emitted for s in stops if s)
        assert stopped == (matcher.stopped is not None)
    emitted += matcher.flush()
    assert (emitted, matcher.stopped) == naive(text, stops)


@given(text=TEXT, stop=st.text(alphabet="abc", min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stop: str) -> None:
    matcher = StopMatcher([stop])
    emitted, stopped = matcher.push(text)
    if not stopped:
        held = text[len(emitted) :]
        assert stop.startswith(held)
        assert not any(stop.startswith(text[-n:]) for n in range(len(held) + 1, min(len(text), len(stop))))


def test_stop_string_over_tokens() -> None:
    matcher = StopMatcher(["<END>", "\nUser:"])
    assert matcher.push("Hi\nUs") == ("Hi", False)
    assert matcher.push("ing <EN") == ("\nUsing ", False)
    assert matcher.push("D> rest") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.stopped == "<END>"
    assert matcher.flush() == ""


def test_no_stop_strings_hold_nothing_back() -> None:
    assert StopMatcher([]).push("abc") == ("abc", False)
    assert StopMatcher([""]).push("abc") == ("abc", False)
