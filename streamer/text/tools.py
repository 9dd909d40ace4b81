"""Tool calls in generated text: which form a model writes them in, and reading them while they arrive. Pure.

A form is chosen by what the model's chat template contains (`FORMS`, first match). Text that looks like a
call but cannot be read as one is given back as content: nothing a model wrote is lost.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamer.text.held import JsonScanner, partial_suffix


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is the JSON text of an object, as OpenAI's `function.arguments`."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolForm:
    """How a model writes calls. `opening` and `closing` enclose one; without them the answer is JSON."""

    name: str
    signs: tuple[str, ...]  # all of these in the template mean this form
    opening: str = ""
    closing: str = ""
    prefixes: tuple[str, ...] = ()  # what may stand before bare JSON
    arguments_key: str = "arguments"
    xml: bool = False  # <function=NAME><parameter=NAME>value</parameter></function> inside


FORMS: tuple[ToolForm, ...] = (
    ToolForm("qwen3-coder", ("<tool_call>", "<function="), "<tool_call>", "</tool_call>", xml=True),
    ToolForm("hermes", ("<tool_call>",), "<tool_call>", "</tool_call>"),
    ToolForm("mistral", ("[TOOL_CALLS]",), prefixes=("[TOOL_CALLS]",)),
    ToolForm("llama-3", ("<|python_tag|>",), prefixes=("<|python_tag|>",), arguments_key="parameters"),
    ToolForm("llama-3", ("<|start_header_id|>", '"parameters"'), arguments_key="parameters"),
)
_SEPARATORS = " \t\r\n;,"  # between bare JSON calls
GENERIC = ToolForm("generic", ())
# Tags that must reach the parsers although some files make control tokens of them.
SHOWN_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")


def choose_form(template: str) -> ToolForm:
    """The form a template's model writes; generic JSON where the template tells nothing."""
    return next((form for form in FORMS if all(sign in template for sign in form.signs)), GENERIC)


def knows_tools(template: str) -> bool:
    """Whether a template renders tools; otherwise `instructions` go into the system message."""
    return re.search(r"\btools\b", template) is not None


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a model without a form of its own is told."""
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions (JSON schemas, one a line):\n"
        f"{listed}\n"
        "To call one, answer with nothing but a JSON object of this form:\n"
        '{"name": <function name>, "arguments": <object with its arguments>}'
    )


def spoken(function: Mapping[str, Any]) -> str:
    """A call as `instructions` ask for it."""
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {text}}}'


@dataclass
class _Read:
    """What one push produced."""

    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


class ToolCallParser:
    """`push(text) -> (content, calls)`: the text that is certainly no call, and the calls now complete.

    White space next to calls is dropped. `tools`: the request's; a bare JSON object counts only if it names
    one of them, and their schemas give the types of XML parameters.
    """

    def __init__(
        self,
        form: ToolForm,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
    ) -> None:
        self._form, self._new_id = form, new_id
        self._parameters = dict(map(_named_properties, tools))
        self._held = ""
        self._lead = ""  # what stood before the JSON that is being scanned
        self._blank = ""  # white space that is content only if content follows
        self._inside = False  # between opening and closing
        self._said = self._called = self._after_call = False
        self._scanner: JsonScanner | None = None
        self._scanned = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        read = _Read()
        step = self._tagged if self._form.opening else self._bare
        while step(read):
            pass
        return "".join(read.content), read.calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest, once no more comes: a call that lacks only its closing tag counts."""
        read = _Read()
        held, self._held = self._held, ""
        if self._inside or (held and not (self._called and not held.strip(_SEPARATORS))):
            calls = self._read_calls(held) if self._inside or self._scanner else []
            if calls:
                self._add(read, calls)
            else:
                self._say(read, (self._form.opening if self._inside else self._lead) + held)
        if self._blank and not self._after_call:
            read.content.append(self._blank)
        self._blank = ""
        return "".join(read.content), read.calls

    def _tagged(self, read: _Read) -> bool:
        """One step over text with tags around calls; False when more text is needed."""
        tag = self._form.closing if self._inside else self._form.opening
        before, found, after = self._held.partition(tag)
        if not found:
            if not self._inside:
                keep = partial_suffix(before, tag)
                self._say(read, before[: len(before) - keep])
                self._held = before[len(before) - keep :]
            return False
        if self._inside:
            calls = self._read_calls(before)
            if calls:
                self._add(read, calls)
            else:
                self._say(read, self._form.opening + before + tag)
        else:
            self._say(read, before)
        self._held, self._inside = after, not self._inside
        return True

    def _bare(self, read: _Read) -> bool:
        """One step over an answer that is JSON calls from its beginning, or no call at all."""
        if self._said:
            self._say(read, self._held)
            self._held = ""
            return False
        if self._scanner is None:
            begun = self._held.lstrip(_SEPARATORS if self._called else None)
            for prefix in self._form.prefixes:
                begun = begun.removeprefix(prefix).lstrip()
                if begun and prefix.startswith(begun):
                    return False
            if not begun:
                return False
            if begun[0] not in "{[":
                self._say(read, begun if self._called else self._held)
                self._held = ""
                return False
            self._scanner, self._scanned = JsonScanner(), 0
            self._lead, self._held = self._held[: len(self._held) - len(begun)], begun
        end = self._scanner.feed(self._held[self._scanned :])
        if end is None:
            self._scanned = len(self._held)
            return False
        value, self._held = self._held[: self._scanned + end], self._held[self._scanned + end :]
        self._scanner = None
        calls = self._read_calls(value)
        if calls:
            self._add(read, calls)
        else:
            self._say(read, self._lead + value)
        self._lead = ""
        return bool(self._held)

    def _say(self, read: _Read, text: str) -> None:
        """Content, without the white space at its end until more content follows."""
        text = self._blank + text
        body = text.rstrip()
        self._blank = text[len(body) :]
        if body:
            read.content.append(body.lstrip() if self._after_call else body)
            self._said, self._after_call = True, False

    def _add(self, read: _Read, calls: list[ToolCall]) -> None:
        read.calls += calls
        self._called, self._after_call, self._blank = True, True, ""

    def _read_calls(self, text: str) -> list[ToolCall]:
        """The calls that a block is, or nothing when it is no call."""
        if self._form.xml and "<function=" in text:
            return self._read_xml(text)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        calls = [self._read_object(item) for item in (value if isinstance(value, list) else [value])]
        return [c for c in calls if c is not None] if all(calls) else []

    def _read_object(self, value: Any) -> ToolCall | None:
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        if not self._form.opening and self._parameters and value["name"] not in self._parameters:
            return None
        arguments: Any = next((value[k] for k in ("arguments", "parameters") if k in value), {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return None
        if not isinstance(arguments, dict):
            return None
        return self._call(value["name"], arguments)

    def _read_xml(self, text: str) -> list[ToolCall]:
        calls = []
        for match in re.finditer(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", text, re.DOTALL):
            name = match[1].strip()
            properties = self._parameters.get(name, {})
            arguments = {
                key.strip(): _typed(value, properties.get(key.strip()))
                for key, value in re.findall(
                    r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", match[2], re.DOTALL
                )
            }
            calls.append(self._call(name, arguments))
        return calls

    def _call(self, name: str, arguments: dict[str, Any]) -> ToolCall:
        return ToolCall(self._new_id(), name, json.dumps(arguments, ensure_ascii=False))


def _named_properties(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """A tool's name and the schemas of its parameters, whatever its own schema looks like."""
    function = tool.get("function", tool)
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return str(function.get("name")), properties if isinstance(properties, Mapping) else {}


def _typed(text: str, schema: Any) -> Any:
    """An XML parameter's value: text where the schema wants text, else the JSON value it spells."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = {kinds} if isinstance(kinds, str) else set(kinds or ())
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        lowered = text.strip().lower()
        return {"true": True, "false": False, "none": None}.get(lowered, text)
    return text if "string" in kinds and not isinstance(value, dict | list) and value is not None else value
