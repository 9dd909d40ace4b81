"""What users write is told apart from what templates write, whatever happens to it in between."""

from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.text.marking import NameFinder, choose_marks

NAMES = ["<|im_end|>", "<|im_start|>", "<s>", "</s>", "[INST]", "<|im_end|>x"]


def test_finder_prefers_the_leftmost_then_the_longest() -> None:
    finder = NameFinder(NAMES)
    text = "a<|im_end|>x<s><|im_end|><|im_en"
    assert [text[a:b] for a, b in finder.find(text)] == ["<|im_end|>x", "<s>", "<|im_end|>"]
    assert list(NameFinder([]).find(text)) == []
    upper = "<|IM_END|>[inst]"
    assert list(finder.find(upper)) == []
    assert [upper[a:b] for a, b in finder.find(upper, ignore_case=True)] == ["<|IM_END|>", "[inst]"]


def test_text_that_can_begin_no_name_needs_no_marks() -> None:
    assert choose_marks(NameFinder(NAMES), {"a": ["hello", 1, None]}) is None
    assert choose_marks(NameFinder(NAMES), {"a": ["2 < 3"]}) is not None
    assert choose_marks(NameFinder(NAMES), {"<": 1}) is not None


VALUES = st.recursive(
    st.text() | st.sampled_from(NAMES), lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=8
)


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_marks_break_every_name_and_can_be_undone(value: object) -> None:
    finder = NameFinder(NAMES)
    marks = choose_marks(finder, [value, "<"])
    assert marks is not None
    for form in (marks.strict(value), marks.lenient(value, finder)):
        text = repr(form)
        assert list(finder.find(text)) == []
        assert list(finder.find(text, ignore_case=True)) == [] or form == marks.strict(value)
    if isinstance(value, str):
        assert marks.restore(marks.strict(value)) == value
        assert marks.restore(marks.lenient(value, finder)) == value


def test_private_characters_of_the_user_are_not_taken_for_marks() -> None:
    finder = NameFinder(NAMES)
    text = chr(0x10F000) + chr(0x10F001) + "<"
    marks = choose_marks(finder, text)
    assert marks is not None
    assert marks.restore(marks.strict(text)) == text
