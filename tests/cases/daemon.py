"""A daemon under test, forked from the nursery; and raw requests to it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

READY_S = 60.0
LOADED = "READY=1"


def patient(seconds: float) -> float:
    """A time limit of an idle machine, stretched by how much busier than that this one is."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


class Nursery:
    """The warm process. `own_kib`: its memory, which every fork shares."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("nursery.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.own_kib = int(self._answer()["peak_kib"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def fork(self, args: Sequence[str], log: Path, **more: Any) -> int:
        command = {"args": list(args), "log": str(log), "env": {}, "change": None, "memory": None, **more}
        return int(self.ask(command)["pid"])

    def wait(self, pid: int, seconds: float) -> dict[str, Any]:
        return self.ask({"wait": pid, "seconds": seconds})

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class Daemon:
    """`ggufd serve` in a fork. `told` are the lines systemd would have got."""

    def __init__(
        self,
        nursery: Nursery,
        place: Path,
        model: object,
        options: Sequence[str],
        *,
        ready: bool = True,
        change: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        place.mkdir()
        self.path, self.log = str(place / "s"), place / "log"
        self.told: list[str] = []
        self._nursery, self._ended = nursery, False
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind(str(place / "n"))
        args = ["serve", str(model), "--device", "host", "--socket", self.path, *options]
        environment = {"NOTIFY_SOCKET": str(place / "n"), **(env or {})}
        self.pid = nursery.fork(args, self.log, change=change, env=environment)
        if ready:
            self.wait_told(LOADED)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def listen(self, seconds: float) -> bool:
        self._manager.settimeout(max(seconds, 1e-6))
        try:
            self.told += self._manager.recv(65536).decode().splitlines()
        except (TimeoutError, BlockingIOError):
            return False
        return True

    def wait_told(self, line: str) -> None:
        deadline = time.monotonic() + READY_S
        while not any(x.startswith(line) for x in self.told):
            assert time.monotonic() < deadline, f"never {line}: {self.text[-2000:]}"
            if not self.listen(0.02) and not os.path.exists(f"/proc/{self.pid}/exe"):
                raise AssertionError(f"ended before {line}: {self.text[-2000:]}")

    def wait(self, seconds: float = 20.0) -> int | None:
        """Exit code, -signal, or None while it still runs."""
        code = self._nursery.wait(self.pid, seconds)["code"]
        self._ended = code is not None
        while self.listen(0):
            pass
        return code

    def stop(self) -> int | None:
        os.kill(self.pid, signal.SIGTERM)
        return self.wait()

    def close(self) -> None:
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        self._manager.close()

    # ---- talking to it -------------------------------------------------------------------------------------

    def connect(self, timeout_s: float = 30.0) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(self.path)
        except OSError:
            connection.close()
            raise
        return connection

    def raw(self, request: bytes) -> bytes:
        """Everything answered until the connection ends."""
        with self.connect() as connection:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    def ask(self, method: str, path: str, body: bytes | dict[str, Any] = b"") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, text = split(self.raw(message(method, path, data)))
        return status, json.loads(text) if text[:1] in (b"{", b"[") else text

    def get(self, path: str) -> tuple[int, Any]:
        return self.ask("GET", path)

    def complete(self, **members: Any) -> tuple[int, Any]:
        return self.ask("POST", "/v1/completions", members)

    def metric(self, name: str) -> float:
        _, text = self.get("/metrics")
        for line in text.decode().splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        raise KeyError(name)


def message(method: str, path: str, body: bytes, *headers: str, version: str = "1.0") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: x", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def split(answer: bytes) -> tuple[int, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body
