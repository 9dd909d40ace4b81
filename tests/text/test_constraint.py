"""Answers stay inside their grammar; what cannot be enforced whole is refused, never left open."""

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streamer.errors import ClientError, GgufdError
from streamer.text import grammars
from streamer.text.constraint import ConstraintFactory, HostedConstraint
from streamer.text.tokenizer import Tokenizer
from streamer.text.tools import FORMS, GENERIC, ToolCallParser, ToolForm

HERMES, CODER, LLAMA = (next(f for f in FORMS if f.name == n) for n in ("hermes", "qwen3-coder", "llama-3"))
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"type": "string", "enum": ["c", "f"]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
PADDING = 50


@pytest.fixture(scope="module")
def factory(smollm2: Tokenizer) -> Iterator[ConstraintFactory]:
    factory = ConstraintFactory(smollm2, smollm2.n_tokens + PADDING)
    yield factory
    factory.close()


def allowed(constraint: HostedConstraint) -> set[int]:
    bits = np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def accepts(factory: ConstraintFactory, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether the whole text is an answer the grammar allows to end."""
    constraint = factory.compile(grammar)
    for i in tokenizer.encode(text, add_special=False):
        if i not in allowed(constraint):
            return False
        constraint.accept(i)
    return bool(tokenizer.end_ids & allowed(constraint))


OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "s": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
ACCEPTED = [
    (grammars.json_object(), '{"x": [1, {"y": null}]}', "[1]"),
    (grammars.json_schema(OBJECT), '{\n  "a": 5,\n  "s": "é\\n"\n}', '{"s": "x"}'),
    (grammars.json_schema(OBJECT), '{"a":5}', '{"a": "5"}'),
    (grammars.json_schema(True), "[1]", "[1"),
    (grammars.json_schema({"enum": ["x", 1]}), '"x"', '"y"'),
    (grammars.regex(r"[a-z]+\d{2}"), "abc12", "abc1"),
    (grammars.gbnf('root ::= ("yes" | "no") ws\nws ::= [ \\t\\n]*'), "yes ", "maybe"),
    (grammars.gbnf('root ::= "é\\u00e9" [0-9]{2,3}  # comment'), "éé123", "éé1"),
    (grammars.gbnf('root ::= start end{1,2}\nstart ::= "a"\nend ::= "b" # start'), "abb", "abbb"),
    (grammars.gbnf('root ::= a-b a_b aB\na-b ::= "x"\na_b ::= "y"\naB ::= "z"'), "xyz", "xxx"),
    (grammars.gbnf('root ::= [a\\-z]+ "\\-" [&&b~~]'), "a-z-&", "b-&"),
    (grammars.gbnf('root ::= "\\\\u0041"'), "\\u0041", "\\A"),
    (grammars.tool_calls(LLAMA, [WEATHER, NOW]), '{"name": "now", "parameters": {}}', '{"name": "x"}'),
    (grammars.tool_calls(GENERIC, [NOW], name="now"), '{"name": "now", "arguments": {}}', "hello"),
    (
        grammars.tool_calls(HERMES, [WEATHER]),
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "unit": "c"}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"unit": "c"}}\n</tool_call>',
    ),
    (
        grammars.tool_calls(CODER, [WEATHER, NOW]),
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRo\nme</p\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>",
    ),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), ACCEPTED)
def test_grammar_allows_what_it_says(
    factory: ConstraintFactory, smollm2: Tokenizer, grammar: str, good: str, bad: str
) -> None:
    assert accepts(factory, smollm2, grammar, good)
    assert not accepts(factory, smollm2, grammar, bad)


@pytest.mark.parametrize("said", [grammars.json_schema(OBJECT), grammars.tool_calls(GENERIC, [NOW])])
@pytest.mark.parametrize("control", [False, True])
def test_a_thought_before_a_constrained_answer_is_free(
    factory: ConstraintFactory, smollm2: Tokenizer, said: str, control: bool
) -> None:
    """SmolLM2 has no tags of thoughts; control tokens of its stand for them as control tokens."""
    answer = '{"a": 5}' if "integer" in said else '{"name": "now", "arguments": {}}'
    opening, close = ("<repo_name>", "<file_sep>") if control else ("<think>", "</think>")

    def ok(text: str, *, opened: bool) -> bool:
        grammar = grammars.after_thought(said, opened=opened, tags_are_control=control)
        constraint = factory.compile(grammar.replace("</think>", close).replace("<think>", opening))
        for i in smollm2.encode(text, add_special=False, parse_special=control):
            if i not in allowed(constraint):
                return False
            constraint.accept(i)
        return bool(smollm2.end_ids & allowed(constraint))

    assert ok(f"hm < <b>\n{close}\n\n{answer}", opened=True)
    assert not ok(answer, opened=True)  # the thought must end first
    assert not ok(f"hm{close}no", opened=True)
    assert ok(f"{opening}\nhm\n{close}\n\n{answer}", opened=False)
    assert ok(answer, opened=False)
    assert not ok(f"{opening}{answer}", opened=False)


REFUSED_SCHEMAS: list[Any] = [
    {"type": "objekt"},
    {"type": "object", "not": {"type": "string"}},
    {"$ref": "http://example.com/schema"},
    {"$ref": "#/$defs/nowhere"},
    {"type": "string", "pattern": "(?=x)"},
    {"type": "string", "pattern": "("},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"properties": 5},
    False,
    "text",
    None,
    [1],
]


@pytest.mark.parametrize("schema", REFUSED_SCHEMAS)
def test_schema_that_cannot_be_enforced_is_refused(factory: ConstraintFactory, schema: Any) -> None:
    with pytest.raises(ClientError) as caught:
        factory.compile(grammars.json_schema(schema))
    assert caught.value.status == 400


def properties(n: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)}}


CITIES = grammars.gbnf("root ::= " + " | ".join(f'"city{i}"' for i in range(2900)))
LONG_PATTERN = {"type": "string", "pattern": "(.{0,1000}){0,1000}"}
LONG_PARAMETER = {"type": "object", "properties": {"a": LONG_PATTERN}, "required": ["a"]}


@pytest.mark.parametrize(
    ("grammar", "good"),
    [(grammars.json_schema(properties(700)), '{"p3": "x", "p698": "y"}'), (CITIES, "city2898")],
)
def test_many_properties_and_alternatives_are_enforced(
    factory: ConstraintFactory, smollm2: Tokenizer, grammar: str, good: str
) -> None:
    assert accepts(factory, smollm2, grammar, good)


@pytest.mark.parametrize(
    "grammar",
    [
        grammars.json_schema(properties(3000)),
        grammars.json_schema(LONG_PATTERN),
        grammars.tool_calls(HERMES, [{"function": {"name": "f", "parameters": LONG_PARAMETER}}]),
    ],
    ids=["properties", "pattern", "pattern of a tool"],
)
def test_what_would_pass_a_limit_in_mid_answer_is_refused_at_the_start(
    factory: ConstraintFactory, grammar: str
) -> None:
    with pytest.raises(ClientError, match=r"too many|items") as caught:
        factory.compile(grammar)
    assert caught.value.status == 400


@pytest.mark.parametrize("options", [{"lenient": True}, {"whitespace_flexible": False}])
def test_schema_cannot_loosen_its_enforcement(factory: ConstraintFactory, options: dict[str, Any]) -> None:
    schema = {"type": "object", "not": {}, "x-guidance": options}
    with pytest.raises(ClientError):
        factory.compile(grammars.json_schema(schema))


@pytest.mark.parametrize(
    "text",
    [
        "root ::= missing",
        'rot ::= "a"',
        'root ::= "a',
        "",
        "root",
        'root ::= "\\q"',
        "(" * 5000,
        "root ::= " + "(" * 3000 + '"a"' + ")" * 3000,
        'root ::= "\\ud800"',
        "x" * (1 << 19),
        "\n".join(f"root ::= r{i}" for i in range(3000)),
    ],
)
def test_bad_gbnf_is_refused(factory: ConstraintFactory, text: str) -> None:
    with pytest.raises(ClientError) as caught:
        factory.compile(grammars.gbnf(text))
    assert caught.value.status == 400
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("pattern", ["(", "(?=a)b", "a" * (1 << 19)])
def test_bad_regex_is_refused(factory: ConstraintFactory, pattern: str) -> None:
    with pytest.raises(ClientError):
        factory.compile(grammars.regex(pattern))


@pytest.mark.parametrize(
    ("tools", "name"),
    [
        ([], None),
        ([NOW], "other"),
        ([{"function": {"name": 5}}], None),
        ([{"function": 5}], None),
        ([5], None),
        ([{"function": {"name": "x", "parameters": {"required": [[1]]}}}], None),
        ([{"function": {"name": "x", "parameters": {"properties": {"a": {"enum": 5}}}}}], None),
        ([{"function": {"name": 'x"y'}}], None),
        ([{"function": {"name": "x", "parameters": 5}}], None),
        ([{"function": {"name": "x", "parameters": {"type": "objekt"}}}], None),
    ],
)
@pytest.mark.parametrize("form", [HERMES, GENERIC, CODER], ids=lambda form: form.name)
def test_tool_choice_that_cannot_be_enforced_is_refused(
    factory: ConstraintFactory, tools: list[Any], name: str | None, form: ToolForm
) -> None:
    with pytest.raises(ClientError) as caught:
        factory.compile(grammars.tool_calls(form, tools, name=name))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
        {"type": "object", "properties": {"a": 5}},
        {"type": "object", "properties": {"a>b": {}}},
        {"type": "object", "properties": {"a": {"type": "objekt"}}},
        {"type": "object", "properties": {}, "required": ["a"]},
        {"type": "object", "properties": 5},
    ],
)
def test_xml_parameters_that_cannot_be_enforced_are_refused(
    factory: ConstraintFactory, parameters: dict[str, Any]
) -> None:
    with pytest.raises(ClientError):
        factory.compile(grammars.tool_calls(CODER, [{"function": {"name": "f", "parameters": parameters}}]))


def test_xml_parameters_may_refer_to_definitions(factory: ConstraintFactory, smollm2: Tokenizer) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "required": ["a"],
        "$defs": {"n": {"type": "integer"}},
    }
    grammar = grammars.tool_calls(CODER, [{"function": {"name": "f", "parameters": parameters}}])
    text = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert accepts(factory, smollm2, grammar, text.format(5))
    assert not accepts(factory, smollm2, grammar, text.format('"x"'))


# Nested and recursive models as pydantic writes them. Both tools have a definition P, of different contents.
PLAN: dict[str, Any] = {
    "function": {
        "name": "plan",
        "parameters": {
            "$defs": {
                "P": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
                "Node": {
                    "type": "object",
                    "properties": {"v": {"$ref": "#/$defs/P"}, "next": {"$ref": "#/$defs/Node"}},
                    "required": ["v"],
                    "additionalProperties": False,
                },
                "a/b": {"enum": [{"$ref": "#/$defs/P"}]},
            },
            "type": "object",
            "title": "Plan",
            "properties": {
                "a/~%": {"$ref": "#/$defs/Node"},
                "same": {"type": "array", "items": {"$ref": "#/$defs/P"}},
                "other": {"$ref": "#/properties/same"},
                "odd": {"$ref": "#/$defs/a~1b"},
                "child": {"$ref": "#"},
            },
            "required": ["a/~%"],
            "additionalProperties": False,
        },
    }
}
PLACE: dict[str, Any] = {
    "function": {
        "name": "place",
        "parameters": {
            "$defs": {"P": {"type": "boolean"}},
            "type": "object",
            "properties": {"at": {"$ref": "#/$defs/P"}},
            "required": ["at"],
            "additionalProperties": False,
        },
    }
}
PLANNED = [
    ("plan", {"a/~%": {"v": {"x": 1}, "next": {"v": {"x": 2}}}, "same": [{"x": 3}]}, True),
    ("plan", {"a/~%": {"v": {"x": 1}}, "other": [{"x": 3}], "odd": {"$ref": "#/$defs/P"}}, True),
    ("plan", {"a/~%": {"v": {"x": 1}}, "child": {"a/~%": {"v": {"x": 1}}}}, True),
    ("plan", {"a/~%": {"v": True}}, False),
    ("plan", {"a/~%": {"v": {"x": 1}}, "other": [True]}, False),
    ("plan", {"a/~%": {"v": {"x": 1}}, "child": {}}, False),
    ("place", {"at": True}, True),
    ("place", {"at": {"x": 1}}, False),
]


def written(form: ToolForm, name: str, arguments: dict[str, Any]) -> str:
    """A call as a model of that form writes it."""
    inside = json.dumps({"name": name, form.arguments_key: arguments})
    if form.xml:
        parameters = (f"<parameter={k}>\n{json.dumps(v)}\n</parameter>\n" for k, v in arguments.items())
        inside = f"<function={name}>\n{''.join(parameters)}</function>"
    return f"{form.opening}\n{inside}\n{form.closing}" if form.opening else inside


@pytest.mark.parametrize("form", [HERMES, LLAMA, CODER, GENERIC], ids=lambda form: form.name)
def test_references_in_parameters_mean_their_own_tools_schema(
    factory: ConstraintFactory, smollm2: Tokenizer, form: ToolForm
) -> None:
    grammar = grammars.tool_calls(form, [PLAN, PLACE])
    for name, arguments, good in PLANNED:
        text = written(form, name, arguments)
        assert accepts(factory, smollm2, grammar, text) == good, text


RECURSIVE = {"$defs": PLAN["function"]["parameters"]["$defs"], "$ref": "#/$defs/Node"}


def test_parameters_may_be_a_reference(factory: ConstraintFactory, smollm2: Tokenizer) -> None:
    grammar = grammars.tool_calls(HERMES, [{"function": {"name": "f", "parameters": RECURSIVE}}])
    assert accepts(factory, smollm2, grammar, written(HERMES, "f", {"v": {"x": 1}, "next": {"v": {"x": 2}}}))
    assert not accepts(factory, smollm2, grammar, written(HERMES, "f", {"v": 1}))


@pytest.mark.parametrize("form", [HERMES, GENERIC, CODER], ids=lambda form: form.name)
@pytest.mark.parametrize("kind", ["string", "array", ["string", "null"], None, 5])
def test_parameters_that_are_no_object_are_refused_with_the_tools_name(form: ToolForm, kind: Any) -> None:
    with pytest.raises(ClientError, match="'odd_one'") as caught:
        grammars.tool_calls(form, [NOW, {"function": {"name": "odd_one", "parameters": {"type": kind}}}])
    assert caught.value.status == 400


@pytest.mark.parametrize("parameters", [{}, {"type": ["object", "null"]}, {"properties": {}}])
def test_arguments_are_always_an_object(
    factory: ConstraintFactory, smollm2: Tokenizer, parameters: dict[str, Any]
) -> None:
    grammar = grammars.tool_calls(GENERIC, [{"function": {"name": "f", "parameters": parameters}}])
    assert accepts(factory, smollm2, grammar, '{"name": "f", "arguments": {}}')
    assert not accepts(factory, smollm2, grammar, '{"name": "f", "arguments": null}')
    assert not accepts(factory, smollm2, grammar, '{"name": "f", "arguments": "x"}')


@pytest.mark.parametrize("form", [HERMES, CODER], ids=lambda form: form.name)
@pytest.mark.parametrize("name", ["x" * 128, "mcp:server.do-it_now"])
def test_names_that_requests_may_have_can_be_demanded(
    factory: ConstraintFactory, smollm2: Tokenizer, form: ToolForm, name: str
) -> None:
    text = written(form, name, {})
    tool = {"function": {"name": name}}
    assert accepts(factory, smollm2, grammars.tool_calls(form, [tool], name=name), text)
    parser = ToolCallParser(form, [tool])
    assert [c.name for c in parser.push(text)[1] + parser.finish()[1]] == [name]


def test_mask_covers_the_logits_and_never_allows_padding(
    factory: ConstraintFactory, smollm2: Tokenizer
) -> None:
    constraint = factory.compile(grammars.regex("(?s:.*)"))
    assert len(constraint.mask()) == (smollm2.n_tokens + PADDING + 31) // 32 * 4
    ids = allowed(constraint)
    assert max(ids) < smollm2.n_tokens
    controls = {i for i in ids if smollm2.is_control(i)}
    assert controls == set(smollm2.end_ids)  # may end at once; other control tokens never


def test_end_is_allowed_only_where_the_answer_may_end(factory: ConstraintFactory, smollm2: Tokenizer) -> None:
    constraint = factory.compile(grammars.json_schema(OBJECT))
    text = '{"a": 12}'
    for i in smollm2.encode(text):
        assert not smollm2.end_ids & allowed(constraint)
        assert not constraint.is_finished
        constraint.accept(i)
    assert constraint.is_finished
    assert allowed(constraint) == set(smollm2.end_ids)


def test_id_that_is_not_allowed_is_our_fault(factory: ConstraintFactory, smollm2: Tokenizer) -> None:
    constraint = factory.compile(grammars.json_object())
    constraint.accept(smollm2.encode("x")[0])
    with pytest.raises(GgufdError):
        constraint.mask()


@pytest.mark.parametrize("form", [HERMES, LLAMA, CODER, GENERIC], ids=lambda form: form.name)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_sampled_under_tool_choice_parses_as_calls(
    factory: ConstraintFactory, smollm2: Tokenizer, form: ToolForm, seed: int
) -> None:
    dice = random.Random(seed)
    constraint = factory.compile(grammars.tool_calls(form, [WEATHER, NOW], parallel=False))
    ends = [i for t in ('"', "\n", "</", ">") for i in smollm2.encode(t)]
    ids: list[int] = []
    while not constraint.is_finished:
        choices = sorted(allowed(constraint) - smollm2.end_ids)
        if len(choices) > 1000:  # inside a string: end it soon
            choices = [i for i in ends if i in choices] or choices
        ids.append(dice.choice(choices))
        constraint.accept(ids[-1])
        if len(ids) > 200:
            return  # a number that goes on and on is no error
    parser = ToolCallParser(form, [WEATHER, NOW])
    text = smollm2.decode(ids)
    content, calls = parser.push(text)
    rest, more = parser.finish()
    assert content + rest == ""
    assert len(calls + more) == 1
    assert isinstance(json.loads((calls + more)[0].arguments), dict)


def test_constraints_of_several_requests_do_not_mix(factory: ConstraintFactory, smollm2: Tokenizer) -> None:
    numbers = [factory.compile(grammars.regex(f"{i}+x")) for i in range(4)]
    for _ in range(5):
        for i, constraint in enumerate(numbers):
            constraint.accept(smollm2.encode(str(i))[0])
        for i, constraint in reversed(list(enumerate(numbers))):
            assert smollm2.encode(str(i))[0] in allowed(constraint)
            assert smollm2.encode(str((i + 1) % 4))[0] not in allowed(constraint)


def test_compiling_goes_on_in_many_threads(factory: ConstraintFactory, smollm2: Tokenizer) -> None:
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            assert accepts(factory, smollm2, grammars.regex(f"[a-z]{{{n}}}"), "abcdefgh"[:n])
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
