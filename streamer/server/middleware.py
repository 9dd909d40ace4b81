"""What happens around every route.

Request id, Host and key on TCP, errors into bodies, one log line, one count.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from streamer.errors import ClientError
from streamer.server.access import check_host, check_key
from streamer.server.api.errors import anthropic_error_body, error_body, loading_error
from streamer.server.connection import Connection
from streamer.server.logs import REQUEST_ID, log_event
from streamer.server.metrics import ROUTES_OTHER
from streamer.server.state import ServerState

logger = logging.getLogger("ggufd")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
STATE = web.AppKey("state", ServerState)
ID = web.RequestKey("id", str)
PROBES = frozenset({"/livez", "/readyz", "/health", "/v1/health", "/metrics", "/residency"})
OPEN_WITHOUT_KEY = frozenset({"/livez", "/readyz", "/health", "/v1/health"})


@web.middleware
async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
    state = request.app[STATE]
    request_id = _request_id(request)
    token = REQUEST_ID.set(request_id)
    started = time.monotonic()
    request[ID] = request_id
    status = 499  # the client left before an answer
    try:
        response = await _answered(state, request, handler)
        status = response.status
        return response
    finally:
        route = _route(request)
        state.metrics.count_request(route, status)
        level = logging.DEBUG if route in PROBES else logging.INFO
        took = (time.monotonic() - started) * 1e3
        log_event(
            logger, level, "request", method=request.method, route=route, code=status, ms=round(took, 1)
        )
        REQUEST_ID.reset(token)


async def _answered(state: ServerState, request: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's response, or the one its failure becomes."""
    try:
        _admit(state, request)
        return await handler(request)
    except ClientError as error:
        return error_response(request, error)
    except web.HTTPException as error:  # aiohttp's own: no such route, wrong method
        response = error_response(request, _of_aiohttp(error))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        logger.exception("internal error")
        return error_response(request, ClientError(500, "internal error", type="server_error"))


def _admit(state: ServerState, request: web.Request) -> None:
    protocol = request.protocol
    if isinstance(protocol, Connection) and protocol.is_unix:
        return  # the socket's mode and the allow-list have decided
    if state.hosts:
        check_host(request.headers.get("Host"), state.hosts)
    if request.path not in OPEN_WITHOUT_KEY:
        check_key(request.headers, state.keys)


def _of_aiohttp(error: web.HTTPException) -> ClientError:
    if error.status == 404:
        return ClientError(404, "there is no such route", type="not_found_error")
    if error.status == 405:
        return ClientError(405, "this route does not take that method", type="invalid_request_error")
    if error.status == 413:
        return ClientError(413, "the body is too large")
    return ClientError(
        error.status if error.status in (400, 408) else 400, "the request cannot be understood"
    )


def error_response(request: web.Request, error: ClientError) -> web.Response:
    body = anthropic_error_body(error) if request.path.startswith("/v1/messages") else error_body(error)
    response = web.Response(status=error.status, body=body, content_type="application/json")
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.status in (408, 413):
        response.force_close()  # the rest of the body is not wanted
    return response


async def set_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """on_response_prepare: every answer names its request, and not what it was made with."""
    if ID in request:
        response.headers["X-Request-Id"] = request[ID]
    response.headers["Server"] = "ggufd"


def _request_id(request: web.Request) -> str:
    """The client's own if it is short and plain, else a new one."""
    offered = request.headers.get("X-Request-Id", "")
    return offered if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", offered) else f"req-{uuid.uuid4().hex[:16]}"


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return ROUTES_OTHER if resource is None else resource.canonical


async def read_body(request: web.Request) -> bytes:
    """The whole body within size and time.

    413 before reading when the header says it all, 408 when it trickles.
    """
    limits = request.app[STATE].limits
    check_length(request)
    chunks: list[bytes] = []
    n = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for chunk in request.content.iter_chunked(1 << 18):
                n += len(chunk)
                if n > limits.body_nbytes:
                    raise ClientError(413, f"the body is larger than {limits.body_nbytes} bytes")
                chunks.append(chunk)
    except TimeoutError:
        raise ClientError(408, "the body did not arrive in time", type="timeout_error") from None
    except web.RequestPayloadError:
        raise ClientError(400, "the body is cut or badly framed") from None
    return b"".join(chunks)


def check_length(request: web.Request) -> None:
    limit = request.app[STATE].limits.body_nbytes
    if request.content_length is not None and request.content_length > limit:
        raise ClientError(413, f"the body is larger than {limit} bytes")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ClientError(400, "compressed bodies are not accepted")


async def expect_continue(request: web.Request) -> web.StreamResponse | None:
    """`Expect: 100-continue`: ask for the body only when it can be of use; otherwise the answer at once."""
    state = request.app[STATE]
    try:
        _admit(state, request)
        if request.headers.get("Expect", "").lower() != "100-continue":
            raise ClientError(417, "the only expectation that is met is 100-continue")
        check_length(request)
        if state.status == "loading":
            raise loading_error()
    except ClientError as error:
        response = error_response(request, error)
        response.force_close()
        return response
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None
