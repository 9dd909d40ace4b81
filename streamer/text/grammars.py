"""Grammars for constrained answers, in llguidance's own language, from what a request asks for. Pure.

Refusals are ClientError 400: an answer is never less constrained than was asked.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from streamer.errors import ClientError
from streamer.text.reasoning import CLOSE, OPEN
from streamer.text.tools import ToolForm

MAX_GRAMMAR_CHARS = 1 << 18
_BLANK = r"/[ \n\r\t]{0,20}/"
# Bounded white space between JSON tokens: small models otherwise write blanks for ever.
_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": True,
    "whitespace_pattern": _BLANK.strip("/"),
    "lenient": False,
}
_NAME = re.compile(r"[\w.:-]{1,128}")
_PARAMETER = re.compile(r"[^<>\n]+")
_FLAT_KEYS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    | {"title", "description", "$schema", "strict"}
)
_WHOLE = "#/$defs/parameters"  # where a tool's parameters are in a document made for one of them
_MAPS = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_VALUES = frozenset({"const", "enum", "default", "example", "examples"})
_ENDED_THOUGHT = f'thought[suffix="{CLOSE}"]: /(?s:.*)/'
_MAX_RULES = 2000  # the converter's work grows with their square: a third of a second
# A GBNF grammar's literals, classes, comments and names; what is between them stays.
_GBNF_PART = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\r\n]*|(?<![\w-])[^\W\d][\w-]*', re.DOTALL
)
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def json_object() -> str:
    return json_schema({"type": "object"})


def json_schema(schema: Any) -> str:
    """Any JSON Schema that can be enforced whole; checked when it is compiled."""
    if not isinstance(schema, Mapping | bool):
        raise _refused("the JSON schema is not an object")
    if schema is False:
        raise _refused("the JSON schema allows nothing")
    try:
        text = json.dumps({} if schema is True else schema)
        grammar = str(LLMatcher.grammar_from_json_schema(_bounded(text), None, _JSON_OPTIONS))
    except (ValueError, RecursionError, TypeError) as error:
        raise _refused(f"the JSON schema cannot be used: {error}") from error
    return grammar


def regex(pattern: str) -> str:
    return str(LLMatcher.grammar_from_regex(_bounded(pattern)))


def gbnf(grammar: str) -> str:
    """llama-server's `grammar`: its rules with literals, classes, groups and repetitions."""
    grammar = _bounded(grammar)
    if grammar.count("::=") > _MAX_RULES:
        raise _refused(f"the grammar has more than {_MAX_RULES} rules")
    try:
        text = gbnf_to_lark(_plain_gbnf(grammar))
    except ClientError:
        raise
    except Exception as error:
        raise _refused(f"the grammar cannot be used: {str(error)[:200]}") from error
    return str(LLMatcher.grammar_from_lark(text))


def _plain_gbnf(grammar: str) -> str:
    """The same language in what the converter takes: no rule `start`, no names that differ in little, no
    escapes that it does not know or would mangle.
    """
    names = {"root": "root"}
    taken = {"root", "start"}

    def plain(match: re.Match[str]) -> str:
        part = match[0]
        if part[0] == "[":  # doubled, these are operators on sets in the language converted to
            return _ESCAPED.sub(_character, part).replace("&", r"\x26").replace("~", r"\x7e")
        if part[0] == '"':
            return _ESCAPED.sub(_character, part)
        if part[0] == "#":
            return part
        if part not in names:
            name = part
            while _folded(name) in taken:
                name += f"-{len(names)}"
            names[part] = name
            taken.add(_folded(name))
        return names[part]

    return _GBNF_PART.sub(plain, grammar)


def _folded(name: str) -> str:
    """As the converter renames rules, but for the case."""
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()


def after_thought(grammar: str, *, opened: bool, tags_are_control: bool) -> str:
    """`grammar` for what is said, free text for the thought before it: one that may come, or, when the prompt
    has `opened` it, one that must end first. `tags_are_control`: the tags are control tokens, not text.
    """
    parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    parts[0]["name"] = "answer"
    opening = OPEN if tags_are_control else _literal(OPEN)
    thought = f"thought: /(?s:.*)/ {CLOSE}" if tags_are_control else _ENDED_THOUGHT
    start = "thought" if opened else f"({opening} thought)?"
    rules = ("%llguidance {}", f"start: {start} blank @answer", thought, r'blank: "\n\n" | "\n" | ""')
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *parts]})


def tool_calls(
    form: ToolForm, tools: Sequence[Mapping[str, Any]], *, name: str | None = None, parallel: bool = True
) -> str:
    """Nothing but calls of `tools` in the model's own form. `name`: only that one (tool_choice)."""
    functions = [tool.get("function", tool) if isinstance(tool, Mapping) else tool for tool in tools]
    if not all(isinstance(f, Mapping) for f in functions):
        raise ClientError(400, "tools is no list of objects", param="tools")
    if name is not None:
        functions = [f for f in functions if f.get("name") == name]
        if not functions:
            raise ClientError(400, f"tool_choice names {name!r}, which is not in tools", param="tool_choice")
    if not functions:
        raise ClientError(400, "tool_choice needs tools", param="tools")
    if not all(isinstance(f.get("name"), str) and _NAME.fullmatch(f["name"]) for f in functions):
        raise ClientError(400, "a tool has no usable name", param="tools")
    rules = _xml_rules(functions) if form.xml else _json_rules(form, functions)
    several = parallel and bool(form.opening)
    one = "call"
    if form.opening:
        one = f"{_literal(form.opening + chr(10))} call {_literal(chr(10) + form.closing)}"
    start = f'start: one ("\\n" one)*\none: {one}' if several else f"start: {one}"
    return str(LLMatcher.grammar_from_lark(_bounded("\n".join(("%llguidance {}", start, *rules)))))


def _json_rules(form: ToolForm, functions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each tool's parameters are a document of their own, so that their references mean what they say."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions))), f"BLANK: {_BLANK}"]
    for i, function in enumerate(functions):
        parts = ("{", '"name"', ":", _quoted(function["name"]), ",", _quoted(form.arguments_key), ":")
        head = " ".join(f"{_literal(part)} BLANK" for part in parts)
        rules.append(f"call_{i}: HEAD_{i} arguments_{i} TAIL")
        rules.append(f"HEAD_{i}: {head}")
        rules.append(f"arguments_{i}: {_json(_parameters(function))}")
    return [*rules, 'TAIL: BLANK "}"']


def _xml_rules(functions: Sequence[Mapping[str, Any]]) -> list[str]:
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        schema = _flat_parameters(function)
        required = set(schema.get("required") or ())
        parts = [_literal(f"<function={function['name']}>\n")]
        for k, (key, value) in enumerate((schema.get("properties") or {}).items()):
            rule = f"value_{i}_{k}"
            rules.append(_xml_value(rule, _alone(schema, key) if '"$ref"' in _dumped(value) else value))
            part = f"({_literal(f'<parameter={key}>')} {rule})"
            parts.append(part if key in required else part + "?")
        rules.append(f"call_{i}: {' '.join(parts)} {_literal('</function>')}")
    return rules


def _xml_value(rule: str, schema: Mapping[str, Any]) -> str:
    end = "\n</parameter>\n"
    if schema.get("type") == "string" and not schema.keys() & {"enum", "const", "pattern", "format"}:
        return f"{rule}[suffix={_literal(end)}]: /\\n(?s:.*)/"
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
        return f"{rule}: {_literal(chr(10))} ({' | '.join(map(_literal, choices))}) {_literal(end)}"
    return f"{rule}: {_literal(chr(10))} {_json(schema)} {_literal(end)}"


def _alone(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A property's schema as a document of its own, with the one that its references point into."""
    whole = {k: v for k, v in schema.items() if k not in ("$schema", "$id")}
    name = quote(key.replace("~", "~0").replace("/", "~1"))
    return {"$ref": f"{_WHOLE}/properties/{name}", "$defs": {"parameters": _repointed(whole)}}


def _repointed(schema: Any) -> Any:
    """`schema` with its local references into `_WHOLE`; what are values, not schemas, stays."""
    if isinstance(schema, list):
        return [_repointed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = dict(schema)
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
            changed[keyword] = _WHOLE + value[1:].rstrip("/")
        elif keyword in _MAPS and isinstance(value, Mapping):
            changed[keyword] = {name: _repointed(item) for name, item in value.items()}
        elif keyword not in _VALUES:
            changed[keyword] = _repointed(value)
    return changed


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments are an object, whatever else they are."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kinds = parameters.get("type", "object") if isinstance(parameters, Mapping) else None
    if not isinstance(parameters, Mapping) or "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        what = f"the parameters of {function['name']!r} are no JSON schema of an object"
        raise ClientError(400, what, param="tools")
    return {**parameters, "type": "object"}


def _flat_parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters that can be written one by one: nothing in the schema relates them to each other."""
    schema = _parameters(function)
    properties = schema.get("properties") or {}
    unknown = schema.keys() - _FLAT_KEYS
    if unknown or not isinstance(properties, Mapping):
        what = f"the keywords {sorted(unknown)}" if unknown else "these properties"
        raise ClientError(400, f"a tool's parameters cannot have {what} with this model", param="tools")
    if not all(isinstance(value, Mapping) and _PARAMETER.fullmatch(key) for key, value in properties.items()):
        raise ClientError(400, "a tool's parameter has no usable name or schema", param="tools")
    required = schema.get("required") or []
    if not isinstance(required, list) or not all(isinstance(r, str) and r in properties for r in required):
        raise ClientError(400, "a tool requires a parameter that it does not describe", param="tools")
    return schema


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + _dumped({**schema, "x-guidance": _JSON_OPTIONS})


def _dumped(schema: Any) -> str:
    try:
        return json.dumps(schema)
    except (ValueError, RecursionError, TypeError) as error:
        raise ClientError(400, f"a tool's parameters cannot be used: {error}", param="tools") from error


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> str:
    return json.dumps(text)


def _character(match: re.Match[str]) -> str:
    """An escape that the converter would mangle or refuse, as the character itself."""
    if match[0] == r"\-":
        return r"\x2d"
    if not (match[1] or match[2]):
        return match[0]
    code = int(match[1] or match[2], 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise _refused(f"the grammar has {match[0]}, which is no character")
    character = chr(code)
    return "\\" + character if character in '"\\[]' else character


def _bounded(text: str) -> str:
    if not isinstance(text, str):
        raise _refused("a grammar must be a string")
    if len(text) > MAX_GRAMMAR_CHARS:
        raise _refused(f"the grammar has {len(text)} characters, the most is {MAX_GRAMMAR_CHARS}")
    return text


def _refused(message: str) -> ClientError:
    return ClientError(400, message, param="response_format")
