"""POST /v1/chat/completions, /v1/completions and /v1/embeddings: calls in, objects or streams out."""

import contextlib
from typing import Any

from aiohttp import web

from streamer.engine.request import FinishEvent
from streamer.server.answers import event_stream, json_response, new_head, note_finishes, read_json
from streamer.server.api.calls import ChatCall, CompletionCall
from streamer.server.api.chat import chat_choice, chat_message, chat_object, chunk_choice, read_chat
from streamer.server.api.completions import completion_choice, completion_object, read_completion
from streamer.server.api.embeddings import embedding_object, read_embedding
from streamer.server.api.results import Entry, details_object, usage_object, usage_of
from streamer.server.chatrun import ChatDelta, ChatRun, ChatText
from streamer.server.generation import (
    admitted,
    check_backpressure,
    prepare_chat,
    prepare_completion,
    prepare_embeddings,
)
from streamer.server.middleware import STATE
from streamer.server.sequences import End, Prepared, Progress, Text, Vector, run_sequences
from streamer.server.sse import DONE, data_frame
from streamer.server.state import Backend

# ---- chat --------------------------------------------------------------------------------------------------


async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    async with admitted(state) as backend:
        call = read_chat(await read_json(request))
        check_backpressure(state, backend, call.generation.n)
        run = await prepare_chat(state, backend, call)
        head = new_head("chatcmpl-", backend.card.id)
        try:
            if call.generation.stream:
                return await _stream_chat(request, call, run, head)
            await run.collect()
            return json_response(chat_object(head, _chat_choices(call, run), run.usage, run.details))
        finally:
            note_finishes(state, run.finishes)


def _chat_choices(call: ChatCall, run: ChatRun) -> list[dict[str, Any]]:
    wants = call.generation.sampling.n_logprobs is not None
    return [
        chat_choice(i, chat_message(a.content, a.reasoning, a.calls), a.entries if wants else None, a.finish)
        for i, a in enumerate(run.answers)
    ]


async def _stream_chat(
    request: web.Request, call: ChatCall, run: ChatRun, head: dict[str, Any]
) -> web.StreamResponse:
    head = {**head, "object": "chat.completion.chunk"}
    wants = call.generation.sampling.n_logprobs is not None
    begun: set[int] = set()

    def chunk(choices: list[Any], **more: Any) -> bytes:
        return data_frame({**head, "choices": choices, **more})

    async with event_stream(request) as stream, contextlib.aclosing(run.items()) as items:
        async for item in items:
            if isinstance(item, Progress):
                stream.progress = f"prefill {item.processed}/{item.total}"
                continue
            frames = b""
            if item.index not in begun:
                begun.add(item.index)
                frames = chunk([chunk_choice(item.index, {"role": "assistant", "content": ""}, None, None)])
            if isinstance(item, ChatText):
                entries = list(item.entries) if wants else None
                if item.delta or entries:
                    frames += chunk([chunk_choice(item.index, delta_object(item.delta), entries, None)])
            else:
                answer = run.answers[item.index]
                details = details_object([(item.event, answer.finish)])
                frames += chunk([chunk_choice(item.index, {}, None, answer.finish)], ggufd=details)
            await stream.send(frames)
        if call.generation.include_usage:
            await stream.send(chunk([], usage=usage_object(run.usage), ggufd=run.details))
        await stream.close(DONE)
    return await stream.close()


def delta_object(delta: ChatDelta) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if delta.content or not (delta.reasoning or delta.calls):
        found["content"] = delta.content
    if delta.reasoning:
        found["reasoning_content"] = delta.reasoning
    if delta.calls:
        found["tool_calls"] = [_call_object(c) for c in delta.calls]
    return found


def _call_object(call: Any) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


# ---- completions -------------------------------------------------------------------------------------------


async def completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    finishes: list[FinishEvent] = []
    async with admitted(state) as backend:
        call = read_completion(await read_json(request))
        check_backpressure(state, backend, len(call.prompts) * call.generation.n)
        prepared = await prepare_completion(state, backend, call)
        head = new_head("cmpl-", backend.card.id)
        try:
            if call.generation.stream:
                return await _stream_completion(request, backend, call, prepared, head, finishes)
            return await _whole_completion(backend, call, prepared, head, finishes)
        finally:
            note_finishes(state, finishes)


async def _whole_completion(
    backend: Backend,
    call: CompletionCall,
    prepared: list[Prepared],
    head: dict[str, Any],
    finishes: list[FinishEvent],
) -> web.Response:
    wants = call.generation.sampling.n_logprobs is not None
    texts = ["" for _ in prepared]
    entries: list[list[Entry]] = [[] for _ in prepared]
    ends: dict[int, End] = {}
    async with contextlib.aclosing(run_sequences(backend.engine, prepared)) as items:
        async for item in items:
            if isinstance(item, Text):
                texts[item.index] += item.piece.text
                entries[item.index].extend(item.piece.entries)
            elif isinstance(item, End):
                ends[item.index] = item
                finishes.append(item.event)
    ordered = [ends[i] for i in range(len(prepared))]
    choices = [
        completion_choice(i, texts[i], entries[i] if wants else None, end.finish)
        for i, end in enumerate(ordered)
    ]
    usage = usage_of([e.event for e in ordered], call.generation.n)
    return json_response(
        completion_object(head, choices, usage, details_object([(e.event, e.finish) for e in ordered]))
    )


async def _stream_completion(
    request: web.Request,
    backend: Backend,
    call: CompletionCall,
    prepared: list[Prepared],
    head: dict[str, Any],
    finishes: list[FinishEvent],
) -> web.StreamResponse:
    head = {**head, "object": "text_completion"}
    wants = call.generation.sampling.n_logprobs is not None
    ends: dict[int, End] = {}
    async with event_stream(request) as stream:
        async with contextlib.aclosing(run_sequences(backend.engine, prepared)) as items:
            async for item in items:
                if isinstance(item, Text):
                    entries = list(item.piece.entries) if wants else None
                    choice = completion_choice(item.index, item.piece.text, entries, None)
                    await stream.send(data_frame({**head, "choices": [choice]}))
                elif isinstance(item, End):
                    ends[item.index] = item
                    finishes.append(item.event)
                    choice = completion_choice(item.index, "", None, item.finish)
                    details = details_object([(item.event, item.finish)])
                    await stream.send(data_frame({**head, "choices": [choice], "ggufd": details}))
                elif isinstance(item, Progress):
                    stream.progress = f"prefill {item.processed}/{item.total}"
        ordered = [ends[i] for i in range(len(prepared))]
        if call.generation.include_usage:
            usage = usage_object(usage_of([e.event for e in ordered], call.generation.n))
            details = details_object([(e.event, e.finish) for e in ordered])
            await stream.send(data_frame({**head, "choices": [], "usage": usage, "ggufd": details}))
        await stream.close(DONE)
    return await stream.close()


# ---- embeddings --------------------------------------------------------------------------------------------


async def embeddings(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    async with admitted(state) as backend:
        call = read_embedding(await read_json(request))
        check_backpressure(state, backend, len(call.inputs))
        prepared = await prepare_embeddings(state, backend, call)
        vectors: list[tuple[float, ...]] = [() for _ in prepared]
        finishes: list[FinishEvent] = []
        async with contextlib.aclosing(run_sequences(backend.engine, prepared)) as items:
            async for item in items:
                if isinstance(item, Vector):
                    vectors[item.index] = item.values
                elif isinstance(item, End):
                    finishes.append(item.event)
        note_finishes(state, finishes)
        n_tokens = sum(len(p.request.prompt_ids) for p in prepared)
        answer = await backend.text.run(embedding_object, call, vectors, n_tokens, backend.card.id)
        answer["ggufd"] = details_object([(e, "stop") for e in finishes])
        return json_response(answer)
