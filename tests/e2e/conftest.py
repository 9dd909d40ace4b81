"""Real daemons in processes of their own, as systemd and clients see them.

And models whose every token is known.
"""

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

READY_S = 90.0


def patient(seconds: float) -> float:
    """A time limit for an idle machine, stretched by how much busier than that this one is."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float = 30.0) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Daemon:
    """`ggufd serve` running; `notified` are the messages systemd would have got, each a list of lines."""

    process: "subprocess.Popen[bytes]"
    path: str
    log: Path
    manager: socket.socket
    notified: list[list[str]] = field(default_factory=list)

    def ask(
        self, method: str, route: str, body: Any = None, *, timeout: float = 30.0, **headers: str
    ) -> Answer:
        connection = UnixConnection(self.path, timeout)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, route, data, headers)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        except ConnectionError as error:
            about = f"exit code {self.process.poll()}, log: {self.text[-2000:]}"
            raise type(error)(f"{error}; {about}") from error
        finally:
            connection.close()

    def get(self, route: str, **options: Any) -> Answer:
        return self.ask("GET", route, **options)

    def post(self, route: str, body: Any, **options: Any) -> Answer:
        return self.ask("POST", route, body, **options)

    def complete(self, **members: Any) -> Answer:
        return self.post("/v1/completions", members)

    def metric(self, name: str) -> float:
        """A value of /metrics by its name with labels."""
        for line in self.get("/metrics").body.decode().splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    def listen(self, timeout_s: float) -> bool:
        """Take in what was notified; wait for one message at most that long."""
        ready, _, _ = select.select([self.manager], [], [], timeout_s)
        if ready:
            self.notified.append(self.manager.recv(65536).decode().splitlines())
        return bool(ready)

    def wait_notified(self, line: str, timeout_s: float = READY_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(line in message for message in self.notified):
            assert time.monotonic() < deadline, f"no {line}: {self.text[-3000:]}"
            self.listen(0.05)
            if self.process.poll() is not None and not self.listen(0):
                raise AssertionError(
                    f"ended with {self.process.returncode} before {line}: {self.text[-3000:]}"
                )

    def wait_listening(self) -> None:
        deadline = time.monotonic() + READY_S
        while not self._is_listening():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def _is_listening(self) -> bool:
        """The file alone does not say so: on a busy machine its maker may rest between bind and listen."""
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self.path) == 0

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 40.0) -> int:
        """Exit code; everything notified until the end is taken in."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        while self.listen(0):
            pass
        return code

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def lines(self) -> list[str]:
        """All notified lines in their order."""
        return [line for message in self.notified for line in message]


Start = Callable[..., Daemon]


@contextlib.contextmanager
def starter(folder: Path) -> Iterator[Start]:
    running: list[Daemon] = []

    def start(
        model: object,
        *options: str,
        environment: Mapping[str, str] | None = None,
        socket_path: str | None = None,
        ready: bool = True,
        command: Sequence[str] = (),
    ) -> Daemon:
        place = folder / str(len(running))
        place.mkdir()
        path = socket_path or str(place / "s")
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        manager.bind(str(place / "n"))
        own = ["--socket", path] if "--config" not in options else []
        arguments = [
            *(command or [sys.executable, "-m", "streamer"]),
            "serve",
            str(model),
            *own,
            "--device",
            "host",
        ]
        log = place / "log"
        env = {**os.environ, "NOTIFY_SOCKET": str(place / "n"), **(environment or {})}
        with log.open("wb") as output:
            process = subprocess.Popen([*arguments, *options], stdout=output, stderr=output, env=env)
        daemon = Daemon(process, path, log, manager)
        running.append(daemon)
        if ready:
            daemon.wait_notified("READY=1")
        return daemon

    try:
        yield start
    finally:
        for daemon in running:
            if daemon.process.poll() is None:
                daemon.process.kill()
                daemon.process.wait()
            daemon.manager.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(model, *options)`: a daemon on the host device, ready unless `ready=False`.

    Killed after the test.
    """
    with starter(tmp_path) as start:
        yield start


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon with SmolLM2 for all tests that leave it as they found it."""
    with starter(tmp_path_factory.mktemp("smollm2")) as start:
        yield start(smollm2_path, "--ctx", "4096", "--verify")


# ---- models whose next token is a function of the last -----------------------------------------------------

N = 64  # n_embd and rows of the logits
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJ.!"
EMOJI_BYTES = (0xF0, 0x9F, 0x98, 0x80)


class Scripted:
    """The vocabulary of scripted models.

    Three control tokens, <|im_end|>, the emoji's bytes, some letters.
    """

    tokens = ("<unk>", "<s>", "</s>", "<|im_end|>", *(f"<0x{b:02X}>" for b in EMOJI_BYTES), *LETTERS)
    types = (UNKNOWN, CONTROL, CONTROL, CONTROL, *[BYTE] * 4, *[NORMAL] * len(LETTERS))
    end_of_text, end_of_turn = 2, 3
    emoji = (4, 5, 6, 7)

    @classmethod
    def ids(cls, text: str) -> list[int]:
        return [cls.tokens.index(c) for c in text]


def write_scripted(
    path: Path, chain: Sequence[int], *, n_ctx: int = 256, more: Mapping[int, int] | None = None
) -> Path:
    """A model that says `chain` id by id (all different), then end of text. `more`: further followers."""
    follow = dict(zip(chain, [*chain[1:], Scripted.end_of_text], strict=True)) | dict(more or {})
    output = np.zeros((N, N), np.float32)  # (logit row, embedding)
    for last in range(N):
        output[follow.get(last, Scripted.end_of_text), last] = 1.0
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(N)
    writer.add_block_count(1)
    writer.add_feed_forward_length(N)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(Scripted.tokens))
    writer.add_token_types(list(Scripted.types))
    writer.add_token_scores([-float(i) for i in range(len(Scripted.tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    eye, zero = np.eye(N, dtype=np.float32), np.zeros((N, N), np.float32)
    writer.add_tensor("token_embd.weight", eye)
    writer.add_tensor("output_norm.weight", np.ones(N, np.float32))
    writer.add_tensor("output.weight", output)
    for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
        writer.add_tensor(f"blk.0.{name}.weight", eye)
    for name in ("attn_output", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", zero)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(N, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def limit_s() -> Callable[[float], float]:
    return patient


@pytest.fixture(scope="session")
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture(scope="session")
def make_scripted() -> Callable[..., Path]:
    return write_scripted
