"""POST /v1/messages and count_tokens: Anthropic's body to ChatCall, results to its message and events."""

import json
from typing import Any

from streamer.server.api.body import (
    Field,
    Table,
    anything,
    boolean,
    integer,
    mapping,
    number,
    read_fields,
    refuse,
    sequence,
)
from streamer.server.api.calls import ChatCall
from streamer.server.api.chat import check_function, read_template_kwargs, read_tool_choice
from streamer.server.api.results import Usage
from streamer.server.api.sampling import NEUTRAL_SAMPLERS, SAMPLING_FIELDS, read_generation

_OWN = {"temperature", "stop", "n", "stream_options"}
TABLE = Table(
    fields=(
        *(f for f in SAMPLING_FIELDS if f.name not in _OWN),
        Field("messages", sequence),
        Field("system", anything),
        Field("max_tokens", integer(1, 1 << 30)),
        Field("temperature", number(0, 1), 1.0),
        Field("stop_sequences", sequence),
        Field("tools", sequence),
        Field("tool_choice", mapping),
        Field("thinking", mapping),
        Field("chat_template_kwargs", mapping),
        Field("disable_parallel_tool_use", boolean, False),
        Field("output_config", mapping),
        Field("output_format", mapping),
    ),
    neutral=NEUTRAL_SAMPLERS | {"n": (1,)},
    refused={
        "stop": "use stop_sequences",
        "mcp_servers": "the daemon reaches nothing outside",
        "container": "there are no containers here",
    },
)
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "error": "end_turn"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_anthropic(body: dict[str, Any], *, counting: bool = False) -> ChatCall:
    values = read_fields(body, TABLE)
    if values["max_tokens"] is None and not counting:
        refuse("max_tokens is missing", "max_tokens", "missing_required_parameter")
    if not values["messages"]:
        refuse("messages is missing or empty", "messages", "missing_required_parameter")
    stops = values["stop_sequences"] or []
    if not all(isinstance(x, str) and 1 <= len(x) <= 1024 for x in stops) or len(stops) > 16:
        refuse("stop_sequences must be at most 16 strings that are not empty", "stop_sequences")
    filled = {
        **values,
        "n": 1,
        "stream_options": None,
        "response_format": _response_format(values),
        "stop": tuple(stops),
    }
    tools = _tools(values["tools"] or [])
    messages = _system(values["system"]) + [
        m for i, x in enumerate(values["messages"]) for m in _message(i, x)
    ]
    if all(message["role"] == "system" for message in messages):
        refuse("messages hold nothing that a model could answer", "messages")
    choice = values["tool_choice"] or {}
    one_call = boolean(
        "tool_choice.disable_parallel_tool_use", choice.get("disable_parallel_tool_use", False)
    )
    return ChatCall(
        generation=read_generation(filled, max_tokens=values["max_tokens"], n_logprobs=None),
        messages=tuple(messages),
        tools=tools,
        tool_choice=_tool_choice(values["tool_choice"], tools),
        parallel_tool_calls=not (values["disable_parallel_tool_use"] or one_call),
        template_kwargs=read_template_kwargs(values["chat_template_kwargs"]),
        model=values["model"],
    )


def _response_format(values: dict[str, Any]) -> dict[str, Any] | None:
    """Anthropic's own names for a bound on the answer, or OpenAI's: at most one."""
    config = (values["output_config"] or {}).get("format")
    own = None if config is None else mapping("output_config.format", config)
    found = [x for x in (values["response_format"], values["output_format"], own) if x is not None]
    if len(found) > 1:
        refuse("give one of output_config.format, output_format and response_format", "output_config")
    return found[0] if found else None


def _system(value: Any) -> list[dict[str, Any]]:
    return [] if value is None else [{"role": "system", "content": _text("system", value)}]


def _text(place: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(f"{place} must be a string or a list of text blocks", "messages")
    texts = []
    for block in value:
        if (
            not isinstance(block, dict)
            or block.get("type") != "text"
            or not isinstance(block.get("text"), str)
        ):
            refuse(f"{place}: only text blocks are supported", "messages")
        texts.append(block["text"])
    return "".join(texts)


def _message(i: int, item: Any) -> list[dict[str, Any]]:
    """One Anthropic message becomes one of ours, or several: tool results stand on their own."""
    place = f"messages[{i}]"
    if not isinstance(item, dict) or item.get("role") not in ("user", "assistant", "system"):
        refuse(f"{place}.role must be user or assistant", "messages")
    content = item.get("content")
    if isinstance(content, str):
        return [{"role": item["role"], "content": content}]
    if not isinstance(content, list):
        refuse(f"{place}.content must be a string or a list of blocks", "messages")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content:
        _block(place, block, texts, calls, results)
    if not texts and not calls:
        return results
    message: dict[str, Any] = {"role": item["role"], "content": "".join(texts)}
    return [*results, message | ({"tool_calls": calls} if calls else {})]


def _block(place: str, block: Any, texts: list[str], calls: list[Any], results: list[Any]) -> None:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text" and isinstance(block.get("text"), str):
        texts.append(block["text"])
    elif (
        kind == "tool_use" and isinstance(block.get("name"), str) and isinstance(block.get("input", {}), dict)
    ):
        function = {"name": block["name"], "arguments": json.dumps(block.get("input", {}))}
        calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
    elif kind == "tool_result":
        content = _text(f"{place}.tool_result", block.get("content") or "")
        results.append(
            {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": content}
        )
    elif kind not in ("thinking", "redacted_thinking"):  # earlier thoughts are not shown to the model again
        refuse(f"{place}: blocks of type {str(kind)[:40]!r} are not supported", "messages")


def _tools(items: list[Any]) -> tuple[dict[str, Any], ...]:
    tools = []
    for i, item in enumerate(items):
        if not isinstance(item, dict) or item.get("type", "custom") != "custom":
            refuse(f"tools[{i}]: only custom tools are supported", "tools")
        named = {
            "name": item.get("name"),
            "description": item.get("description"),
            "parameters": item.get("input_schema"),
        }
        tools.append({"type": "function", "function": check_function(f"tools[{i}]", named)})
    return tuple(tools)


def _tool_choice(asked: dict[str, Any] | None, tools: tuple[dict[str, Any], ...]) -> str:
    if asked is None:
        return read_tool_choice(None, tools)
    kind = asked.get("type")
    if kind == "tool":
        return read_tool_choice({"name": asked.get("name")}, tools)
    if not isinstance(kind, str) or kind not in _CHOICES:
        refuse("tool_choice.type must be auto, any, tool or none", "tool_choice")
    return read_tool_choice(_CHOICES[kind], tools)


# ---- answers -----------------------------------------------------------------------------------------------


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def stop_reason(finish: str, stop_string: str | None) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    if stop_string is not None:
        return "stop_sequence", stop_string
    return STOP_REASONS.get(finish, "end_turn"), None


def blocks(content: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if reasoning:
        found.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if content or not tool_calls:
        found.append({"type": "text", "text": content})
    for call in tool_calls:
        found.append(tool_use_block(call["id"], call["function"]["name"], call["function"]["arguments"]))
    return found


def tool_use_block(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments) if arguments else {}
    except ValueError:
        parsed = {
            "arguments": arguments
        }  # the model wrote something that is no JSON: the client sees it as it is
    return {"type": "tool_use", "id": call_id, "name": name, "input": parsed}


def message_object(
    head: dict[str, Any], content: list[Any], reason: tuple[str | None, str | None], usage: Any
) -> Any:
    return {
        "id": head["id"],
        "type": "message",
        "role": "assistant",
        "model": head["model"],
        "content": content,
        "stop_reason": reason[0],
        "stop_sequence": reason[1],
        "usage": usage,
    }
