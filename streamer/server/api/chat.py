"""POST /v1/chat/completions: body to ChatCall, results to OpenAI's chat objects."""

import re
from typing import Any

from streamer.server.api.body import (
    Field,
    Table,
    anything,
    boolean,
    integer,
    mapping,
    read_fields,
    refuse,
    sequence,
)
from streamer.server.api.calls import ChatCall
from streamer.server.api.results import Entry, Usage, logprob_entry, usage_object
from streamer.server.api.sampling import MAX_LOGPROBS, NEUTRAL_SAMPLERS, SAMPLING_FIELDS, read_generation

MAX_MESSAGES, MAX_TOOLS = 4096, 256
ROLES = ("system", "developer", "user", "assistant", "tool")  # looked up by ==: a role may be any JSON

TABLE = Table(
    fields=(
        *SAMPLING_FIELDS,
        Field("messages", sequence),
        Field("max_tokens", integer(-1, 1 << 30)),
        Field("max_completion_tokens", integer(-1, 1 << 30)),
        Field("logprobs", boolean, False),
        Field("top_logprobs", integer(0, MAX_LOGPROBS)),
        Field("tools", sequence),
        Field("tool_choice", anything),
        Field("parallel_tool_calls", boolean, True),
        Field("chat_template_kwargs", mapping),
    ),
    neutral=NEUTRAL_SAMPLERS | {"modalities": (["text"],), "echo": (False,)},
    refused={
        "audio": "the models served here give text",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "web_search_options": "the daemon reaches nothing outside",
    },
)


def read_chat(body: dict[str, Any]) -> ChatCall:
    values = read_fields(body, TABLE)
    if values["messages"] is None:
        refuse("messages is missing", "messages", "missing_required_parameter")
    if values["top_logprobs"] is not None and not values["logprobs"]:
        refuse("top_logprobs needs logprobs: true", "top_logprobs")
    max_tokens = (
        values["max_tokens"] if values["max_completion_tokens"] is None else values["max_completion_tokens"]
    )
    if max_tokens == 0:
        refuse("max_tokens must be at least 1", "max_tokens")
    n_logprobs = (values["top_logprobs"] or 0) if values["logprobs"] else None
    tools = read_tools(values["tools"])
    return ChatCall(
        generation=read_generation(values, max_tokens=max_tokens, n_logprobs=n_logprobs),
        messages=read_messages(values["messages"]),
        tools=tools,
        tool_choice=read_tool_choice(values["tool_choice"], tools),
        parallel_tool_calls=values["parallel_tool_calls"],
        template_kwargs=read_template_kwargs(values["chat_template_kwargs"]),
        model=values["model"],
    )


# ---- messages ----------------------------------------------------------------------------------------------


def read_messages(items: list[Any]) -> tuple[dict[str, Any], ...]:
    if not 1 <= len(items) <= MAX_MESSAGES:
        refuse(f"messages must hold 1 to {MAX_MESSAGES} messages", "messages")
    return tuple(_message(f"messages[{i}]", item) for i, item in enumerate(items))


def _message(place: str, item: Any) -> dict[str, Any]:
    if not isinstance(item, dict) or item.get("role") not in ROLES:
        refuse(f"{place}.role must be one of {', '.join(sorted(ROLES))}", "messages")
    role = "system" if item["role"] == "developer" else item["role"]
    message: dict[str, Any] = {"role": role, "content": read_content(place, item.get("content"))}
    if role == "assistant" and item.get("tool_calls"):
        message["tool_calls"] = [
            _tool_call(place, x) for x in sequence(f"{place}.tool_calls", item["tool_calls"])
        ]
    elif message["content"] is None:
        refuse(f"{place}.content is missing", "messages")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(item.get(name), str):
            message[name] = item[name]
    return message


def read_content(place: str, content: Any) -> str | None:
    """A string, or parts of type text (and refusal), joined. Other parts are refused by name."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(f"{place}.content must be a string or a list of parts", "messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            refuse(
                f"{place}.content: parts of type {str(kind)[:40]!r} are not supported, only text", "messages"
            )
        if not isinstance(text, str):
            refuse(f"{place}.content: a part of type {kind} needs its text", "messages")
        texts.append(text)
    return "".join(texts)


def _tool_call(place: str, item: Any) -> dict[str, Any]:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        refuse(f"{place}.tool_calls: each needs function.name", "messages")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str | dict):
        refuse(f"{place}.tool_calls: function.arguments must be a JSON string", "messages")
    call_id = item.get("id") if isinstance(item.get("id"), str) else ""
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


# ---- tools -------------------------------------------------------------------------------------------------


def read_tools(items: list[Any] | None) -> tuple[dict[str, Any], ...]:
    items = items or []
    if len(items) > MAX_TOOLS:
        refuse(f"tools may have at most {MAX_TOOLS} entries", "tools")
    return tuple(_tool(i, item) for i, item in enumerate(items))


def _tool(i: int, item: Any) -> dict[str, Any]:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(function, dict) or item.get("type", "function") != "function":
        refuse(f"tools[{i}] must be of type function", "tools")
    return {"type": "function", "function": check_function(f"tools[{i}].function", function)}


def check_function(place: str, function: dict[str, Any]) -> dict[str, Any]:
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.:-]{1,128}", name):
        refuse(f"{place}.name must be 1 to 128 letters, digits, or any of _ . : -", "tools")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        refuse(f"{place}.parameters must be a JSON schema object", "tools")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        refuse(f"{place}.description must be a string", "tools")
    return {
        "name": name,
        "description": description or "",
        "parameters": parameters if parameters is not None else {"type": "object", "properties": {}},
    }


def read_tool_choice(asked: Any, tools: tuple[dict[str, Any], ...]) -> str:
    """none | auto | required | function:NAME. Required and a name need tools to choose from."""
    if asked is None:
        return "auto" if tools else "none"
    if isinstance(asked, dict):
        function = asked.get("function")
        name = function.get("name") if isinstance(function, dict) else asked.get("name")
        if name not in [t["function"]["name"] for t in tools]:
            refuse("tool_choice names a function that is not in tools", "tool_choice")
        return f"function:{name}"
    if asked not in ("none", "auto", "required"):
        refuse("tool_choice must be none, auto, required or a function", "tool_choice")
    if asked == "required" and not tools:
        refuse("tool_choice required needs tools", "tool_choice")
    return str(asked) if tools else "none"


def read_template_kwargs(asked: dict[str, Any] | None) -> dict[str, Any]:
    """Further variables of the template, scalars only; those we set ourselves cannot be replaced."""
    asked = asked or {}
    own = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
    for name, value in asked.items():
        if name in own or not name.isidentifier() or not isinstance(value, str | int | float | bool | None):
            refuse(f"chat_template_kwargs: {name[:40]!r} is not allowed", "chat_template_kwargs")
    return asked


# ---- answers -----------------------------------------------------------------------------------------------


def chat_choice(
    index: int, message: dict[str, Any], entries: list[Entry] | None, finish: str
) -> dict[str, Any]:
    return {"index": index, "message": message, "logprobs": chat_logprobs(entries), "finish_reason": finish}


def chat_message(content: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if tool_calls:
        message["content"] = content or None
        message["tool_calls"] = tool_calls
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def chat_logprobs(entries: list[Entry] | None) -> dict[str, Any] | None:
    return None if entries is None else {"content": [logprob_entry(e) for e in entries], "refusal": None}


def chat_object(head: dict[str, Any], choices: list[Any], usage: Usage, details: Any) -> dict[str, Any]:
    return {
        **head,
        "object": "chat.completion",
        "choices": choices,
        "usage": usage_object(usage),
        "ggufd": details,
    }


def chunk_choice(
    index: int, delta: dict[str, Any], entries: list[Entry] | None, finish: str | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": chat_logprobs(entries), "finish_reason": finish}
