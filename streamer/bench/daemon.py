"""A daemon under measurement: from exec to READY, its account, its end; as systemd and a client see it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamer.bench.meters import own_memory

_START_CUDA = """
import time
from cuda.bindings import driver
started = time.perf_counter()
assert driver.cuInit(0)[0] == 0
code, device = driver.cuDeviceGet({ordinal})
assert code == 0
assert driver.cuDevicePrimaryCtxRetain(device)[0] == 0
print(time.perf_counter() - started)
"""


class DaemonError(RuntimeError):
    """The daemon ended or stayed silent instead of saying READY; carries the end of its output."""


@dataclass
class Daemon:
    """A daemon process and what was seen of it."""

    process: subprocess.Popen[bytes]
    socket_path: str
    started_s: float  # by perf_counter
    log: Path
    ready_s: float = 0.0  # from exec to READY=1
    own_memory_nbytes: int = 0  # peak of its anonymous memory until READY
    statuses: list[str] = field(default_factory=list)  # STATUS= lines, as systemd would show them

    def failure(self, reason: str) -> DaemonError:
        return DaemonError(f"{reason}: {self.log.read_text(errors='replace')[-2000:]}")

    def get(self, path: str) -> Any:
        """A JSON answer, or text where it is none."""
        return self.request("GET", path)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self.request("POST", path, json.dumps(body))

    def request(self, method: str, path: str, body: str | None = None) -> Any:
        connection = UnixConnection(self.socket_path)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def stop(self) -> float:
        """SIGTERM; seconds until the process is gone."""
        started_s = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)
        return time.perf_counter() - started_s


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float = 120.0) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@contextlib.contextmanager
def started_daemon(
    model: str, *, device: str, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[tuple[Daemon, socket.socket]]:
    """`ggufd serve MODEL`, just started, and the socket its notifications arrive at; ended with the block."""
    with tempfile.TemporaryDirectory(prefix="ggufd-bench-") as folder:
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.bind(f"{folder}/notify.sock")
        path = f"{folder}/ggufd.sock"
        command = (sys.executable, "-m", "streamer", "serve", model, "--socket", path, "--device", device)
        log = Path(folder) / "log"
        with notify, log.open("wb") as output:
            started_s = time.perf_counter()
            process = subprocess.Popen(
                [*command, *options],
                env={
                    **installed_environment(),
                    **(environment or {}),
                    "NOTIFY_SOCKET": f"{folder}/notify.sock",
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                yield Daemon(process, path, started_s, log), notify
            finally:
                _end(process)


def installed_environment() -> dict[str, str]:
    """Ours, but for the wish to write no bytecode: every start would compile all modules, which an installed
    package, whose bytecode lies beside it, never does.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@contextlib.contextmanager
def running_daemon(
    model: str,
    *,
    device: str,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 180.0,
) -> Iterator[Daemon]:
    """A daemon once it said READY. DaemonError when it never does."""
    with started_daemon(model, device=device, options=options, environment=environment) as (daemon, notify):
        _wait_ready(daemon, notify, timeout_s)
        yield daemon


def interrupt_load(
    model: str, *, device: str, fraction: float, options: Sequence[str] = ()
) -> tuple[float, float]:
    """SIGTERM once `fraction` of the bytes are resident: (the fraction met, seconds until it is gone).

    DaemonError when it is ready before that, says READY after the signal, or ends otherwise than cleanly.
    """
    with started_daemon(model, device=device, options=options) as (daemon, notify):
        met = 0.0
        while met < fraction:
            if daemon.process.poll() is not None:
                raise daemon.failure("ended before it was told to")
            with contextlib.suppress(OSError, http.client.HTTPException):
                met = float(daemon.get("/readyz")["fraction"])
            time.sleep(0.002)
        seconds = daemon.stop()
        notify.setblocking(False)
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(notify.recv(65536).decode())
        if daemon.process.returncode != 0 or any("READY=1" in m.splitlines() for m in messages):
            raise daemon.failure(
                f"was ready, or ended with {daemon.process.returncode}, at {met:.2f} of the load"
            )
        return met, seconds


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
    if process.poll() is None:
        process.kill()
        process.wait()


def _wait_ready(daemon: Daemon, notify: socket.socket, timeout_s: float) -> None:
    notify.settimeout(0.05)
    while time.perf_counter() - daemon.started_s < timeout_s:
        try:
            message = notify.recv(65536).decode()
        except TimeoutError:
            message = ""
        daemon.ready_s = time.perf_counter() - daemon.started_s
        daemon.statuses += [x[7:] for x in message.splitlines() if x.startswith("STATUS=")]
        if daemon.process.poll() is not None:
            raise daemon.failure(f"exit code {daemon.process.returncode}")
        if "READY=1" in message.splitlines():
            return
        with contextlib.suppress(OSError):
            daemon.own_memory_nbytes = max(daemon.own_memory_nbytes, own_memory(daemon.process.pid))
    raise daemon.failure(f"not ready after {timeout_s:.0f} s")


def cuda_start_s(ordinal: int) -> float:
    """Seconds of cuInit and the primary context in a process of their own: nobody is ready sooner."""
    code = _START_CUDA.format(ordinal=ordinal)
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(answer.stdout)
