"""One GET over the Unix socket, without an HTTP library: an exec probe must start fast."""

import json
import socket
from typing import Any

from streamer.errors import GgufdError


class Unreachable(GgufdError):
    """Nobody answers on the socket."""

    exit_code = 1


def get(path: str, socket_path: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """(status, body). Unreachable when there is no socket, no listener or no answer in time."""
    request = f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(socket_path)
            connection.sendall(request)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
    except OSError as error:
        raise Unreachable(f"{socket_path}: {_reason(error)}") from None
    head, _, body = answer.partition(b"\r\n\r\n")
    fields = head.split(b" ", 2)
    if len(fields) < 2 or not fields[1].isdigit():
        raise Unreachable(f"{socket_path}: what answers there does not speak HTTP")
    return int(fields[1]), body


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return f"no daemon serves there ({error.strerror}); `ggufd serve MODEL` starts one"
    return error.strerror or str(error)


def get_residency(socket_path: str, timeout_s: float = 5.0) -> dict[str, Any]:
    _, body = get("/readyz", socket_path, timeout_s)
    try:
        residency = json.loads(body)
    except ValueError:
        residency = None
    if not isinstance(residency, dict) or "status" not in residency:
        raise Unreachable(f"{socket_path}: what answers there is not ggufd")
    return residency


def amount(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def one_line(r: dict[str, Any]) -> str:
    """The residency object for people."""
    name = r["model"].rpartition("/")[2]
    if r["status"] == "failed":
        return f"failed: {r['error']['message']}" if r["error"] else "failed"
    if r["status"] == "loading":
        eta = "" if r["eta_s"] is None else f", {r['eta_s']:.1f} s left"
        done = f"{amount(r['bytes_resident'])} of {amount(r['bytes_total'])} ({r['fraction']:.0%})"
        stalled = f", no progress for {r['last_progress_s']:.0f} s" if r["last_progress_s"] > 5 else ""
        rate = f"{amount(r['bytes_per_s'])}/s"
        return f"loading ({r['phase']}): {name} on {r['device']}, {done}, {rate}{eta}{stalled}"
    detail = f"{amount(r['bytes_total'])} resident in {r['elapsed_s']:.2f} s ({amount(r['bytes_per_s'])}/s)"
    moved = f"{r['weight_h2d_bytes_serve']} weight bytes moved since"
    return f"{r['status']}: {name} on {r['device']}, {detail}, {moved}"
