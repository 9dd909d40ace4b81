"""Cases 27, 35, 38, 39, 41-43 and 50, with others of their kind, against a whole daemon."""

import json
import os
import socket
import struct
import threading
import time

import pytest
from case_builder import STRING, TOKENS, scripted, text
from case_daemon import message, patient, split

A = TOKENS.index("a")
GOOD = {"prompt": [A], "max_tokens": 3, "temperature": 0}


def answers(daemon) -> bool:
    """Others are served as ever."""
    status, answer = daemon.complete(**GOOD)
    return status == 200 and answer["choices"][0]["text"] == "bcd"


def free(daemon) -> bool:
    states = [daemon.metric(f'ggufd_sequences{{state="{x}"}}') for x in ("waiting", "prefilling", "decoding")]
    return states == [0, 0, 0] and daemon.metric('ggufd_kv_pages{state="used"}') == 0


def wait_free(daemon, seconds: float) -> None:
    deadline = time.monotonic() + patient(seconds)
    while not free(daemon):
        assert time.monotonic() < deadline, daemon.get("/metrics")[1].decode()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def endless(nursery, tmp_path_factory):
    """A daemon whose model never ends by itself; on TCP too."""
    from case_daemon import Daemon

    folder = tmp_path_factory.mktemp("endless")
    model = scripted(n_ctx=8192, endless=True).write(folder / "m.gguf")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ("--listen", f"127.0.0.1:{port}", "--no-auth", "--max-sequences", "2")
    daemon = Daemon(nursery, folder / "d", model, options)
    daemon.port = port
    yield daemon
    daemon.close()


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


LONG = json.dumps({"prompt": [A], "max_tokens": 8000, "temperature": 0, "ignore_eos": True}).encode()
LONG_STREAM = LONG[:-1] + b', "stream": true}'
LONG_PROMPT = json.dumps({"prompt": [A] * 8000, "max_tokens": 100, "ignore_eos": True}).encode()


@pytest.mark.parametrize("leave", ["close", "reset", "reset on tcp", "shutdown both"])
@pytest.mark.parametrize("body", [LONG_STREAM, LONG, LONG_PROMPT], ids=["stream", "whole", "prefill"])
def test_case_35_a_client_that_leaves_frees_its_sequence(endless, leave: str, body: bytes) -> None:
    if leave == "reset on tcp":
        client = socket.create_connection(("127.0.0.1", endless.port))
    else:
        client = endless.connect()
    client.sendall(
        message("POST", "/v1/completions", body, version="1.1").replace(b"Host: x", b"Host: 127.0.0.1")
    )
    if body is LONG_STREAM:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    else:
        deadline = time.monotonic() + patient(5)
        while free(endless):
            assert time.monotonic() < deadline
    if leave.startswith("reset"):
        reset(client)
    elif leave == "close":
        client.close()
    else:
        client.shutdown(socket.SHUT_RDWR)
    wait_free(endless, 1.0)
    client.close()


def test_case_35_in_the_queue_and_in_a_crowd(endless) -> None:
    """Two run, six wait; all leave but the last, which gets its whole answer."""
    clients = [endless.connect() for _ in range(8)]
    for client in clients:
        client.sendall(message("POST", "/v1/completions", LONG_STREAM, version="1.1"))
    assert clients[0].recv(100).startswith(b"HTTP/1.1 200")
    for client in clients:
        client.close()
    status, answer = endless.complete(prompt=[A], max_tokens=5, temperature=0, ignore_eos=True)
    assert (status, answer["choices"][0]["text"]) == (200, "bcdef")
    wait_free(endless, 1.0)


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999", "-1", "9" * 400, "9" * 5000, '"1"', "[]", "null1"]
)
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "frequency_penalty", "repeat_penalty"])
def test_case_38_numbers_that_are_none(shared, name: str, number: str) -> None:
    if (name, number) == ("frequency_penalty", "-1"):
        number = "-9"  # -1 is legal there
    body = f'{{"prompt": [{A}], "max_tokens": 3, "{name}": {number}}}'.encode()
    status, answer = shared.ask("POST", "/v1/completions", body)
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    good = f'{{"prompt": [{A}], "max_tokens": 3, "{name}": 0.5}}'.encode()
    assert shared.ask("POST", "/v1/completions", good)[0] == 200


@pytest.mark.parametrize(
    "bias",
    [{"191222": 1}, {"64": 1}, {"-1": 1}, {"x": 1}, {"8": None}, {"8": 1e9}, [8], {"8" * 400: 1}, {"1e1": 1}],
)
def test_case_39_bias_on_what_is_no_token(shared, bias) -> None:
    status, answer = shared.complete(**GOOD, logit_bias=bias)
    assert (status, answer["error"]["param"]) == (400, "logit_bias")
    status, answer = shared.complete(**GOOD, logit_bias={str(TOKENS.index("z")): 100})
    assert (status, answer["choices"][0]["text"]) == (200, "zzz")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 20_000,
        b'{"a":' * 20_000,
        b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"messages": ' + b'[{"content":' * 5_000,
        b'{"prompt": "x", "stop": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "x"',
        b'{"prompt": "x"}}',
        b"\xef\xbb\xbf[]",
        b"null",
        b"",
        b"\0" * 1000,
    ],
    ids=range(12),
)
def test_case_41_bodies_that_are_no_requests(shared, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"):
        status, answer = shared.ask("POST", path, body)
        assert status == 400, (path, answer)
    assert answers(shared)


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 3",),
        ("Content-Length: 40", "Content-Length: 41"),
        ("Transfer-Encoding: chunked",),
        ("Content-Length: +5",),
        ("Content-Length: -1",),
        ("Content-Length: 0x10",),
        ("X: " + "y" * 100_000,),
        ("\0: x",),
        ("No colon here",),
    ],
    ids=range(9),
)
def test_case_42_headers_that_could_be_read_in_two_ways(shared, headers: tuple[str, ...]) -> None:
    body = json.dumps(GOOD).encode()
    request = message("POST", "/v1/completions", body, *headers, version="1.1")
    if "-1" in headers[0] or "x10" in headers[0] or "+5" in headers[0]:
        request = request.replace(f"Content-Length: {len(body)}\r\n".encode(), b"")
    status, answer = split(shared.raw(request))  # returns when the daemon closes
    assert status == 400, answer
    assert answers(shared)


@pytest.fixture(scope="module")
def hurried(nursery, tmp_path_factory):
    """A daemon with short deadlines and room for large bodies."""
    from case_daemon import Daemon

    folder = tmp_path_factory.mktemp("hurried")
    model = scripted().write(folder / "m.gguf")
    options = ("--header-timeout", "0.4", "--body-timeout", "0.4", "--max-body-mib", "64")
    daemon = Daemon(nursery, folder / "d", model, options)
    yield daemon
    daemon.close()


@pytest.mark.parametrize("part", ["header", "body", "between"])
def test_case_42_a_byte_at_a_time_meets_its_deadline(hurried, part: str) -> None:
    request = message("POST", "/v1/completions", json.dumps(GOOD).encode() + b" " * 1000, version="1.1")
    sent = {"header": 0, "body": request.index(b"\r\n\r\n") + 6, "between": request.index(b"\r\n\r\n") + 2}[
        part
    ]
    with hurried.connect() as client:
        client.sendall(request[:sent])
        client.settimeout(0.05)
        began, answer = time.monotonic(), b""
        while not answer:
            client.sendall(request[sent : sent + 1])
            sent += 1
            assert time.monotonic() - began < patient(3.0)
            try:
                answer = client.recv(65536)
            except TimeoutError:
                continue
        assert b" 408 " in answer.split(b"\r\n")[0]
    assert answers(hurried)


class Prober(threading.Thread):
    """Asks a probe all the time; the longest wait is kept."""

    def __init__(self, daemon) -> None:
        super().__init__()
        self._daemon, self._over, self.waits = daemon, threading.Event(), []
        self.start()

    def run(self) -> None:
        while not self.waits or not self._over.wait(0.003):
            began = time.perf_counter()
            assert self._daemon.get("/livez")[0] == 200
            self.waits.append(time.perf_counter() - began)

    def end(self) -> float:
        self._over.set()
        self.join()
        return max(self.waits)


def test_case_43_a_prompt_of_30_mb(shared, hurried) -> None:
    """413 where bodies are limited to 16 MiB, 400 where they are not; probes answer all the while.

    30 MB through the tokenizer are tried in tests/text; here a tenth of it is.
    """
    for daemon, expected, nbytes in ((shared, 413, 30_000_000), (hurried, 400, 3_000_000)):
        body = json.dumps({"prompt": "ab cd " * (nbytes // 6)}).encode()
        prober = Prober(daemon)
        with daemon.connect(60) as client:
            try:
                client.sendall(message("POST", "/v1/completions", body))
            except BrokenPipeError:
                assert expected == 413
            status, answer = split(b"".join(iter(lambda c=client: c.recv(65536), b"")))
        longest = prober.end()
        assert status == expected, answer
        assert longest < patient(0.1)
        assert answers(daemon)


@pytest.mark.parametrize(
    ("template", "status"),
    [
        ("{{ ''.__class__.__mro__ }}", 400),
        ("{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}", 400),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", 400),
        ("{{ 'a' * 10**10 }}", 400),
        ("{% for", 400),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", 200),
    ],
)
def test_case_27_templates_are_bounded_while_probes_answer(
    launch, tmp_path, template: str, status: int
) -> None:
    file = scripted().key("tokenizer.chat_template", STRING, text(template))
    daemon = launch(file.write(tmp_path / "m.gguf"), "--template-timeout", "0.5")
    prober = Prober(daemon)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0}
    began = time.monotonic()
    told, answer = daemon.ask("POST", "/v1/chat/completions", body)
    assert time.monotonic() - began < patient(3)
    assert prober.end() < patient(0.1)
    assert told == status, answer
    assert "__class__" not in json.dumps(answer) or "unsafe" in json.dumps(answer)
    assert answers(daemon)  # completions work whatever the template does


def test_case_50_the_device_fails_in_mid_decode(launch, tmp_path) -> None:
    model = scripted(n_ctx=8192, endless=True).write(tmp_path / "m.gguf")
    now = tmp_path / "now"
    daemon = launch(model, change="fail_in_decode", env={"FAIL_WHEN": str(now)})
    with daemon.connect() as stream, daemon.connect() as whole:
        for client, body in ((stream, LONG_STREAM), (whole, LONG)):
            client.sendall(message("POST", "/v1/completions", body))
        deadline = time.monotonic() + patient(10)
        while daemon.metric('ggufd_sequences{state="decoding"}') < 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        now.touch()
        text_of = [b"".join(iter(lambda c=c: c.recv(65536), b"")) for c in (stream, whole)]
    assert b'data: {"error":' in text_of[0]
    assert b"ILLEGAL" not in text_of[0] + text_of[1]  # internals stay in the log
    assert split(text_of[1])[0] == 500
    for path in ("/readyz", "/health"):
        assert daemon.get(path)[0] == 503
    assert daemon.get("/readyz")[1]["status"] == "failed"
    assert daemon.complete(**GOOD)[0] == 503
    assert daemon.wait() == 71
    assert "cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS" in daemon.text.splitlines()[-1]
    assert not os.path.exists(daemon.path)
    assert daemon.told[-1].startswith(("EXTEND_TIMEOUT_USEC", "STATUS=failed"))


def test_case_50_a_device_that_fails_before_ready_is_never_ready(launch, tmp_path) -> None:
    model = scripted().write(tmp_path / "m.gguf")
    env = {"FAIL_WHEN": str(tmp_path), "FAIL_AT": "1"}
    daemon = launch(model, ready=False, change="fail_in_decode", env=env)
    assert daemon.wait() == 71
    assert not any(x.startswith("READY") for x in daemon.told)
