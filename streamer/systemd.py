"""What systemd and the daemon say to each other: notifications, inherited sockets, watchdog. A no-op where
unset.

Protocols: sd_notify(3), sd_listen_fds(3), sd_watchdog_enabled(3). The environment is read here and in
config.py only.
"""

import fcntl
import os
import socket
import stat
import time
from collections.abc import MutableMapping
from dataclasses import dataclass

from streamer.errors import ConfigError

FIRST_DESCRIPTOR = 3


class Notifier:
    """Sends state to the service manager.

    READY is sent at most once between reloads and never after STOPPING.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._ready = False
        self._stopping = False

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] | None = None) -> "Notifier":
        """Takes NOTIFY_SOCKET out of the environment, so that no child speaks in our name."""
        environ = os.environ if environ is None else environ
        return cls(environ.pop("NOTIFY_SOCKET", ""))

    def _send(self, *lines: str) -> None:
        if self._address[:1] not in ("/", "@"):
            return
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.setblocking(False)  # a deaf manager must not block the loop
                name = "\0" + self._address[1:] if self._address[0] == "@" else self._address
                self._socket.connect(name)
            self._socket.send("\n".join(lines).encode())
        except OSError:
            self.close()  # connect anew next time: the manager may have been re-executed

    def status(self, text: str, *, extend_s: float | None = None) -> None:
        """One line for `systemctl status`; with `extend_s`, the start may take that much longer from now."""
        if self._stopping:
            return
        lines = ["STATUS=" + text.replace("\n", " ")]
        if extend_s is not None and not self._ready:
            lines.append(f"EXTEND_TIMEOUT_USEC={int(extend_s * 1e6)}")
        self._send(*lines)

    def ready(self, status: str) -> None:
        if self._ready or self._stopping:
            return
        self._ready = True
        self._send("READY=1", "STATUS=" + status)

    def reloading(self) -> None:
        """Must be followed by `ready`.

        MONOTONIC_USEC is what Type=notify-reload compares with its own clock.
        """
        if self._stopping:
            return
        self._ready = False
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def watchdog(self) -> None:
        if not self._stopping:
            self._send("WATCHDOG=1")

    def stopping(self, status: str, *, extend_s: float | None = None) -> None:
        """The last word.

        `extend_s`: how long the end may take from now (a drain longer than TimeoutStopSec=).
        """
        if self._stopping:
            return
        self._stopping = True
        lines = ["STOPPING=1", "STATUS=" + status.replace("\n", " ")]
        self._send(*lines, *([] if extend_s is None else [f"EXTEND_TIMEOUT_USEC={int(extend_s * 1e6)}"]))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass(frozen=True)
class InheritedSocket:
    name: str  # FileDescriptorName= of the unit, "" without
    socket: socket.socket


def inherited_sockets(environ: MutableMapping[str, str] | None = None) -> list[InheritedSocket]:
    """Listening stream sockets passed by the service manager; the variables are taken out of the environment.

    ConfigError for a descriptor that is no listening stream socket (Accept=yes, datagram, FIFO).
    """
    environ = os.environ if environ is None else environ
    count = environ.pop("LISTEN_FDS", "")
    owner = environ.pop("LISTEN_PID", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if owner != str(os.getpid()) or not count.isdigit():
        return []
    return [
        InheritedSocket(names[i] if i < len(names) else "", _adopt(FIRST_DESCRIPTOR + i))
        for i in range(int(count))
    ]


def _adopt(descriptor: int) -> socket.socket:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise ConfigError(f"LISTEN_FDS: descriptor {descriptor} is not a socket")
    except OSError as error:
        raise ConfigError(f"LISTEN_FDS: descriptor {descriptor}: {error.strerror}") from None
    fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    adopted = socket.socket(fileno=descriptor)
    if adopted.type != socket.SOCK_STREAM or not adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        adopted.detach()
        raise ConfigError(f"LISTEN_FDS: descriptor {descriptor} is not a listening stream socket")
    adopted.setblocking(False)
    return adopted


def watchdog_interval_s(environ: MutableMapping[str, str] | None = None) -> float | None:
    """Half of WatchdogSec=, as sd_watchdog_enabled(3) advises.

    None when no watchdog is armed for this process.
    """
    environ = os.environ if environ is None else environ
    usec, owner = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
    if not usec.isdigit() or int(usec) == 0 or owner not in ("", str(os.getpid())):
        return None
    return int(usec) / 2e6
