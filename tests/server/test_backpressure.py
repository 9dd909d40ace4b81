"""Full queues, failures, clients that leave or do not read, pauses that need a sign of life."""

import asyncio
import contextlib
import dataclasses
import itertools

import pytest

from streamer.engine.handle import NotServing, QueueFull
from streamer.engine.request import FinishReason
from streamer.server.sse import EventStream
from streamer.server.state import Limits


def test_a_full_queue_is_429_with_retry_after(run):
    async def body(server):
        server.engine.refusal = QueueFull("full")
        answer = await server.complete(stream=True)
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        assert answer.error["type"] == "rate_limit_error"
        server.engine.refusal = NotServing("draining")
        assert (await server.complete()).status == 503
        server.engine.refusal = None
        server.engine.waiting = 255
        assert (await server.complete(n=2)).status == 429
        assert (await server.complete()).status == 200

    run(body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_generation_is_told_without_its_inside(run, stream):
    """Case 50, as a client sees it."""

    async def body(server):
        server.engine.script = lambda request: [104, RuntimeError("illegal access at 0xdead")]
        answer = await server.complete(stream=stream)
        if stream:
            assert answer.status == 200
            assert answer.events[-1]["error"]["code"] == 500
            assert "[DONE]" not in answer.events
        else:
            assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert b"0xdead" not in answer.body

    run(body)


def test_one_failed_choice_ends_the_others(run):
    async def body(server):
        server.engine.script = lambda r: ["wait"] if r.id.endswith("0") else [RuntimeError("x")]
        assert (await server.complete(n=2)).status == 500
        await server.until(lambda: len(server.engine.ended) == 2)
        assert FinishReason.CANCELLED in server.engine.ended

    run(body)


@pytest.mark.parametrize(
    "route", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(run, route, stream):
    """Case 35, with the engine's part made up."""

    async def body(server):
        server.engine.script = lambda request: [*b"ab", "wait"]
        prompt = "prompt" if route == "/v1/completions" else "input"
        messages = [{"role": "user", "content": "x"}]
        members = {prompt: "x", "messages": messages, "max_tokens": 9, "stream": stream}
        asking = asyncio.create_task(server.post(route, members))
        await server.until(lambda: bool(server.engine.requests))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await server.until(lambda: server.engine.ended == [FinishReason.CANCELLED])
        await server.until(lambda: server.state.running == 0)

    run(body)


def test_a_pause_is_bridged_by_comments_that_tell_the_progress(run):
    async def body(server):
        server.engine.prefill = 3
        server.engine.script = lambda request: ["wait", *b"hi"]
        url = "http://x/v1/completions"
        async with server.session.post(url, json={"prompt": "x", "stream": True}) as response:
            comment = await response.content.readuntil(b"\n\n")
            assert comment == b": prefill 2/3\n\n"
            server.engine.gate.set()
            assert b"[DONE]" in await response.read()

    run(body, limits=Limits(keepalive_s=0.05))


def test_a_reader_that_takes_no_comment_is_dropped_too():
    class Response:
        prepared = True

        async def write(self, data):
            await asyncio.Event().wait()

    class Request:
        def __init__(self):
            self.transport, self.dropped = self, asyncio.Event()

        def abort(self):
            self.dropped.set()

    async def main():
        request = Request()
        stream = EventStream(request, keepalive_s=0.02, write_timeout_s=0.05)
        stream._response = Response()
        async with stream, asyncio.timeout(20):
            await request.dropped.wait()

    asyncio.run(main())


def test_a_reader_that_takes_nothing_is_dropped_and_others_go_on(run):
    async def body(server):
        server.engine.script = lambda request: itertools.repeat(97)  # however large the buffers are
        _, writer = await asyncio.open_unix_connection(server.path, limit=1)
        with contextlib.closing(writer):
            text = b'{"prompt": "x", "stream": true, "max_tokens": -1}'
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(text) + text
            )
            await server.until(lambda: bool(server.engine.requests))
            server.engine.script = lambda request: [*b"hi"]
            assert (await server.complete()).json["choices"][0]["text"] == "hi"
            await server.until(lambda: FinishReason.CANCELLED in server.engine.ended)

    async def wide(server):
        card = dataclasses.replace(server.backend.card, n_ctx=1 << 30)
        server.state.backend = dataclasses.replace(server.backend, card=card)
        await body(server)

    run(wide, limits=Limits(write_timeout_s=0.2))
