"""Rules of the socket file (case 47 and its kind)."""

import fcntl
import os
import socket
import stat
import threading

import pytest

from streamer.errors import SocketError
from streamer.server.sockets import Peer, bind_unix, is_allowed, peer_of


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "ggufd.sock")


def connect(path):
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    return client


@pytest.mark.parametrize("mode", [0o660, 0o600, 0o666])
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
def test_the_mode_is_what_was_asked_whatever_the_umask(path, mode, umask):
    before = os.umask(umask)
    try:
        bound = bind_unix(path, mode=mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == mode
    bound.close()


@pytest.mark.parametrize("group", ["", str(os.getgid())])
def test_the_file_never_has_another_mode_at_its_path(path, tmp_path, group):
    """Watch the directory while sockets come and go: whoever sees the file sees its final mode."""
    modes, over = set(), threading.Event()

    def watch():
        while not over.is_set():
            try:
                modes.add(stat.S_IMODE(os.stat(path).st_mode))
            except FileNotFoundError:
                continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(200):
        bind_unix(path, mode=0o640, group=group).close()
    over.set()
    watcher.join()
    assert modes <= {0o640}
    assert os.listdir(tmp_path) == []


def test_a_second_start_is_refused_and_the_first_serves_on(path):
    bound = bind_unix(path)
    with pytest.raises(SocketError, match="serves on this socket") as caught:
        bind_unix(path)
    assert caught.value.exit_code == 73
    connect(path).close()
    accepted, _ = bound.socket.accept()
    accepted.close()
    bound.close()
    bind_unix(path).close()


def test_a_live_socket_of_another_program_is_refused(path):
    other = socket.socket(socket.AF_UNIX)
    other.bind(path)
    other.listen()
    with pytest.raises(SocketError, match="another process serves"):
        bind_unix(path)
    connect(path).close()
    other.close()


def test_a_listener_with_a_full_backlog_is_alive(path):
    other = socket.socket(socket.AF_UNIX)
    other.bind(path)
    other.listen(0)
    waiting = connect(path)
    with pytest.raises(SocketError, match="another process serves"):
        bind_unix(path)
    waiting.close()
    other.close()


def test_a_stale_socket_is_replaced(path):
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(path)
    dead.close()
    bound = bind_unix(path)
    connect(path).close()
    bound.close()


@pytest.mark.parametrize("kind", ["file", "directory", "symlink"])
def test_what_is_no_socket_is_kept_and_refused(path, tmp_path, kind):
    if kind == "file":
        open(path, "w").close()
    elif kind == "directory":
        os.mkdir(path)
    else:
        os.symlink(tmp_path / "target", path)
    with pytest.raises(SocketError, match="not a socket"):
        bind_unix(path)
    assert os.path.lexists(path)
    assert not os.path.exists(path + ".lock")


def test_only_our_own_file_is_removed(path):
    bound = bind_unix(path)
    os.unlink(path)
    other = socket.socket(socket.AF_UNIX)
    other.bind(path)
    bound.close()
    assert os.path.exists(path)
    other.close()


def test_paths_that_cannot_be(tmp_path):
    with pytest.raises(SocketError, match="at most 107 bytes"):
        bind_unix("/tmp/" + "x" * 200)
    with pytest.raises(SocketError, match="No such file"):
        bind_unix(str(tmp_path / "no" / "where"))
    with pytest.raises(SocketError, match="there is no group"):
        bind_unix(str(tmp_path / "s"), group="no-such-group")


def test_a_path_of_the_greatest_length_works(tmp_path):
    room = 107 - len(str(tmp_path)) - 1
    if room < 1:
        pytest.skip("the temporary directory's name is too long")
    path = f"{tmp_path}/{'x' * room}"
    bound = bind_unix(path)
    connect(path).close()
    bound.close()


def test_of_many_starters_exactly_one_wins(path):
    won, lost = [], []
    barrier = threading.Barrier(8)

    def start():
        barrier.wait()
        try:
            won.append(bind_unix(path))
        except SocketError:
            lost.append(1)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    won[0].close()


def test_the_peer_is_known_by_its_credentials():
    ours, theirs = socket.socketpair()
    peer = peer_of(ours)
    assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
    assert os.getgid() in peer.gids
    ours.close()
    theirs.close()


def test_the_allow_list():
    stranger = Peer(1, 12345, frozenset({100, 200}))
    assert is_allowed(stranger, (), ())
    assert is_allowed(None, (1,), ())
    assert not is_allowed(stranger, (7,), ())
    assert not is_allowed(stranger, (), (7,))
    assert is_allowed(stranger, (12345,), ())
    assert is_allowed(stranger, (), (200,))
    assert is_allowed(Peer(1, os.getuid(), frozenset()), (7,), ())


def test_a_lock_that_is_given_up_in_a_moment_is_waited_for(tmp_path):
    """A helper of a killed daemon holds it until it executes its program."""
    path = str(tmp_path / "s")
    descriptor = os.open(path + ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    timer = threading.Timer(0.1, os.close, (descriptor,))
    timer.start()
    bind_unix(path).close()
    timer.join()
