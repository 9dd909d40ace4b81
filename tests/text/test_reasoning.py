"""Thoughts and answers are parted wherever the text is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.text.reasoning import ReasoningSplitter, opens_thinking, thinks


def split(text: str, pieces: int, *, opened: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened=opened)
    parts = [splitter.push(text[i : i + pieces]) for i in range(0, len(text), pieces)] + [splitter.finish()]
    return "".join(p[0] for p in parts), "".join(p[1] for p in parts)


CASES = [
    ("<think>\nlet me\n see\n</think>\n\nHello <b>", False, "let me\n see", "Hello <b>"),
    (" \n<think>a</think>b", False, "a", "b"),
    ("let me see</think>\n\nHello", True, "let me see", "Hello"),
    ("never ends  ", True, "never ends", ""),
    ("<think></think>x", False, "", "x"),
    ("<think>\n\n</think>\n\nx", False, "", "x"),
    ("Hello <think>a</think>", False, "", "Hello <think>a</think>"),
    ("<thin", False, "", "<thin"),
    ("  plain", False, "", "  plain"),
    ("<think>a < b </thin c</think>d", False, "a < b </thin c", "d"),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "opened", "reasoning", "content"), CASES)
@pytest.mark.parametrize("pieces", [1, 2, 5, 1000])
def test_thought_and_answer(text: str, opened: bool, reasoning: str, content: str, pieces: int) -> None:
    assert split(text, pieces, opened=opened) == (reasoning, content)


@given(st.text(alphabet="<think>/ \nab", max_size=60), st.integers(1, 9), st.booleans())
@settings(max_examples=300, deadline=None)
def test_pieces_make_no_difference(text: str, pieces: int, opened: bool) -> None:
    assert split(text, pieces, opened=opened) == split(text, 1000, opened=opened)


def test_thought_streams_while_it_goes_on() -> None:
    splitter = ReasoningSplitter()
    assert splitter.push("<think>one two") == ("one two", "")
    assert splitter.push(" three </th") == (" three", "")
    assert splitter.push("ink> yes") == ("", "yes")


def test_prompt_and_template() -> None:
    assert opens_thinking("assistant\n<think>\n")
    assert not opens_thinking("assistant\n<think>\n\n</think>\n\n")
    assert thinks("{{ '</think>' }}")
    assert not thinks("plain")
