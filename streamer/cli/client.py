"""HTTP over the Unix socket with the standard library: JSON calls and server-sent events."""

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

from streamer.cli.probe import Unreachable
from streamer.errors import GgufdError


class RefusedError(GgufdError):
    """The daemon answered with an error."""

    exit_code = 1


class UnixConnection(http.client.HTTPConnection):
    """http.client over AF_UNIX."""

    def __init__(self, socket_path: str, timeout_s: float | None = None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._socket_path = socket_path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._socket_path)


def _post(
    socket_path: str, path: str, body: dict[str, Any]
) -> tuple[UnixConnection, http.client.HTTPResponse]:
    connection = UnixConnection(socket_path)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise Unreachable(f"{socket_path}: {error}") from None
    if response.status != 200:
        text = response.read()
        connection.close()
        raise RefusedError(f"HTTP {response.status}: {_message(text)}")
    return connection, response


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def post(socket_path: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    connection, response = _post(socket_path, path, body)
    with connection.sock if connection.sock else response:
        answer = json.loads(response.read())
    assert isinstance(answer, dict)
    return answer


def post_events(socket_path: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream until [DONE]. RefusedError for an error event or a stream that breaks off."""
    connection, response = _post(socket_path, path, body)
    try:
        for line in response:
            if not line.startswith(b"data: "):
                continue  # comments keep the connection alive; blank lines end events
            data = line[6:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise RefusedError(str(event["error"]["message"]))
            yield event
        raise RefusedError("the stream broke off")
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{socket_path}: {error}") from None
    finally:
        connection.close()
