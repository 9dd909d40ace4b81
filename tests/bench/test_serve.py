"""The load generator against a server that plays a script: what it counts, and what it survives."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.bench import serve as serve_bench
from streamer.bench.serve_client import AnswerReader, Endpoint
from streamer.bench.serve_load import Budget, Driver
from streamer.bench.serve_shapes import Fixed, Workload

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
REFUSED = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}"


def chunk(value):
    data = value if isinstance(value, bytes) else b"data: " + json.dumps(value).encode() + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def text(piece="x"):
    return chunk({"choices": [{"text": piece, "finish_reason": None}]})


def ending(n_tokens, n_prompt=4):
    usage = {"prompt_tokens": n_prompt, "completion_tokens": n_tokens}
    return chunk({"choices": [], "usage": usage}) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class ScriptedServer:
    """Answers request number i with `script(i, body)`: bytes, or a list of bytes sent one after the other;
    None closes the connection. Without a path, on a free port. With `crowd`, nobody is answered before
    so many have asked.
    """

    def __init__(self, path, script, crowd=0):
        self.path, self.script, self.crowd = path and str(path), script, crowd
        self.heads, self.bodies, self.n_connections, self.n_probes = [], [], 0, 0

    async def __aenter__(self):
        self._full = asyncio.Event()
        if self.path is None:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
            self.port = self._server.sockets[0].getsockname()[1]
        else:
            self._server = await asyncio.start_unix_server(self._connected, self.path)
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _connected(self, reader, writer):
        self.n_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if not await self._answer(head.decode(), reader, writer):
                    break
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head, reader, writer):
        self.heads.append(head)
        if head.startswith("GET"):
            return self._get(head.split(" ")[1], writer)
        length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        number = len(self.bodies) - 1
        if len(self.bodies) >= self.crowd:
            self._full.set()
        await self._full.wait()
        answer = self.script(number, body)
        for part in answer if isinstance(answer, list) else [answer]:
            if part is None:
                return False
            writer.write(part)
            await writer.drain()
        return True

    def _get(self, path, writer):
        model = {"data": [{"id": "tiny", "meta": {"n_vocab": 50}}]}
        body = json.dumps(model if path == "/v1/models" else {}).encode()
        found = path in ("/v1/models", "/livez", "/readyz")
        self.n_probes += path in ("/livez", "/readyz")
        status = b"200 OK" if found else b"404 Not Found"
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return False


def drive(path, script, act, *, crowd=0, timeout_s=20.0, **fields):
    """`await act(driver)` against the script; the driver and the server."""

    async def main():
        async with ScriptedServer(path, script, crowd) as server:
            workload = Workload(Fixed(4), Fixed(3), n_vocab=50)
            driver = Driver(
                Endpoint(socket_path=server.path), workload, {"temperature": 0}, timeout_s, **fields
            )
            try:
                await act(driver)
            finally:
                driver.close()
            return driver, server

    return asyncio.run(main())


def test_tokens_are_counted_as_the_server_counts_them(tmp_path: Path):
    """Three tokens in two events: usage says three."""
    answer = HEAD + text("ab") + chunk(b": keep-alive\n\n") + text("c") + text("") + ending(3, n_prompt=4)
    driver, server = drive(tmp_path / "s", lambda i, body: answer, lambda d: d.closed(1, Budget(2, None)))
    assert [o.error for o in driver.outcomes] == [None, None]
    assert [(o.n_tokens, o.n_prompt, len(o.arrivals)) for o in driver.outcomes] == [(3, 4, 2)] * 2
    assert all(o.start_s < o.first_s <= o.end_s for o in driver.outcomes)
    assert server.n_connections == 1, "a connection is kept for the next request"
    body = server.bodies[0]
    assert body["max_tokens"] == 3
    assert len(body["prompt"]) == 4
    assert body["stream"] is body["ignore_eos"] is True


def test_text_without_usage_counts_events(tmp_path: Path):
    answer = HEAD + text("a") + text("b") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    driver, _ = drive(tmp_path / "s", lambda i, body: answer, lambda d: d.closed(1, Budget(1, None)))
    assert driver.outcomes[0].n_tokens == 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (REFUSED, "503"),
        ([HEAD, text(), None], "disconnect"),
        ([None], "disconnect"),
        (HEAD + text() + chunk({"error": {"message": "broken"}}) + b"0\r\n\r\n", "error event"),
        (HEAD + chunk(b"data: {nonsense\n\n"), "bad answer"),
        (b"SSH-2.0-x\r\n\r\n", "bad answer"),
        (HEAD + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", "no tokens"),
    ],
)
def test_a_failed_request_is_counted_and_the_next_one_sent(tmp_path: Path, answer, error):
    good = HEAD + text() + ending(1)
    driver, _ = drive(
        tmp_path / "s", lambda i, body: good if i % 2 else answer, lambda d: d.closed(1, Budget(4, None))
    )
    assert [o.error for o in driver.outcomes] == [error, None, error, None]


def test_an_answer_that_does_not_end_is_a_timeout(tmp_path: Path):
    driver, _ = drive(
        tmp_path / "s", lambda i, body: HEAD + text(), lambda d: d.closed(1, Budget(1, None)), timeout_s=0.05
    )
    assert driver.outcomes[0].error == "timeout"


def test_nobody_listening_is_an_outcome(tmp_path: Path):
    driver = Driver(Endpoint(socket_path=str(tmp_path / "none")), Workload(Fixed(1), Fixed(1), n_vocab=5), {})
    asyncio.run(driver.closed(2, Budget(3, None)))
    assert [o.error for o in driver.outcomes] == ["refused"] * 3


def test_a_closed_loop_has_as_many_requests_at_once_as_streams(tmp_path: Path):
    answer = HEAD + text() + ending(1)
    driver, server = drive(
        tmp_path / "s", lambda i, body: answer, lambda d: d.closed(5, Budget(20, None)), crowd=5
    )
    assert driver.peak_in_flight == 5
    assert sorted(o.index for o in driver.outcomes) == list(range(20))
    assert server.n_connections == 5


def test_an_open_loop_sends_on_while_nothing_is_answered(tmp_path: Path):
    """The server answers nobody before eight have asked: users who wait for answers would wait for ever."""
    answer = HEAD + text() + ending(1)
    driver, _ = drive(
        tmp_path / "s", lambda i, body: answer, lambda d: d.open(500.0, Budget(8, None)), crowd=8
    )
    assert driver.peak_in_flight == 8
    assert [o.error for o in driver.outcomes] == [None] * 8


def test_requests_begin_until_the_time_is_over(tmp_path: Path):
    answer = HEAD + text() + ending(1)
    driver, _ = drive(tmp_path / "s", lambda i, body: answer, lambda d: d.closed(2, Budget(None, 0.1)))
    assert driver.outcomes
    first = min(o.start_s for o in driver.outcomes)
    assert max(o.start_s for o in driver.outcomes) - first < 0.2


def test_a_warm_up_asks_for_less(tmp_path: Path):
    answer = HEAD + text() + ending(1)
    _, server = drive(
        tmp_path / "s", lambda i, body: answer, lambda d: d.closed(1, Budget(1, None)), max_tokens=2
    )
    assert server.bodies[0]["max_tokens"] == 2


WHOLE = HEAD + text("a") + text("b" * 300) + ending(2)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_an_answer_reads_the_same_however_it_is_cut(sizes):
    reader, payloads, at, turn = AnswerReader(), [], 0, 0
    while at < len(WHOLE):
        assert not reader.is_done
        size = sizes[turn % len(sizes)]
        payloads += reader.feed(WHOLE[at : at + size])
        at, turn = at + size, turn + 1
    assert reader.is_done
    assert reader.status == 200
    assert payloads == AnswerReader().feed(WHOLE)
    assert [json.loads(p)["choices"][0]["text"] for p in payloads[:2]] == ["a", "b" * 300]


def command(path, script, arguments):
    """The command against a server on another thread's loop, as a user's is in another process."""
    ready, done, seen = threading.Event(), threading.Event(), []

    def server_thread():
        async def main():
            async with ScriptedServer(path, script) as server:
                seen.append(server)
                ready.set()
                await asyncio.to_thread(done.wait)

        asyncio.run(main())

    thread = threading.Thread(target=server_thread)
    thread.start()
    try:
        assert ready.wait(20)
        return serve_bench.main(arguments(seen[0])), seen[0]
    finally:
        done.set()
        thread.join()


def answer_in_full(number, body):
    return HEAD + text("a") * body["max_tokens"] + ending(body["max_tokens"])


def test_the_command_writes_table_record_and_picture(tmp_path: Path, capsys):
    def arguments(server):
        loops = ["--socket", server.path, "--streams", "1,2", "--rate", "200", "--requests", "6"]
        more = ["--output-tokens", "3", "--commit", "abc", "--out", str(tmp_path / "out")]
        return [*loops, *more, "--probe-interval", "0.001"]

    def script(number, body):
        return REFUSED if number == 5 else answer_in_full(number, body)

    code, server = command(tmp_path / "s", script, arguments)
    assert code == 0
    (path,) = (tmp_path / "out").glob("serve-*.json")
    record = json.loads(path.read_text())
    metrics = record["metrics"]
    assert record["benchmark"] == "serve"
    assert metrics["streams_1.requests"] == metrics["streams_2.requests"] == metrics["rate_200.requests"] == 6
    assert metrics["streams_1.errors"] == 1
    assert {"streams_2.tok_s", "streams_2.ttft_p99_ms", "streams_2.itl_p99_ms", "livez_p999_ms"} <= set(
        metrics
    )
    assert metrics["probe_failures"] == 0
    assert metrics["livez_probes"] + metrics["readyz_probes"] == server.n_probes > 0
    assert record["runs"][0]["error_kinds"] == {"503": 1}
    assert path.with_suffix(".svg").read_text().startswith("<svg")
    output = capsys.readouterr().out
    assert "2 streams" in output
    assert "1 x 503" in output


def test_the_command_measures_over_tcp_with_a_key(tmp_path: Path):
    key = tmp_path / "key"
    key.write_text("secret-key\n")

    def arguments(server):
        where = ["--url", f"http://127.0.0.1:{server.port}", "--api-key-file", str(key), "--no-probes"]
        return [*where, "--streams", "1", "--requests", "2", "--out", str(tmp_path)]

    code, server = command(None, answer_in_full, arguments)
    assert code == 0
    completions = [head for head in server.heads if head.startswith("POST /v1/completions")]
    assert len(completions) == 3, "two requests and a warm-up"
    assert all("Authorization: Bearer secret-key" in head for head in server.heads)


@pytest.mark.parametrize("wrong", [["--streams", "0"], ["--rate", "-1"], ["--prompt-tokens", "many"]])
def test_wrong_options_end_with_a_line(tmp_path: Path, capsys, wrong):
    code, server = command(tmp_path / "s", answer_in_full, lambda server: ["--socket", server.path, *wrong])
    assert code == 2
    assert "ggufd: bench serve: " in capsys.readouterr().err
    assert not server.bodies


def test_no_server_ends_with_a_line(tmp_path: Path, capsys):
    assert serve_bench.main(["--socket", str(tmp_path / "none"), "--out", str(tmp_path)]) == 69
    assert "ggufd: " in capsys.readouterr().err
