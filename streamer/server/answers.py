"""What all inference routes share.

Reading JSON, heads of answers, a stream with its errors, one log line a generation.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from streamer.engine.request import FinishEvent
from streamer.errors import ClientError
from streamer.server.api.body import decode_object
from streamer.server.api.errors import encode, error_object
from streamer.server.logs import log_event
from streamer.server.middleware import STATE, read_body
from streamer.server.sse import EventStream, data_frame
from streamer.server.state import ServerState

logger = logging.getLogger("ggufd")
LARGE_BODY = 1 << 18


async def read_json(request: web.Request) -> dict[str, Any]:
    """The body as an object. Large ones are decoded off the loop."""
    data = await read_body(request)
    return decode_object(data) if len(data) < LARGE_BODY else await asyncio.to_thread(decode_object, data)


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=encode(value), content_type="application/json")


def new_head(prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}


ErrorFrame = Callable[[ClientError], bytes]


def openai_error_frame(error: ClientError) -> bytes:
    code = error.status if error.code is None else error.code
    return data_frame(error_object(error.status, error.message, code=code, **error.extra))


@asynccontextmanager
async def event_stream(
    request: web.Request, error_frame: ErrorFrame = openai_error_frame
) -> AsyncIterator[EventStream]:
    """A stream whose failures become an error event once it is open, and their own status before."""
    limits = request.app[STATE].limits
    stream = EventStream(request, keepalive_s=limits.keepalive_s, write_timeout_s=limits.write_timeout_s)
    async with stream:
        try:
            yield stream
        except ClientError as error:
            if not stream.is_open:
                raise
            log_event(logger, logging.WARNING, "stream failed", error=error.message)
            await stream.send(error_frame(error))


def note_finishes(state: ServerState, finishes: Sequence[FinishEvent]) -> None:
    """Metrics and one line a sequence."""
    for event in finishes:
        state.metrics.observe_times(event.ttft_ms, event.decode_ms, event.n_generated)
        log_event(
            logger,
            logging.INFO,
            "generated",
            finish=event.reason.value,
            prompt_tokens=event.n_prompt,
            cached_tokens=event.cached_prompt_tokens,
            tokens=event.n_generated,
            queue_ms=round(event.queue_ms, 1),
            ttft_ms=round(event.ttft_ms, 1),
            decode_ms=round(event.decode_ms, 1),
            weight_h2d_bytes=event.weight_h2d_bytes,
        )


Route = Callable[[web.Request], Awaitable[web.StreamResponse]]
