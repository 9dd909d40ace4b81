"""A light HTTP client of streamed completions: one asyncio protocol a connection, no task a token.

It must cost much less than the server it measures: an event is split off, decoded into a small struct and
its arrival noted; whoever asked is woken once, at the end.
"""

import asyncio
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec


class _Choice(msgspec.Struct):
    text: str = ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODE = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True)
class Endpoint:
    """Where the server is: a Unix socket, or host and port."""

    socket_path: str = ""
    host: str = "localhost"
    port: int = 80
    api_key: str = ""

    def head(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The request's bytes up to its body."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def connect(self) -> "StreamConnection":
        """OSError when nobody listens."""
        loop = asyncio.get_running_loop()
        if self.socket_path:
            _, protocol = await loop.create_unix_connection(StreamConnection, self.socket_path)
        else:
            _, protocol = await loop.create_connection(StreamConnection, self.host, self.port)
        protocol.endpoint = self
        return protocol


@dataclass
class Outcome:
    """What became of one request. Times by perf_counter; `error` is None when it was answered to its end."""

    index: int
    start_s: float  # when it was due: an open loop's request may be sent later than that
    first_s: float = 0.0  # the first text
    end_s: float = 0.0
    arrivals: "array[float]" = field(default_factory=lambda: array("d"))  # of events with text
    n_prompt: int = 0
    n_tokens: int = 0  # as the server counts them, else events with text
    error: str | None = None  # "503", "disconnect", "timeout", "refused", "error event", "bad answer"

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.start_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.start_s


class AnswerReader:
    """One HTTP/1.1 answer, byte by byte: head, then a body by chunks, length or the connection's end. Pure.

    `feed` returns the payloads of the `data:` lines that have become whole. ValueError for what is no HTTP.
    """

    def __init__(self) -> None:
        self.status = 0
        self.is_done = False
        self.closes = False
        self._raw = b""
        self._text = b""
        self._chunked = False
        self._left = -1  # bytes of the chunk or body still to come; -1: a size line comes next
        self._is_last = False  # the chunk of no bytes

    def feed(self, data: bytes) -> list[bytes]:
        self._raw = self._raw + data if self._raw else data
        if not self.status and not self._take_head():
            return []
        text = self._dechunk() if self._chunked else self._take_plain()
        *lines, self._text = (self._text + text).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def _take_head(self) -> bool:
        head, found, rest = self._raw.partition(b"\r\n\r\n")
        if not found:
            return False
        first, *fields = head.decode("latin-1").split("\r\n")
        if not first.startswith("HTTP/1."):
            raise ValueError("no HTTP answer")
        self.status, self._raw = int(first.split(" ", 2)[1]), rest
        values = {
            name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in fields)
        }
        self._chunked = "chunked" in values.get("transfer-encoding", "").lower()
        self.closes = values.get("connection", "").lower() == "close"
        if not self._chunked:
            self._left = int(values.get("content-length", -1))
        return True

    def _dechunk(self) -> bytes:
        """The bodies of all chunks that are there, the last one in part."""
        raw, at, parts = self._raw, 0, []
        while not self.is_done:
            if self._left < 0:
                stop = raw.find(b"\r\n", at)
                if stop < 0:
                    break
                size = int(raw[at:stop], 16)
                at, self._left = stop + 2, size + 2  # with the line's end after it
                self._is_last = size == 0
            part, before = raw[at : at + self._left], self._left
            at, self._left = at + len(part), self._left - len(part)
            parts.append(part[: len(part) - min(before, 2) + min(self._left, 2)])
            if self._left:
                break
            self._left, self.is_done = -1, self._is_last
        self._raw = raw[at:]
        return b"".join(parts)

    def _take_plain(self) -> bytes:
        text, self._raw = self._raw, b""
        if self._left >= 0:
            self._left -= len(text)
            self.is_done = self._left <= 0
        return text


class StreamConnection(asyncio.Protocol):
    """A connection that carries one request after the other. Made by `Endpoint.connect`."""

    endpoint: Endpoint

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader = AnswerReader()
        self._outcome: Outcome | None = None
        self._ended: asyncio.Future[None] | None = None

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._outcome is None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def complete(self, body: bytes, outcome: Outcome, timeout_s: float) -> None:
        """Send a completion and fill `outcome` in until the answer's end; never raises but when cancelled."""
        assert self._transport is not None
        self._reader, self._outcome = AnswerReader(), outcome
        self._ended = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(self.endpoint.head("POST", "/v1/completions", body) + body)
            async with asyncio.timeout(timeout_s):
                await self._ended
        except TimeoutError:
            outcome.error = "timeout"
        finally:
            outcome.end_s = time.perf_counter()
            outcome.first_s = outcome.first_s or outcome.end_s  # tokens may be no text
            self._outcome = self._ended = None
            if outcome.error is not None or self._reader.closes:
                self.close()

    # ---- the loop's side -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        outcome = self._outcome
        if outcome is None:
            return self.close()  # nobody asked
        now_s = time.perf_counter()
        try:
            for payload in self._reader.feed(data):
                _note(outcome, payload, now_s)
        except (ValueError, msgspec.MsgspecError):
            return self._end("bad answer")
        if self._reader.is_done:
            self._end(None if self._reader.status == 200 else str(self._reader.status))
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("disconnect")

    def _end(self, error: str | None) -> None:
        if self._outcome is None or self._ended is None or self._ended.done():
            return
        self._outcome.error = self._outcome.error or error
        if self._outcome.error is None and not self._outcome.n_tokens:
            self._outcome.error = "no tokens"
        self._ended.set_result(None)


def _note(outcome: Outcome, payload: bytes, now_s: float) -> None:
    """One event of the stream."""
    if payload == b"[DONE]":
        return
    event = _DECODE(payload)
    if event.error is not None:
        outcome.error = "error event"
    if event.choices and event.choices[0].text:
        if not outcome.arrivals:
            outcome.first_s = now_s
        outcome.arrivals.append(now_s)
        outcome.n_tokens += 1
    if event.usage is not None:
        outcome.n_prompt, outcome.n_tokens = event.usage.prompt_tokens, event.usage.completion_tokens


def completion_body(prompt: str | list[int], max_tokens: int, **members: Any) -> bytes:
    """A streamed completion that runs to its length."""
    fixed = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    return msgspec.json.encode({"prompt": prompt, "max_tokens": max_tokens, **fixed, **members})
