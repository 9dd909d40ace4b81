"""The mixed load of a soak: what clients of every sort do, and which answers are right."""

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

WORDS = (
    "the",
    "sky",
    "over",
    "old",
    "harbour",
    "towns",
    "turns",
    "grey",
    "when",
    "rain",
    "comes",
    "from",
    "sea",
)
TOLD_PAUSE_S = 0.5  # before the next request of a client that was told to come later
MALFORMED = (
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "max_tokens": -5}',
    b'{"prompt": ',
    b"[" * 2000,
    b'{"prompt": "x", "logit_bias": {"99999999": 1}}',
    b'{"messages": "x"}',
)


@dataclass
class Tally:
    """What came of it all; shared by the client threads."""

    done: Counter[str] = field(default_factory=Counter)  # by sort
    unexpected: list[str] = field(default_factory=list)
    tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, sort: str, tokens: int = 0) -> None:
        with self._lock:
            self.done[sort] += 1
            self.tokens += tokens

    def blame(self, text: str) -> None:
        with self._lock:
            self.done["unexpected"] += 1
            if len(self.unexpected) < 50:
                self.unexpected.append(text)


class Client:
    """One thread of requests of all sorts, until `over`; `pause` makes it stand still between two."""

    def __init__(self, path: str, seed: int, tally: Tally, n_ctx: int) -> None:
        self._path, self._random, self._tally, self._n_ctx = path, random.Random(seed), tally, n_ctx
        self.resting, self.rest, self.over = threading.Event(), threading.Event(), threading.Event()
        # a third is cut off
        self._sorts: list[tuple[Callable[[], None], int]] = [
            (self._short, 6), (self._stream, 3), (self._long, 2), (self._cut, 7), (self._malformed, 3),
            (self._constrained, 1), (self._trickle, 1),
        ]  # fmt: skip
        self.thread = threading.Thread(target=self._run, name=f"soak client {seed}")
        self.thread.start()

    def _run(self) -> None:
        sorts, weights = [s for s, _ in self._sorts], [w for _, w in self._sorts]
        while not self.over.is_set():
            if self.rest.is_set():
                self.resting.set()
                self.over.wait(0.02)
                continue
            self.resting.clear()
            (sort,) = self._random.choices(sorts, weights)
            try:
                sort()
            except OSError as error:
                self._tally.blame(f"{sort.__name__}: {error!r}")
        self.resting.set()

    # ---- sorts

    def _text(self, n_words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=n_words))

    def _short(self) -> None:
        body = {"messages": [{"role": "user", "content": self._text(8)}], "max_tokens": 8}
        self._expect("short", "/v1/chat/completions", body)

    def _long(self) -> None:
        n = min(self._n_ctx // 4, 400)
        self._expect("long", "/v1/completions", {"prompt": self._text(n), "max_tokens": 24, "temperature": 0})

    def _stream(self) -> None:
        body = {"prompt": self._text(12), "max_tokens": 16, "stream": True, "logprobs": 2}
        status, answer = self._ask("/v1/completions", json.dumps(body).encode())
        if status == 200 and not answer.endswith(b"data: [DONE]\n\n"):
            self._tally.blame(f"stream without its end: {answer[-200:]!r}")
        self._judge("stream", status, answer)

    def _constrained(self) -> None:
        body = {"messages": [{"role": "user", "content": "json"}], "max_tokens": 12}
        self._expect(
            "constrained", "/v1/chat/completions", body | {"response_format": {"type": "json_object"}}
        )

    def _cut(self) -> None:
        """Leaves at a random moment, in the queue, in prefill or in mid-stream."""
        body = {"prompt": self._text(self._random.choice((4, 60))), "max_tokens": 200, "stream": True}
        with self._connect() as connection:
            connection.sendall(_message("/v1/completions", json.dumps(body | {"ignore_eos": True}).encode()))
            if self._random.random() < 0.6:
                connection.recv(self._random.randrange(1, 2000))
            else:
                time.sleep(self._random.uniform(0, 0.05))
        self._tally.add("cut")

    def _malformed(self) -> None:
        path = self._random.choice(("/v1/completions", "/v1/chat/completions"))
        status, answer = self._ask(path, self._random.choice(MALFORMED))
        if status in (400, 503):
            self._tally.add("malformed")
        else:
            self._tally.blame(f"malformed got {status}: {answer[:200]!r}")

    def _trickle(self) -> None:
        """Half a request, then gone."""
        message = _message("/v1/completions", b'{"prompt": "x"}')
        with self._connect() as connection:
            connection.sendall(message[: self._random.randrange(1, len(message))])
        self._tally.add("cut")

    # ---- talking

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(120)
        connection.connect(self._path)
        return connection

    def _ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        with self._connect() as connection:
            connection.sendall(_message(path, body))
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, content = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0, content

    def _expect(self, sort: str, path: str, body: object) -> None:
        status, answer = self._ask(path, json.dumps(body).encode())
        self._judge(sort, status, answer)

    def _judge(self, sort: str, status: int, answer: bytes) -> None:
        """200; while a reload swaps the model, 503; when the queue is full, 429."""
        if status == 200:
            moved = b'"weight_h2d_bytes":0' in answer or sort == "stream"
            if not moved:
                self._tally.blame(f"{sort}: weight bytes moved: {answer[-300:]!r}")
            usage = json.loads(answer)["usage"]["completion_tokens"] if sort != "stream" else 16
            self._tally.add(sort, usage)
        elif status in (429, 503):
            self._tally.add(f"told {status}")
            self.over.wait(TOLD_PAUSE_S)
        else:
            self._tally.blame(f"{sort} got {status}: {answer[:200]!r}")


def _message(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.0\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
