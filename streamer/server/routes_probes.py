"""Probes and facts: answered from the first moment, from memory, without waiting for anything."""

import asyncio
from typing import Any

from aiohttp import web

from streamer.errors import ClientError
from streamer.server.answers import json_response
from streamer.server.api.errors import HEALTHY_BODY, LOADING_BODY, encode
from streamer.server.middleware import STATE
from streamer.server.sse import EventStream, data_frame
from streamer.server.state import Backend

RESIDENCY_INTERVAL_S = 0.2
MODEL_FACTS = (
    "vocab_type",
    "n_vocab",
    "n_ctx",
    "n_ctx_train",
    "n_embd",
    "n_params",
    "size",
    "ftype",
    "architecture",
)


async def livez(request: web.Request) -> web.Response:
    """200 while the loop lives."""
    return web.Response(body=HEALTHY_BODY, content_type="application/json")


async def readyz(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return _with_retry(json_response(state.residency(False), 200 if state.status == "ready" else 503))


async def health(request: web.Request) -> web.Response:
    """llama-server's bytes while loading and when ready; its shape with our reason otherwise."""
    state = request.app[STATE]
    if state.status == "ready":
        return web.Response(body=HEALTHY_BODY, content_type="application/json")
    body = LOADING_BODY if state.status == "loading" else _unavailable(state.status)
    return _with_retry(web.Response(status=503, body=body, content_type="application/json"))


def _unavailable(status: str) -> bytes:
    message = {"draining": "Server is stopping", "failed": "Server has failed"}.get(status, status)
    return encode({"error": {"message": message, "type": "unavailable_error", "code": 503}})


def _with_retry(response: web.Response) -> web.Response:
    if response.status == 503:
        response.headers["Retry-After"] = "1"
    return response


async def residency(request: web.Request) -> web.StreamResponse:
    """The account with its layers; as events until the load ends when the client accepts them."""
    state = request.app[STATE]
    if request.method == "HEAD" or "text/event-stream" not in request.headers.get("Accept", ""):
        return json_response(state.residency(True))
    limits = state.limits
    async with EventStream(
        request, keepalive_s=limits.keepalive_s, write_timeout_s=limits.write_timeout_s
    ) as stream:
        while state.status == "loading":
            await stream.send(data_frame(state.residency(True)))
            await asyncio.sleep(RESIDENCY_INTERVAL_S)
        await stream.send(data_frame(state.residency(True)))
        return await stream.close()


async def metrics(request: web.Request) -> web.Response:
    body = request.app[STATE].metrics.render()
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def models(request: web.Request) -> web.Response:
    entry = model_object(request.app[STATE].ready_backend())
    return json_response({"object": "list", "data": [entry]})


async def model(request: web.Request) -> web.Response:
    backend = request.app[STATE].ready_backend()
    if request.match_info["model"] != backend.card.id:
        raise ClientError(404, "there is no such model", type="not_found_error", code="model_not_found")
    return json_response(model_object(backend))


def model_object(backend: Backend) -> dict[str, Any]:
    card = backend.card
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "ggufd",
        "root": card.root,
        "meta": {name: getattr(card, name) for name in MODEL_FACTS},
    }


async def props(request: web.Request) -> web.Response:
    """llama-server's names, what applies here. Never a key, never the configuration's secrets."""
    state = request.app[STATE]
    backend = state.ready_backend()
    card, tokenizer, residency = backend.card, backend.text.tokenizer, state.residency(False)
    return json_response(
        {
            "default_generation_settings": {
                "n_ctx": card.n_ctx,
                "params": {"temperature": 1.0, "top_p": 1.0},
            },
            "total_slots": card.max_sequences,
            "model_alias": card.id,
            "model_path": card.root,
            "model_ftype": card.ftype,
            "modalities": {"vision": False, "audio": False},
            "chat_template": backend.text.templates.source,
            "bos_token": _token_name(tokenizer, tokenizer.bos_id),
            "eos_token": _token_name(tokenizer, tokenizer.eos_id),
            "build_info": request.app[BUILD],
            "is_sleeping": False,
            "device": residency["device"],
            "transfer": residency["transfer"],
        }
    )


def _token_name(tokenizer: Any, token_id: int | None) -> str:
    return "" if token_id is None else str(tokenizer.token_text(token_id))


BUILD = web.AppKey("build", str)
