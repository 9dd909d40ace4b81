"""systemd's protocols against a socket of our own in the manager's place."""

import os
import socket

import pytest

from streamer.errors import ConfigError
from streamer.systemd import Notifier, inherited_sockets, watchdog_interval_s


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    """(address as in NOTIFY_SOCKET, receiving socket)."""
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.setblocking(False)
    name = str(tmp_path / "notify") if request.param == "path" else f"@ggufd-test-{os.getpid()}"
    receiver.bind("\0" + name[1:] if name[0] == "@" else name)
    yield name, receiver
    receiver.close()


def received(receiver):
    messages = []
    while True:
        try:
            messages.append(receiver.recv(65536).decode().splitlines())
        except BlockingIOError:
            return messages


def test_messages_in_their_order_and_nothing_after_stopping(manager):
    address, receiver = manager
    environ = {"NOTIFY_SOCKET": address}
    notifier = Notifier.from_environment(environ)
    assert environ == {}
    notifier.status("half\nway", extend_s=2.5)
    notifier.ready("serving")
    notifier.ready("again")
    notifier.status("still", extend_s=2.5)
    notifier.watchdog()
    notifier.stopping("bye")
    notifier.ready("never")
    notifier.watchdog()
    notifier.stopping("twice")
    assert received(receiver) == [
        ["STATUS=half way", "EXTEND_TIMEOUT_USEC=2500000"],
        ["READY=1", "STATUS=serving"],
        ["STATUS=still"],
        ["WATCHDOG=1"],
        ["STOPPING=1", "STATUS=bye"],
    ]
    notifier.close()


def test_a_reload_carries_the_clock_and_ends_with_ready(manager):
    address, receiver = manager
    notifier = Notifier(address)
    notifier.ready("a")
    notifier.reloading()
    notifier.ready("b")
    first, reload, second = received(receiver)
    assert first[0] == second[0] == "READY=1"
    assert reload[0] == "RELOADING=1"
    assert reload[1].startswith("MONOTONIC_USEC=")
    notifier.close()


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all"])
def test_without_a_manager_nothing_happens(address):
    notifier = Notifier(address)
    notifier.ready("x")
    notifier.close()


def test_a_deaf_manager_does_not_block(manager):
    address, _ = manager
    notifier = Notifier(address)
    for _ in range(10_000):  # the receive buffer is long full
        notifier.watchdog()
    notifier.close()


def inherit(monkeypatch, descriptor):
    """Pretend that `descriptor` is number 3."""
    monkeypatch.setattr("streamer.systemd.FIRST_DESCRIPTOR", descriptor)
    return {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "api"}


def test_a_listening_socket_is_adopted_and_kept_from_children(monkeypatch, tmp_path):
    given = socket.socket(socket.AF_UNIX)
    given.bind(str(tmp_path / "s"))
    given.listen()
    descriptor = os.dup(given.fileno())
    os.set_inheritable(descriptor, True)
    environ = inherit(monkeypatch, descriptor)
    (adopted,) = inherited_sockets(environ)
    assert environ == {}
    assert adopted.name == "api"
    assert adopted.socket.getsockname() == str(tmp_path / "s")
    assert not os.get_inheritable(descriptor)
    adopted.socket.close()
    given.close()


def test_what_is_no_listening_stream_socket_is_refused(monkeypatch, tmp_path):
    reading, writing = os.pipe()
    with pytest.raises(ConfigError, match="not a socket"):
        inherited_sockets(inherit(monkeypatch, reading))
    datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with pytest.raises(ConfigError, match="not a listening stream"):
        inherited_sockets(inherit(monkeypatch, datagram.fileno()))
    with pytest.raises(ConfigError, match="Bad file descriptor"):
        inherited_sockets(inherit(monkeypatch, 987654))
    datagram.close()
    os.close(reading)
    os.close(writing)


def test_sockets_for_another_process_are_left_alone():
    assert inherited_sockets({"LISTEN_FDS": "1", "LISTEN_PID": "1"}) == []
    assert inherited_sockets({}) == []


def test_the_watchdog_is_fed_at_half_its_time():
    assert watchdog_interval_s({"WATCHDOG_USEC": "3000000"}) == 1.5
    assert watchdog_interval_s({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}) is None
    assert watchdog_interval_s({"WATCHDOG_USEC": "0"}) is None
    assert watchdog_interval_s({}) is None
