"""What a connection may do before a request exists (cases 42, 43 and their kind)."""

import asyncio
import json

import pytest

from streamer.server.connection import ConnectionRules
from streamer.server.state import Limits


def request(body=b'{"prompt": "x"}', *, head=b"", length=None, path=b"/v1/completions"):
    length = len(body) if length is None else length
    lines = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s" % (path, length, head)
    return lines + b"Connection: close\r\n\r\n" + body


def status(answer):
    return int(answer.split(b" ", 2)[1])


def error(answer):
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize(
    "data",
    [
        request(head=b"Content-Length: 3\r\n"),  # case 42
        request(head=b"Transfer-Encoding: chunked\r\n"),
        b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /livez HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1e3\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"GET /livez HTTP/1.1\r\nHost : x\r\n\r\n",
    ],
    ids=lambda data: data[:40].decode(),
)
def test_bad_http_is_400_in_json_and_closes(run, data):
    async def body(server):
        answer = await server.raw(data)
        assert status(answer) == 400, answer
        assert error(answer)["type"] == "invalid_request_error"
        assert (await server.complete()).status == 200

    run(body)


def test_a_header_that_trickles_meets_its_deadline(run):
    async def body(server):
        reader, writer = await asyncio.open_unix_connection(server.path)
        writer.write(b"GET /livez HT")
        answer = await asyncio.wait_for(reader.read(), 20)
        assert status(answer) == 408
        assert error(answer)["type"] == "timeout_error"
        writer.close()

    run(body, rules=ConnectionRules(header_timeout_s=0.1))


def test_a_second_header_on_a_kept_connection_has_a_deadline_too(run):
    async def body(server):
        reader, writer = await asyncio.open_unix_connection(server.path)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b'{"status":"ok"}')
        writer.write(b"GET /li")
        assert status(await asyncio.wait_for(reader.read(), 20)) == 408
        writer.close()

    run(body, rules=ConnectionRules(header_timeout_s=0.1))


def test_a_body_that_trickles_meets_its_deadline(run):
    async def body(server):
        answer = await server.raw(request(b'{"pro', length=100))
        assert status(answer) == 408
        assert error(answer)["type"] == "timeout_error"

    run(body, limits=Limits(body_timeout_s=0.1))


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_too_large_is_413(run, chunked):
    """Case 43."""

    async def body(server):
        data = json.dumps({"prompt": "x" * 5000}).encode()
        if chunked:
            framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            answer = await server.raw(head + framed)
        else:
            answer = await server.raw(request(data))
        assert status(answer) == 413
        assert (await server.complete()).status == 200

    run(body, limits=Limits(body_nbytes=4096))


def test_a_cut_body_harms_nobody(run):
    async def body(server):
        await server.raw(request(b'{"pro', length=100), half_close=True)
        assert (await server.complete()).status == 200
        assert len(server.engine.requests) == 1

    run(body)


def test_expect_is_answered_with_100_or_the_refusal(run):
    async def body(server):
        reader, writer = await asyncio.open_unix_connection(server.path)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 15\r\n\r\n"
        )
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b'{"prompt": "x"}')
        assert status(await reader.readuntil(b"\r\n\r\n")) == 200
        writer.close()
        assert status(await server.raw(request(b"", head=b"Expect: a-pony\r\n", length=10))) == 417
        large = request(b"", head=b"Expect: 100-continue\r\n", length=10_000)
        assert status(await server.raw(large)) == 413
        server.state.status = "loading"
        assert status(await server.raw(request(b"", head=b"Expect: 100-continue\r\n", length=10))) == 503

    run(body, limits=Limits(body_nbytes=4096))


def test_compressed_bodies_are_refused(run):
    async def body(server):
        answer = await server.raw(request(b"\x1f\x8b", head=b"Content-Encoding: gzip\r\n"))
        assert status(answer) == 400

    run(body)


def test_pipelined_requests_are_answered_in_order(run):
    async def body(server):
        one = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
        last = b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answer = await server.raw(one * 3 + last)
        codes = [int(x.split(b" ")[0]) for x in answer.split(b"HTTP/1.1 ")[1:]]
        assert codes == [200, 200, 200, 404]

    run(body)


@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_a_half_closed_client_still_gets_its_answer(run, stream):
    async def body(server):
        server.engine.script = lambda r: [*b"he", "wait", *b"llo"]
        text = b'{"prompt": "x", "stream": %s}' % stream
        asking = asyncio.create_task(server.raw(request(text), half_close=True))
        await server.until(lambda: bool(server.engine.requests))
        server.engine.gate.set()
        answer = await asking
        assert status(answer) == 200
        assert b"hello" in answer or b"o" in answer.rpartition(b'"text"')[2] or b"[DONE]" in answer

    run(body)


def test_too_many_connections_are_503_and_counted(run):
    async def body(server):
        idle = [await asyncio.open_unix_connection(server.path) for _ in range(4)]
        answer = await server.raw(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(answer) == 503
        assert server.state.rules.refused == 1
        for _, writer in idle:
            writer.close()
        await server.until(lambda: server.n_connections() == 0)
        assert status(await server.raw(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")) == 200

    run(body, rules=ConnectionRules(max_connections=4))


def test_a_peer_off_the_allow_list_is_turned_away(run, monkeypatch):
    async def body(server):
        assert (await server.get("/livez")).status == 200  # our own user always may
        monkeypatch.setattr(
            "streamer.server.connection.is_allowed", lambda peer, uids, gids: peer.uid in uids
        )
        answer = await server.raw(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(answer) == 403

    run(body, rules=ConnectionRules(uids=(4242,)))


def test_five_hundred_connections_that_say_nothing(run):
    async def body(server):
        idle = [await asyncio.open_unix_connection(server.path) for _ in range(500)]
        assert (await server.get("/livez")).status == 200
        assert (await server.complete()).status == 200
        for _, writer in idle:
            writer.close()

    run(body)
