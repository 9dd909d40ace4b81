"""One client connection: what must be decided before a request exists. Limits, deadlines, peers, half-close,
bad HTTP.

aiohttp parses; this subclass adds a deadline for headers, JSON bodies for its own errors, an allow-list by
SO_PEERCRED, a limit on connections, and keeps a Unix connection whose client only closed its sending side.
"""

import asyncio
import logging
import select
import socket
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web

from streamer.server.api.errors import encode, error_object
from streamer.server.logs import log_event
from streamer.server.sockets import is_allowed, peer_of

logger = logging.getLogger("ggufd")

LINGER_S = 0.5  # how long a connection that was turned away may take to read why


@dataclass
class ConnectionRules:
    """Shared by all connections; a reload replaces its numbers."""

    max_connections: int = 1024
    header_timeout_s: float = 10.0
    uids: tuple[int, ...] = ()
    gids: tuple[int, ...] = ()
    refused: int = 0  # connections turned away, for /metrics


def raw_response(status: int, reason: str, message: str) -> bytes:
    """A whole HTTP answer for a connection on which no request was understood."""
    body = encode(error_object(status, message))
    retry = "Retry-After: 1\r\n" if status == 503 else ""
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{retry}Connection: close\r\n\r\n".encode() + body


class Connection(web.RequestHandler):
    """aiohttp's protocol with our manners."""

    def __init__(self, manager: "GuardedServer", rules: ConnectionRules, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._rules = rules
        self._header_timer: asyncio.TimerHandle | None = None
        self._turned_away = False
        self._last_payload: Any = None  # body of the newest request
        self.is_unix = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer_socket = cast(socket.socket, transport.get_extra_info("socket"))
        self.is_unix = peer_socket is not None and peer_socket.family == socket.AF_UNIX
        refusal = self._refusal(peer_socket)
        super().connection_made(transport)
        if refusal is not None:
            self._rules.refused += 1
            self._turn_away(refusal)

    def _refusal(self, peer_socket: socket.socket) -> bytes | None:
        rules = self._rules
        manager = cast(GuardedServer, self._manager)
        if len(manager.connections) >= rules.max_connections:
            return raw_response(503, "Service Unavailable", "too many connections")
        if self.is_unix and (rules.uids or rules.gids):
            with socket.socket(fileno=socket.dup(peer_socket.fileno())) as plain:
                peer = peer_of(plain)
            if not is_allowed(peer, rules.uids, rules.gids):
                log_event(logger, logging.WARNING, "peer refused", peer=peer)
                return raw_response(403, "Forbidden", "this user may not use the socket")
        return None

    def _turn_away(self, answer: bytes) -> None:
        """Say it, then listen no more.

        Closing at once would lose the answer behind the client's unread bytes.
        """
        self._turned_away = True
        if self.transport is None:
            return
        self.transport.write(answer)
        crowd = len(cast(GuardedServer, self._manager).connections) > 2 * self._rules.max_connections
        if crowd or not self.transport.can_write_eof():
            self.force_close()
            return
        self.transport.write_eof()
        self._loop.call_later(LINGER_S, self.force_close)

    # ---- a deadline for headers ----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._turned_away:
            return
        before = self._request_count
        super().data_received(data)
        if self._request_count > before:
            self._last_payload = self._messages[-1][1]
            self._stop_header_timer()
        elif not self._request_in_progress and not self._messages and self._header_timer is None:
            deadline = self._rules.header_timeout_s
            self._header_timer = self._loop.call_later(deadline, self._header_is_late)

    def _header_is_late(self) -> None:
        self._header_timer = None
        if not self._request_in_progress and not self._messages:
            self._turn_away(
                raw_response(408, "Request Timeout", "the request's header did not arrive in time")
            )

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_header_timer()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps the connection until its requests are answered.

        On a Unix socket a client that only closed its sending side can be told from one that is gone; on TCP
        it cannot, and counts as gone.
        """
        is_answering = self._last_payload is not None and (self._waiter is None or self._waiter.done())
        if self._turned_away or not (self.is_unix and is_answering) or self.transport is None:
            return False
        if not self._last_payload.is_eof():  # the rest of its body will never come
            return False
        if has_hung_up(self.transport.get_extra_info("socket").fileno()):
            return False
        self.keep_alive(True)  # takes back the timer of an idle connection ...
        self._keepalive_timeout = 0.001  # ... so that this one ends as soon as it is idle
        return True

    # ---- errors of the parser ------------------------------------------------------------------------------

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """aiohttp met bad HTTP (400) or a handler's fault that no middleware caught (500).

        Closes the connection.
        """
        if status >= 500:
            logger.error("unhandled", exc_info=exc)
        text = "the request is not valid HTTP" if status == 400 else "internal error"
        response = web.Response(
            status=status, body=encode(error_object(status, text)), content_type="application/json"
        )
        response.headers["Server"] = "ggufd"
        response.force_close()
        return response


def has_hung_up(descriptor: int) -> bool:
    """True when the peer is gone altogether, False when it only shut down its sending side (Unix sockets
    tell).
    """
    poller = select.poll()
    poller.register(descriptor, select.POLLIN | select.POLLHUP)
    return any(mask & (select.POLLHUP | select.POLLERR) for _, mask in poller.poll(0))


class GuardedServer(web.Server):
    """aiohttp's server whose connections are ours. Handlers are cancelled when their client goes."""

    def __init__(self, plain: web.Server, rules: ConnectionRules, **kwargs: Any) -> None:
        super().__init__(
            plain.request_handler, request_factory=plain.request_factory, handler_cancellation=True, **kwargs
        )
        self._rules = rules
        self._arguments = kwargs

    def __call__(self) -> Connection:
        return Connection(self, self._rules, loop=self._loop, **self._arguments)


class GuardedRunner(web.AppRunner):
    """AppRunner that makes a GuardedServer."""

    __slots__ = ("_options", "_rules")

    def __init__(
        self, app: web.Application, rules: ConnectionRules, *, shutdown_timeout: float, **options: Any
    ) -> None:
        super().__init__(app, access_log=None, shutdown_timeout=shutdown_timeout)
        self._rules = rules
        self._options = options

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        return GuardedServer(plain, self._rules, access_log=None, **self._options)

    @property
    def n_connections(self) -> int:
        return len(self.server.connections) if self.server is not None else 0
