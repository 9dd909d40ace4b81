"""llama-server's own routes."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from streamer.server.answers import event_stream, json_response, note_finishes, read_json
from streamer.server.api.calls import ChatCall
from streamer.server.api.chat import read_chat
from streamer.server.api.llamacpp import (
    NativeAnswer,
    NativeCall,
    native_object,
    native_piece,
    piece_object,
    read_detokenize,
    read_native_completion,
    read_tokenize,
)
from streamer.server.api.results import details_object
from streamer.server.generation import admitted, check_backpressure, prepare_completion
from streamer.server.middleware import STATE
from streamer.server.sequences import End, Prepared, Text, run_sequences
from streamer.server.sse import data_frame
from streamer.server.state import Backend, ServerState


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
    """llama-server's native completion, with its own names; several prompts give a list of answers."""
    state = request.app[STATE]
    async with admitted(state) as backend:
        call = read_native_completion(await read_json(request))
        check_backpressure(state, backend, len(call.completion.prompts))
        prepared = await prepare_completion(state, backend, call.completion)
        if call.completion.generation.stream:
            return await _stream(request, backend, call, prepared)
        objects: list[dict[str, Any]] = [{} for _ in prepared]
        async with contextlib.aclosing(_objects(state, backend, call, prepared)) as running:
            async for _, final in running:
                if final is not None:
                    objects[final["index"]] = final
        return json_response(objects[0] if len(objects) == 1 else objects)


async def _objects(
    state: ServerState, backend: Backend, call: NativeCall, prepared: list[Prepared]
) -> AsyncGenerator[tuple[Text | None, dict[str, Any] | None], None]:
    """What is said as it comes, and each prompt's last object."""
    answers = [NativeAnswer() for _ in prepared]
    async with contextlib.aclosing(run_sequences(backend.engine, prepared)) as items:
        async for item in items:
            if isinstance(item, Text):
                answers[item.index].text += item.piece.text
                answers[item.index].entries.extend(item.piece.entries)
                yield item, None
            elif isinstance(item, End):
                note_finishes(state, [item.event])
                card = backend.card
                final = native_object(call, answers[item.index], item, card.id, card.n_ctx)
                yield None, {**final, "ggufd": details_object([(item.event, item.finish)])}


async def _stream(
    request: web.Request, backend: Backend, call: NativeCall, prepared: list[Prepared]
) -> web.StreamResponse:
    running = contextlib.aclosing(_objects(request.app[STATE], backend, call, prepared))
    async with event_stream(request) as stream, running as objects:
        async for said, final in objects:
            if said is not None:
                piece = said.piece
                await stream.send(data_frame(native_piece(call, said.index, piece.text, piece.entries)))
            if final is not None:
                await stream.send(data_frame(final))
    return await stream.close()
