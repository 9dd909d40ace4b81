"""The socket file: its mode is right from birth, a live owner is never robbed, only our own file is removed.

asyncio and uvloop unlink whatever lies at the path and so steal a live server's socket; here a lock beside
the path decides who may bind, the socket is born in a private directory, and a rename makes it visible
finished.
"""

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from streamer.errors import SocketError

MAX_PATH_BYTES = 107  # sockaddr_un.sun_path without its terminating zero
BACKLOG = 1024
LINGER_S = 0.3
SO_PEERGROUPS = 59  # <asm-generic/socket.h>; not in the socket module


@dataclass
class BoundSocket:
    """A listening Unix socket that we bound; `close` removes the file if it is still ours."""

    path: str
    socket: socket.socket
    identity: tuple[int, int]  # device and inode of the socket file
    lock_descriptor: int

    def close(self) -> None:
        self.socket.close()
        with contextlib.suppress(OSError):
            status = os.lstat(self.path)
            if (status.st_dev, status.st_ino) == self.identity:
                os.unlink(self.path)
        _release_lock(self.path, self.lock_descriptor)


def bind_unix(path: str, *, mode: int = 0o660, group: str = "") -> BoundSocket:
    """Bind and listen. SocketError: path too long, live owner, not a socket, no such group, no permission."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise SocketError(f"{path}: a socket's path has at most {MAX_PATH_BYTES} bytes")
    gid = _group_id(path, group)
    parent = os.path.dirname(os.path.abspath(path))
    try:
        _prepare_directory(parent)
        lock = _take_lock(path)
    except OSError as error:
        raise SocketError(f"{path}: {error.strerror}") from None
    try:
        _refuse_living(path)
        listening, identity = _bind(path, parent, mode, gid)
    except OSError as error:
        _release_lock(path, lock)
        raise SocketError(f"{path}: {error.strerror}") from None
    except SocketError:
        _release_lock(path, lock)
        raise
    return BoundSocket(path, listening, identity, lock)


def _group_id(path: str, group: str) -> int:
    if not group:
        return -1
    try:
        return int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise SocketError(f"{path}: there is no group {group}") from None


def _prepare_directory(parent: str) -> None:
    """/tmp/ggufd-UID is made by us, mode 0700, and must be ours: /tmp belongs to everybody."""
    if parent != f"/tmp/ggufd-{os.getuid()}":
        return
    with contextlib.suppress(FileExistsError):
        os.mkdir(parent, 0o700)
    status = os.lstat(parent)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise SocketError(f"{parent}: is not a directory of ours with mode 0700")


def _take_lock(path: str) -> int:
    """Hold `path.lock` exclusively. A lock file unlinked between open and lock is tried anew.

    A daemon that was killed while it was starting a helper leaves the lock to that one until it executes its
    program: an owner is believed only after LINGER_S.
    """
    deadline = time.monotonic() + LINGER_S
    while True:
        descriptor = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            raise SocketError(f"{path}: another ggufd serves on this socket") from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path + ".lock", follow_symlinks=False)):
                return descriptor
        os.close(descriptor)


def _release_lock(path: str, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path + ".lock")  # while still holding it: nobody else can own this very file
    os.close(descriptor)


def _refuse_living(path: str) -> None:
    """Return when `path` is free or a stale socket.

    SocketError when somebody listens or it is another kind of file.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise SocketError(f"{path}: exists and is not a socket; it is kept")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        outcome = probe.connect_ex(path)
    if outcome in (0, errno.EAGAIN, errno.EINPROGRESS):  # EAGAIN: a listener whose backlog is full
        raise SocketError(f"{path}: another process serves on this socket")
    if outcome not in (errno.ECONNREFUSED, errno.ENOENT):
        raise SocketError(f"{path}: {os.strerror(outcome)}")


def _bind(path: str, parent: str, mode: int, gid: int) -> tuple[socket.socket, tuple[int, int]]:
    """A listening socket at `path`, and the file's device and inode.

    Born in a directory of mode 0700 and made visible when mode and group are right and it takes connections.
    """
    private = tempfile.mkdtemp(prefix=".ggufd-", dir=parent)
    born = os.path.join(private, "s")
    directory = os.open(private, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(f"/proc/self/fd/{directory}/s")  # short, however long the parent's name is
        if gid != -1:
            os.chown(born, -1, gid)
        os.chmod(born, mode)
        identity = _identity(born)
        _listen(listening)
        os.rename(born, path)  # over what is stale: nobody else binds here while we hold the lock
    except OSError:
        listening.close()
        Path(born).unlink(missing_ok=True)
        raise
    finally:
        os.close(directory)
        os.rmdir(private)
    return listening, identity


def _listen(listening: socket.socket) -> socket.socket:
    listening.listen(BACKLOG)
    listening.setblocking(False)
    return listening


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


# ---- who is at the other end -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    pid: int
    uid: int
    gids: frozenset[int]  # primary and supplementary


def peer_of(connection: socket.socket) -> Peer | None:
    """SO_PEERCRED and SO_PEERGROUPS of a Unix connection; None on TCP."""
    if connection.family != socket.AF_UNIX:
        return None
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    gids = {gid}
    with contextlib.suppress(OSError):
        packed = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * 256)
        gids.update(struct.unpack(f"{len(packed) // 4}i", packed))
    return Peer(pid, uid, frozenset(gids))


def is_allowed(peer: Peer | None, uids: tuple[int, ...], gids: tuple[int, ...]) -> bool:
    """True without lists, on TCP (the key decides there), for our own user, or for a listed uid or gid."""
    if peer is None or not (uids or gids):
        return True
    return peer.uid == os.getuid() or peer.uid in uids or not peer.gids.isdisjoint(gids)
