"""llama-server's own routes."""

import contextlib
from typing import Any

from aiohttp import web

from streamer.server.answers import event_stream, json_response, note_finishes, read_json
from streamer.server.api.calls import ChatCall
from streamer.server.api.chat import read_chat
from streamer.server.api.llamacpp import (
    native_object,
    piece_object,
    read_detokenize,
    read_native_completion,
    read_tokenize,
)
from streamer.server.api.results import Entry, details_object
from streamer.server.generation import admitted, check_backpressure, prepare_completion
from streamer.server.middleware import STATE
from streamer.server.sequences import End, Prepared, Text, run_sequences
from streamer.server.sse import data_frame
from streamer.server.state import Backend


async def tokenize(request: web.Request) -> web.StreamResponse:
    backend = request.app[STATE].ready_backend()
    content, add_special, parse_special, with_pieces = read_tokenize(await read_json(request))
    ids = await backend.text.encode(content, add_special=add_special, parse_special=parse_special)
    token_bytes = backend.text.tokenizer.token_bytes
    return json_response({"tokens": [piece_object(i, token_bytes(i)) for i in ids] if with_pieces else ids})


async def detokenize(request: web.Request) -> web.StreamResponse:
    backend = request.app[STATE].ready_backend()
    ids = read_detokenize(await read_json(request))
    content = await backend.text.run(lambda: backend.text.tokenizer.decode(ids, special=True))
    return json_response({"content": content})


async def apply_template(request: web.Request) -> web.StreamResponse:
    backend = request.app[STATE].ready_backend()
    call: ChatCall = read_chat(await read_json(request))
    return json_response({"prompt": (await backend.text.render(call)).text})


async def completion(request: web.Request) -> web.StreamResponse:
    """llama-server's native completion: one prompt, its own names."""
    state = request.app[STATE]
    async with admitted(state) as backend:
        call = read_native_completion(await read_json(request))
        check_backpressure(state, backend, 1)
        prepared = await prepare_completion(state, backend, call)
        if not call.generation.stream:
            answer, end = await _collect(backend, prepared)
            note_finishes(state, [end.event])
            return json_response(answer)
        return await _stream(request, backend, prepared)


async def _collect(backend: Backend, prepared: list[Prepared]) -> tuple[dict[str, Any], End]:
    texts: list[str] = []
    entries: list[Entry] = []
    end: End | None = None
    async with contextlib.aclosing(run_sequences(backend.engine, prepared)) as items:
        async for item in items:
            if isinstance(item, Text):
                texts.append(item.piece.text)
                entries.extend(item.piece.entries)
            elif isinstance(item, End):
                end = item
    assert end is not None
    wanted = entries if prepared[0].request.sampling.n_logprobs is not None else None
    return _last("".join(texts), wanted, end, backend), end


def _last(text: str, entries: list[Entry] | None, end: End, backend: Backend) -> dict[str, Any]:
    answer = native_object(text, entries, end.event, end.finish, end.stop, backend.card.id)
    return {**answer, "ggufd": details_object([(end.event, end.finish)])}


async def _stream(request: web.Request, backend: Backend, prepared: list[Prepared]) -> web.StreamResponse:
    running = contextlib.aclosing(run_sequences(backend.engine, prepared))
    async with event_stream(request) as stream, running as items:
        async for item in items:
            if isinstance(item, Text):
                await stream.send(data_frame({"index": 0, "content": item.piece.text, "stop": False}))
            elif isinstance(item, End):
                note_finishes(request.app[STATE], [item.event])
                await stream.send(data_frame(_last("", None, item, backend)))
    return await stream.close()
