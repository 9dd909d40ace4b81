"""Tool calls are read from the stream in each form; whatever is no call stays content."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.text.held import JsonScanner, partial_suffix
from streamer.text.tools import (
    FORMS,
    GENERIC,
    ToolCallParser,
    ToolForm,
    choose_form,
    instructions,
    knows_tools,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "any": {}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
BY_NAME = {form.name: form for form in reversed(FORMS)} | {"generic": GENERIC}


def parse(form: str | ToolForm, text: str, pieces: int = 1) -> tuple[str, list[tuple[str, Any]]]:
    numbers = itertools.count()
    form = BY_NAME[form] if isinstance(form, str) else form
    parser = ToolCallParser(form, TOOLS, new_id=lambda: f"call_{next(numbers)}")
    content, calls = "", []
    for start in range(0, len(text), pieces):
        said, called = parser.push(text[start : start + pieces])
        content += said
        calls += called
    said, called = parser.finish()
    calls += called
    assert [c.id for c in calls] == [f"call_{i}" for i in range(len(calls))]
    return content + said, [(c.name, json.loads(c.arguments)) for c in calls]


CITY = ("get_weather", {"city": "Rome"})
ROME = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
CASES: list[tuple[str, str, str, list[Any]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        "",
        [CITY],
    ),
    (
        "hermes",
        'Let me see.\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_call>\n'
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}\n</tool_call>',
        "Let me see.",
        [("now", {}), CITY],
    ),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}', "", [("now", {})]),
    ("hermes", "<tool_call>not json</tool_call> x", "<tool_call>not json</tool_call> x", []),
    ("hermes", "a <tool_ b <tool_call", "a <tool_ b <tool_call", []),
    ("hermes", "<tool_call>", "<tool_call>", []),
    ("hermes", "just text \n", "just text \n", []),
    ("hermes", "", "", []),
    (
        "qwen3-coder",
        "ok\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=any>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        "ok",
        [("get_weather", {"city": "Rome", "days": 3, "any": [1, 2]})],
    ),
    (
        "qwen3-coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n<x>\n</parameter>\n</function>\n</tool_call>",
        "",
        [("get_weather", {"city": "12\n<x>"})],
    ),
    ("qwen3-coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
    ("qwen3-coder", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", [("now", {})]),
    ("llama-3", '{"name": "get_weather", "parameters": {"city": "Rome"}}', "", [CITY]),
    (
        "llama-3",
        f'<|python_tag|>{ROME}; {{"name": "now", "parameters": {{}}}}',
        "",
        [CITY, ("now", {})],
    ),
    ("llama-3", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama-3", '{"a": 1} and more', '{"a": 1} and more', []),
    ("llama-3", 'text {"name": "now", "parameters": {}}', 'text {"name": "now", "parameters": {}}', []),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}}]', "", [CITY]),
    ("generic", ' {"name": "now", "arguments": {}} ', "", [("now", {})]),
    ("generic", '{"function": {"name": "now", "arguments": {}}}', "", [("now", {})]),
    ("generic", '{"name": "now", "arg', '{"name": "now", "arg', []),
    ("generic", "[1, 2]", "[1, 2]", []),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>\n\nSo a b c.\n', "So a b c.\n", [("now", {})]),
    ("llama-3", f"{ROME}; ", "", [CITY]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
@pytest.mark.parametrize("pieces", [1, 3, 1000])
def test_calls_are_read_over_any_pieces(
    form: str, text: str, content: str, calls: list[Any], pieces: int
) -> None:
    assert parse(form, text, pieces) == (content, calls)


@given(text=st.text(alphabet='<tool_cal>/ {}"nme:\n', max_size=60))
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("form", ["hermes", "generic", "llama-3"])
def test_text_without_calls_is_lost_nowhere(form: str, text: str) -> None:
    content, calls = parse(form, text, 2)
    assert calls == []
    assert content == text


def test_text_before_a_call_streams_at_once() -> None:
    parser = ToolCallParser(BY_NAME["hermes"], TOOLS)
    assert parser.push("Hello there <to") == ("Hello there", [])
    assert parser.push("night") == (" <tonight", [])
    assert parser.push(" <tool_call>{") == ("", [])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }} <tool_call>\n{...}</tool_call>", "hermes"),
        ("<tool_call>\n<function=example>", "qwen3-coder"),
        ("<|start_header_id|> <|python_tag|>", "llama-3"),
        ('<|start_header_id|> {"name": f, "parameters": x}', "llama-3"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<|im_start|>", "generic"),
    ],
)
def test_form_is_chosen_by_the_template(template: str, name: str) -> None:
    assert choose_form(template).name == name


def test_instructions_name_every_tool() -> None:
    assert knows_tools("{% if tools %}")
    assert not knows_tools("{{ toolset }}")
    text = instructions(TOOLS)
    assert "get_weather" in text
    assert "now" in text


@given(st.text(alphabet="ab", max_size=12), st.text(alphabet="ab", min_size=1, max_size=6))
def test_partial_suffix_equals_the_definition(text: str, marker: str) -> None:
    expected = max(n for n in range(min(len(text), len(marker) - 1) + 1) if text.endswith(marker[:n]))
    assert partial_suffix(text, marker) == expected


VALUES = st.recursive(
    st.none() | st.text() | st.integers(), lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=8
)


@given(VALUES, st.text())
@settings(max_examples=100, deadline=None)
def test_scanner_finds_the_end_of_a_json_value(value: Any, rest: str) -> None:
    text = json.dumps([value])
    scanner, at = JsonScanner(), 0
    for piece in [(text + rest)[i : i + 3] for i in range(0, len(text + rest), 3)]:
        end = scanner.feed(piece)
        if end is not None:
            assert at + end == len(text)
            return
        at += len(piece)
    raise AssertionError("not found")
