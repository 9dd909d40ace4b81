"""POST /v1/responses.

OpenAI's newer body to ChatCall, results to its response object (text and function tools).
"""

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
    string,
)
from streamer.server.api.calls import ChatCall
from streamer.server.api.chat import (
    check_function,
    read_content,
    read_messages,
    read_template_kwargs,
    read_tool_choice,
)
from streamer.server.api.results import Usage
from streamer.server.api.sampling import NEUTRAL_SAMPLERS, SAMPLING_FIELDS, read_generation

_OWN = {"n", "stream_options", "response_format"}
TABLE = Table(
    fields=(
        *(f for f in SAMPLING_FIELDS if f.name not in _OWN),
        Field("input", anything),
        Field("instructions", string),
        Field("max_output_tokens", integer(1, 1 << 30)),
        Field("tools", sequence),
        Field("tool_choice", anything),
        Field("parallel_tool_calls", boolean, True),
        Field("text", mapping),
        Field("chat_template_kwargs", mapping),
    ),
    neutral=NEUTRAL_SAMPLERS | {"background": (False,), "truncation": ("disabled",), "n": (1,)},
    refused={
        "response_format": "use text.format",
        "previous_response_id": "responses are not stored; send the conversation as input",
        "conversation": "conversations are not stored; send them as input",
        "prompt": "there are no stored prompts",
    },
)


def read_response(body: dict[str, Any]) -> ChatCall:
    values = read_fields(body, TABLE)
    if values["input"] is None:
        refuse("input is missing", "input", "missing_required_parameter")
    given = (values["text"] or {}).get("format")
    response_format = None if given is None else mapping("text.format", given)
    if response_format is not None and response_format.get("type") == "json_schema":
        response_format = {"type": "json_schema", "json_schema": response_format}
    filled = {**values, "n": 1, "stream_options": None, "response_format": response_format}
    tools = _tools(values["tools"] or [])
    return ChatCall(
        generation=read_generation(filled, max_tokens=values["max_output_tokens"], n_logprobs=None),
        messages=read_messages(_messages(values["instructions"], values["input"])),
        tools=tools,
        tool_choice=read_tool_choice(values["tool_choice"], tools),
        parallel_tool_calls=values["parallel_tool_calls"],
        template_kwargs=read_template_kwargs(values["chat_template_kwargs"]),
        model=values["model"],
        repeated={"instructions": values["instructions"], "text": {"format": given or {"type": "text"}}},
    )


def _messages(instructions: str | None, given: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        refuse("input must be a string or a list of items", "input")
    for i, item in enumerate(given):
        _item(f"input[{i}]", item, messages)
    return messages


def _item(place: str, item: Any, messages: list[dict[str, Any]]) -> None:
    """Message items as they are.

    Function calls join the assistant's turn, their outputs are tool messages.
    """
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        messages.append({"role": item.get("role"), "content": read_content(place, item.get("content"))})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = read_content(place, item.get("output"))
        messages.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id", ""))})
    elif kind != "reasoning":
        refuse(f"{place}: items of type {str(kind)[:40]!r} are not supported", "input")


def _tools(items: list[Any]) -> tuple[dict[str, Any], ...]:
    tools = []
    for i, item in enumerate(items):
        if not isinstance(item, dict) or item.get("type") != "function":
            refuse(f"tools[{i}]: only function tools are supported", "tools")
        tools.append({"type": "function", "function": check_function(f"tools[{i}]", item)})
    return tuple(tools)


# ---- answers -----------------------------------------------------------------------------------------------


def message_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [text_part(text)]
    return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_item(item_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": "completed"}


def call_item(
    item_id: str, call_id: str, name: str, arguments: str, status: str = "completed"
) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def response_object(
    head: dict[str, Any], call: ChatCall, output: list[Any], status: str, usage: Usage | None
) -> Any:
    """`status`: in_progress | completed | incomplete | failed."""
    sampling = call.generation.sampling
    return {
        "id": head["id"],
        "object": "response",
        "created_at": head["created"],
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "max_output_tokens": call.generation.max_tokens,
        "model": head["model"],
        "output": output,
        "parallel_tool_calls": call.parallel_tool_calls,
        "previous_response_id": None,
        "store": False,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "tool_choice": _tool_choice_object(call.tool_choice),
        "tools": [{"type": "function", "strict": False, **t["function"]} for t in call.tools],
        "truncation": "disabled",
        "metadata": {},
        "usage": None if usage is None else _usage_object(usage),
        **call.repeated,
    }


def _tool_choice_object(tool_choice: str) -> Any:
    kind, _, name = tool_choice.partition(":")
    return {"type": "function", "name": name} if kind == "function" else kind


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
