"""Server-sent events over aiohttp: framing, keep-alive comments, and the rule for slow readers.

The rule: a reader that takes nothing for `write_timeout_s` while bytes wait for it is dropped; until then
only its own stream stands still. Nothing is sent before `open`, so that an early failure still gets its own
status.
"""

import asyncio
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from streamer.server.api.errors import encode

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not collect the stream
}


class EventStream:
    """One stream.

    Use as an async context manager around the writing; `progress` is shown in keep-alive comments.
    """

    def __init__(self, request: web.Request, *, keepalive_s: float, write_timeout_s: float) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=HEADERS)
        self._keepalive_s, self._write_timeout_s = keepalive_s, write_timeout_s
        self._clock = asyncio.get_running_loop().time
        self._last_sent = self._clock()
        self._writing_since: float | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.progress = ""

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    @property
    def is_open(self) -> bool:
        return self._response.prepared

    async def open(self) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)

    async def send(self, frames: bytes) -> None:
        """Whole frames. Waits while the reader is slow; ConnectionError when it is gone or dropped."""
        if not self._response.prepared:
            await self.open()
        self._writing_since = self._clock()
        try:
            await self._response.write(frames)
        finally:
            self._writing_since = None
            self._last_sent = self._clock()

    async def _keep(self) -> None:
        tick = min(self._keepalive_s, self._write_timeout_s) / 2
        while True:
            await asyncio.sleep(tick)
            now = self._clock()
            if self._writing_since is not None:
                if now - self._writing_since >= self._write_timeout_s:
                    self._drop()
            elif now - self._last_sent >= self._keepalive_s:
                await self._comment()

    async def _comment(self) -> None:
        """Its reader may be the slow one: nobody else watches this write."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self.send(f": {self.progress or 'keep-alive'}\n\n".encode())
        except TimeoutError:
            self._drop()

    def _drop(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()  # a blocked write fails, the handler ends

    async def __aenter__(self) -> Self:
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def close(self, frames: bytes = b"") -> web.StreamResponse:
        """The last frames and the end in one write: a client that leaves after them has missed nothing."""
        await self.open()
        await self._response.write_eof(frames)
        return self._response


def data_frame(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def event_frame(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"
