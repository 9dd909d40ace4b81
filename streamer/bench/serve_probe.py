"""Asks /livez and /readyz all the while, as a supervisor does: a thread, a new connection each time."""

import socket
import threading
import time
from dataclasses import dataclass, field

from streamer.bench.serve_client import Endpoint

ROUTES = ("/livez", "/readyz")
PATIENCE_S = 5.0


@dataclass
class Prober:
    """`latencies[route]`: seconds of each answer; `failures` counts what was no answer of 200."""

    endpoint: Endpoint
    interval_s: float = 0.01
    latencies: dict[str, list[float]] = field(default_factory=lambda: {route: [] for route in ROUTES})
    failures: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Prober":
        self._thread = threading.Thread(target=self._run, name="prober", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        n = 0
        while not self._stop.wait(self.interval_s):
            route = ROUTES[n % len(ROUTES)]
            n += 1
            started_s = time.perf_counter()
            try:
                ok = ask(self.endpoint, route).startswith(b"HTTP/1.1 200")
            except OSError:
                ok = False
            self.latencies[route].append(time.perf_counter() - started_s)
            self.failures += not ok


def ask(endpoint: Endpoint, route: str) -> bytes:
    """A whole answer, head and body, over a connection of its own. Blocking. OSError."""
    with _connected(endpoint) as connection:
        request = endpoint.head("GET", route).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        connection.sendall(request)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
        return b"".join(parts)


def _connected(endpoint: Endpoint) -> socket.socket:
    if not endpoint.socket_path:
        return socket.create_connection((endpoint.host, endpoint.port), PATIENCE_S)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(PATIENCE_S)
    try:
        connection.connect(endpoint.socket_path)
    except BaseException:
        connection.close()
        raise
    return connection
