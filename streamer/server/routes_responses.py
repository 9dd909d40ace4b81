"""POST /v1/responses: OpenAI's response object and its events over the same runs."""

import contextlib
import uuid
from typing import Any

from aiohttp import web

from streamer.errors import ClientError
from streamer.server.answers import event_stream, json_response, new_head, note_finishes, read_json
from streamer.server.api.calls import ChatCall
from streamer.server.api.responses import (
    call_item,
    message_item,
    read_response,
    reasoning_item,
    response_object,
    text_part,
)
from streamer.server.chatrun import ChatAnswer, ChatRun, ChatText
from streamer.server.generation import admitted, check_backpressure, prepare_chat
from streamer.server.middleware import STATE
from streamer.server.sequences import Progress
from streamer.server.sse import EventStream, event_frame


async def responses(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    async with admitted(state) as backend:
        call = read_response(await read_json(request))
        check_backpressure(state, backend, 1)
        run = await prepare_chat(state, backend, call)
        head = new_head("resp_", backend.card.id)
        try:
            if call.generation.stream:
                return await _stream(request, call, run, head)
            await run.collect()
            answer = run.answers[0]
            output = _output(answer)
            response = response_object(head, call, output, _status(answer), run.usage)
            return json_response({**response, "ggufd": run.details})
        finally:
            note_finishes(state, run.finishes)


def _status(answer: ChatAnswer) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


def _output(answer: ChatAnswer) -> list[dict[str, Any]]:
    items = []
    if answer.reasoning:
        items.append(reasoning_item(_new_id("rs_"), answer.reasoning))
    if answer.content or not answer.calls:
        items.append(message_item(_new_id("msg_"), answer.content, _status(answer)))
    for call in answer.calls:
        function = call["function"]
        items.append(call_item(_new_id("fc_"), call["id"], function["name"], function["arguments"]))
    return items


def _new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


async def _stream(
    request: web.Request, call: ChatCall, run: ChatRun, head: dict[str, Any]
) -> web.StreamResponse:
    writer: _ItemWriter | None = None

    def error_frame(error: ClientError) -> bytes:
        failure = {
            "type": "error",
            "code": str(error.code or error.status),
            "message": error.message,
            "param": None,
        }
        return event_frame("error", {**failure, "sequence_number": writer.number if writer else 0})

    async with event_stream(request, error_frame) as stream, contextlib.aclosing(run.items()) as items:
        writer = _ItemWriter(stream)
        begun = False
        async for item in items:
            if isinstance(item, Progress):
                stream.progress = f"prefill {item.processed}/{item.total}"
                continue
            if not begun:
                begun = True
                opening = response_object(head, call, [], "in_progress", None)
                await writer.send("response.created", response=opening)
                await writer.send("response.in_progress", response=opening)
            if isinstance(item, ChatText):
                await writer.write(item)
        answer = run.answers[0]
        await writer.finish(_status(answer))
        final = response_object(head, call, writer.done, _status(answer), run.usage)
        kind = "response.incomplete" if answer.finish == "length" else "response.completed"
        await writer.send(kind, response={**final, "ggufd": run.details})
    return await stream.close()


class _ItemWriter:
    """Output items of a streamed response: one open at a time; every event has its number."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self.number = 0
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._key: Any = None
        self._text = ""

    async def send(self, kind: str, **members: Any) -> None:
        await self._stream.send(event_frame(kind, {"type": kind, "sequence_number": self.number, **members}))
        self.number += 1

    async def write(self, item: ChatText) -> None:
        delta = item.delta
        if delta.reasoning:
            await self._begin("reasoning", {"type": "reasoning", "id": _new_id("rs_"), "summary": []})
            await self._grow("response.reasoning_text.delta", delta.reasoning, content_index=0)
        if delta.content:
            await self._begin_text()
            await self._grow("response.output_text.delta", delta.content, content_index=0, logprobs=[])
        for call in delta.calls:
            if call.id is not None:
                opened = call_item(_new_id("fc_"), call.id, str(call.name), "", "in_progress")
                await self._begin(("call", call.index), opened)
            if call.arguments:
                await self._grow("response.function_call_arguments.delta", call.arguments)

    def _place(self, content_index: int | None = None) -> dict[str, Any]:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self.done)}
        return place if content_index is None else {**place, "content_index": content_index}

    async def _begin(self, key: Any, item: dict[str, Any]) -> None:
        if self._key == key:
            return
        await self.end_item()
        self._key, self._open, self._text = key, item, ""
        await self.send("response.output_item.added", output_index=len(self.done), item=item)

    async def _begin_text(self) -> None:
        if self._key != "text":
            await self._begin("text", message_item(_new_id("msg_"), None, "in_progress"))
            await self.send("response.content_part.added", **self._place(0), part=text_part(""))

    async def _grow(self, kind: str, text: str, **members: Any) -> None:
        self._text += text
        await self.send(kind, **self._place(), delta=text, **members)

    async def finish(self, status: str) -> None:
        """The last item ends as the answer does; an answer without words or calls has an empty message."""
        if self._key in (None, "reasoning") and all(item["type"] == "reasoning" for item in self.done):
            await self._begin_text()
        await self.end_item(status)

    async def end_item(self, status: str = "completed") -> None:
        if self._open is None:
            return
        item_id = self._open["id"]
        if self._key == "reasoning":
            await self.send("response.reasoning_text.done", **self._place(0), text=self._text)
            item = reasoning_item(item_id, self._text)
        elif self._key == "text":
            await self.send("response.output_text.done", **self._place(0), text=self._text, logprobs=[])
            await self.send("response.content_part.done", **self._place(0), part=text_part(self._text))
            item = message_item(item_id, self._text, status)
        else:
            name = self._open["name"]
            await self.send(
                "response.function_call_arguments.done", **self._place(), arguments=self._text, name=name
            )
            item = call_item(item_id, self._open["call_id"], name, self._text)
        await self.send("response.output_item.done", output_index=len(self.done), item=item)
        self.done.append(item)
        self._open = self._key = None
