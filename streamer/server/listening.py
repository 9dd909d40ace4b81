"""Where the daemon listens.

Sockets given by the service manager, else our own Unix socket, and TCP when asked for.
"""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamer.config import Config, default_socket_path, split_host_port
from streamer.errors import ConfigError, SocketError
from streamer.server.sockets import BACKLOG, BoundSocket, bind_unix


@dataclass
class Listening:
    """Listening sockets; those we bound to a path are removed by `close`."""

    sockets: list[socket.socket] = field(default_factory=list)
    bound: list[BoundSocket] = field(default_factory=list)

    @property
    def places(self) -> list[str]:
        """For the log: paths and addresses."""
        paths = [b.path for b in self.bound]
        ours = {b.socket for b in self.bound}
        return paths + [_place(s) for s in self.sockets if s not in ours]

    def close(self) -> None:
        """Idempotent. Sockets of the service manager stay alive in its hands."""
        while self.bound:
            self.bound.pop().close()
        for listener in self.sockets:
            with contextlib.suppress(OSError):
                listener.close()
        self.sockets.clear()


def _place(listener: socket.socket) -> str:
    name = listener.getsockname()
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)


def open_listening(config: Config, inherited: Sequence[socket.socket]) -> Listening:
    """SocketError names the path or address that cannot be had.

    ConfigError for a TCP socket from the service manager without `listen`: nobody would ask for its key.
    """
    listening = Listening()
    over_tcp = [s for s in inherited if s.family != socket.AF_UNIX]
    if over_tcp and not config.listen:
        raise ConfigError(
            f"listen: is not set, but the service manager gave a socket on {_place(over_tcp[0])}"
        )
    try:
        if inherited:
            listening.sockets.extend(inherited)
        else:
            path = config.socket or default_socket_path()
            bound = bind_unix(path, mode=config.socket_mode, group=config.socket_group)
            listening.bound.append(bound)
            listening.sockets.append(bound.socket)
        if config.listen and not over_tcp:
            listening.sockets.append(_bind_tcp(config.listen))
    except SocketError:
        listening.close()
        raise
    return listening


def _bind_tcp(listen: str) -> socket.socket:
    host, port = split_host_port(listen)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SocketError(f"{listen}: {error.strerror or error}") from None
