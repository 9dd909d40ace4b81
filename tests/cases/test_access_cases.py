"""Doors that could be left open: a TCP socket from the service manager asks for keys like any other."""

import socket

import pytest

from streamer.config import load_config
from streamer.errors import ConfigError
from streamer.server.listening import open_listening


@pytest.fixture
def given():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_given_tcp_socket_without_listen_is_refused(given) -> None:
    with pytest.raises(ConfigError, match=r"^listen: is not set.*127\.0\.0\.1"):
        open_listening(load_config({"model": "m"}, environ={}), [given])


def test_a_given_tcp_socket_stands_for_listen(given, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-sixteen-letters\n")
    flags = {"model": "m", "listen": "127.0.0.1:1", "api_key_file": str(keys)}
    listening = open_listening(load_config(flags, environ={}), [given])
    assert listening.sockets == [given]  # and port 1 was not asked for
    listening.close()
