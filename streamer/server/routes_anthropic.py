"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's object and events over the same runs."""

import contextlib
from typing import Any

from aiohttp import web

from streamer.errors import ClientError
from streamer.server.answers import event_stream, json_response, new_head, note_finishes, read_json
from streamer.server.api.anthropic import blocks, message_object, read_anthropic, stop_reason, usage_object
from streamer.server.api.errors import ANTHROPIC_TYPES
from streamer.server.api.results import Usage
from streamer.server.chatrun import ChatRun, ChatText
from streamer.server.generation import admitted, check_backpressure, prepare_chat
from streamer.server.middleware import STATE
from streamer.server.sequences import Progress
from streamer.server.sse import EventStream, event_frame


async def messages(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    async with admitted(state) as backend:
        call = read_anthropic(await read_json(request))
        check_backpressure(state, backend, 1)
        run = await prepare_chat(state, backend, call)
        head = new_head("msg_", backend.card.id)
        try:
            if call.generation.stream:
                return await _stream(request, run, head)
            await run.collect()
            answer = run.answers[0]
            assert answer.end is not None
            reason = stop_reason(answer.finish, answer.end.stop)
            content = blocks(answer.content, answer.reasoning, answer.calls)
            message = message_object(head, content, reason, usage_object(run.usage))
            return json_response({**message, "ggufd": run.details})
        finally:
            note_finishes(state, run.finishes)


COUNTABLE = 1 << 20  # tokens: more than any context here


async def count_tokens(request: web.Request) -> web.StreamResponse:
    async with admitted(request.app[STATE]) as backend:
        call = read_anthropic(await read_json(request), counting=True)
        return json_response({"input_tokens": len((await backend.text.encode_chat(call, COUNTABLE)).ids)})


def _error_frame(error: ClientError) -> bytes:
    kind = ANTHROPIC_TYPES.get(error.status, "api_error")
    return event_frame("error", {"type": "error", "error": {"type": kind, "message": error.message}})


async def _stream(request: web.Request, run: ChatRun, head: dict[str, Any]) -> web.StreamResponse:
    async with event_stream(request, _error_frame) as stream, contextlib.aclosing(run.items()) as items:
        writer = _BlockWriter(stream)
        begun = False
        async for item in items:
            if isinstance(item, Progress):
                stream.progress = f"prefill {item.processed}/{item.total}"
                continue
            if not begun:
                begun = True
                opening = message_object(head, [], (None, None), usage_object(Usage(run.n_prompt, 0, 0)))
                await stream.send(_frame("message_start", message=opening) + _frame("ping"))
            if isinstance(item, ChatText):
                await writer.write(item)
            else:
                await writer.finish()
                reason, stop = stop_reason(run.answers[0].finish, item.stop)
                delta = {"stop_reason": reason, "stop_sequence": stop}
                usage = usage_object(run.usage)
                await stream.send(_frame("message_delta", delta=delta, usage=usage, ggufd=run.details))
        await stream.close(_frame("message_stop"))
    return await stream.close()


def _frame(kind: str, **members: Any) -> bytes:
    return event_frame(kind, {"type": kind, **members})


class _BlockWriter:
    """Content blocks of a streamed message: one open at a time, numbered, each of one kind."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._index = -1
        self._has_said = False  # anything but thoughts
        self._kind: Any = None  # "text" | "thinking" | ("tool", number of the call)

    async def write(self, item: ChatText) -> None:
        delta = item.delta
        self._has_said = self._has_said or bool(delta.content or delta.calls)
        if delta.reasoning:
            await self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            await self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            await self._begin("text", {"type": "text", "text": ""})
            await self._delta({"type": "text_delta", "text": delta.content})
        for call in delta.calls:
            if call.id is not None:
                await self._begin(
                    ("tool", call.index), {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                )
            if call.arguments:
                await self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    async def _begin(self, kind: Any, block: dict[str, Any]) -> None:
        if self._kind == kind:
            return
        await self.end_block()
        self._kind = kind
        self._index += 1
        await self._stream.send(_frame("content_block_start", index=self._index, content_block=block))

    async def _delta(self, delta: dict[str, Any]) -> None:
        await self._stream.send(_frame("content_block_delta", index=self._index, delta=delta))

    async def finish(self) -> None:
        """The last block ends; an answer of no words has one all the same."""
        if not self._has_said:
            await self._begin("text", {"type": "text", "text": ""})
        await self.end_block()

    async def end_block(self) -> None:
        if self._kind is not None:
            self._kind = None
            await self._stream.send(_frame("content_block_stop", index=self._index))
