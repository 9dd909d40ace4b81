"""A running box (systemd as PID 1 of private namespaces) and an instance of ggufd@ in it.

Loaded by conftest.py under the name `systemd_box`.
"""

import json
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

SPACES = ("--pid", "--mount", "--uts", "--ipc", "--cgroup")


class Box:
    """A running box. Paths given to `path` are seen from outside at the path it returns."""

    def __init__(self, binds: Sequence[tuple[Path, str]]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ggufd-box-"))
        self._console = (self._folder.parent / f"{self._folder.name}.console").open("w+b")
        mounts = [x for source, target in binds for x in (str(source), target)]
        init = str(Path(__file__).with_name("box_init.sh"))
        command = ["unshare", *SPACES, "--fork", "--kill-child", "bash", init, str(self._folder), *mounts]
        self._unshare = subprocess.Popen(command, stdout=self._console, stderr=subprocess.STDOUT)
        try:
            self.pid = self._wait_for_systemd()
        except BaseException:
            self.close()
            raise

    def _wait_for_systemd(self) -> int:
        def running() -> int | None:
            if self._unshare.poll() is not None:
                self._console.seek(0)
                pytest.skip(f"no box on this machine: {self._console.read()[-300:].decode(errors='replace')}")
            children = (
                Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
            )
            if not children or Path(f"/proc/{children[0]}/comm").read_text().strip() != "systemd":
                return None
            self.pid = int(children[0])
            state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
            return self.pid if state in ("running", "degraded") else None

        return until(running, "systemd is up", 20)

    def close(self) -> None:
        self._unshare.kill()  # --kill-child: PID 1 goes with it, and with PID 1 everything
        self._unshare.wait()
        self._console.close()
        Path(self._console.name).unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def path(self, inside: str) -> Path:
        return Path(f"/proc/{self.pid}/root{inside}")

    def write(self, inside: str, text: str) -> None:
        self.path(inside).parent.mkdir(parents=True, exist_ok=True)
        self.path(inside).write_text(text)

    def run(
        self, *command: str, check: bool = True, timeout_s: float = 40
    ) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", "-t", str(self.pid), "-p", "-m", "-u", "-i", "-C", "-r", "-w", *command]
        done = subprocess.run(enter, capture_output=True, text=True, timeout=timeout_s, check=False)
        if check and done.returncode != 0:
            tail = self.run("journalctl", "-o", "cat", "-n", "30", "_TRANSPORT=stdout", check=False).stdout
            raise AssertionError(f"{command}: {done.stdout}{done.stderr}\n{tail}")
        return done

    def show(self, unit: str, *names: str) -> dict[str, str]:
        given = self.run("systemctl", "show", unit, *(f"-p{name}" for name in names)).stdout
        return dict(line.split("=", 1) for line in given.splitlines())

    def journal(self, unit: str) -> str:
        """What the unit and systemd itself have said about it, oldest first."""
        self.run("journalctl", "--sync")
        return self.run("journalctl", "-o", "cat", "-u", unit, "UNIT=" + unit, check=False).stdout

    def notifications(self, unit: str) -> list[str]:
        """What systemd was told by the unit's process, message by message."""
        self.run("journalctl", "--sync")
        text = self.run("journalctl", "-o", "cat", f"UNIT={unit}", check=False).stdout
        return re.findall(r"Got notification message from PID \d+ \((.*)\)", text)


class Unit:
    """One instance of ggufd@, with its configuration; removed by the fixture that made it."""

    def __init__(self, box: Box, name: str, config: dict[str, Any], service: dict[str, Any]) -> None:
        self.box, self.name = box, name
        self.service, self.socket = f"ggufd@{name}.service", f"ggufd@{name}.socket"
        self.socket_path = f"/run/ggufd/{name}.sock"
        lines = [f"{key} = {json.dumps(value)}" for key, value in ({"device": "host"} | config).items()]
        self.config_path = f"/etc/ggufd/{name}.toml"
        box.write(self.config_path, "\n".join(lines) + "\n")
        if service:
            lines = ["[Service]", *(f"{key}={value}" for key, value in service.items())]
            box.write(f"/etc/systemd/system/{self.service}.d/test.conf", "\n".join(lines) + "\n")
        box.run("systemctl", "daemon-reload")

    def systemctl(self, verb: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.box.run("systemctl", verb, self.service, check=check)

    def show(self, *names: str) -> dict[str, str]:
        return self.box.show(self.service, *names)

    def get(self, path: str) -> tuple[int, Any]:
        return self.ask("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return self.ask("POST", path, json.dumps(body).encode())

    def ask(self, method: str, path: str, body: bytes = b"", timeout_s: float = 30) -> tuple[int, Any]:
        try:
            return self._ask(method, path, body, timeout_s)
        except OSError as error:
            raise AssertionError(f"{path}: {error}\n{self.box.journal(self.service)[-6000:]}") from error

    def _ask(self, method: str, path: str, body: bytes, timeout_s: float) -> tuple[int, Any]:
        head = f"{method} {path} HTTP/1.0\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(self.box.path(self.socket_path)))
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        head_bytes, _, text = answer.partition(b"\r\n\r\n")
        return int(head_bytes.split()[1]), json.loads(text)

    def wait(self, name: str, value: str, timeout_s: float = 30) -> None:
        until(lambda: self.show(name)[name] == value or None, f"{name}={value}", timeout_s, self)

    def close(self) -> None:
        self.box.run("systemctl", "stop", self.socket, self.service, check=False)
        self.box.run("systemctl", "reset-failed", self.socket, self.service, check=False)


def until(question: Callable[[], Any], what: str, timeout_s: float, unit: Unit | None = None) -> Any:
    """Ask until the answer is neither None nor False: processes of a box have no event to wait for."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = question()
        if answer is not None and answer is not False:
            return answer
        time.sleep(0.05)
    told = "" if unit is None else unit.box.journal(unit.service)[-3000:]
    raise AssertionError(f"not within {timeout_s:g} s: {what}\n{told}")
