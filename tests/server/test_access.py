"""Keys and Host names on TCP; neither on the socket."""

import aiohttp
import pytest

from streamer.errors import ConfigError
from streamer.server.access import KeyRing, allowed_hosts, read_keys

KEY = "k" * 20


async def ask(server, path="/v1/models", **headers):
    host, port = server.tcp
    url = f"http://{host}:{port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status, await response.json()


def test_tcp_needs_the_key_and_the_socket_does_not(run):
    async def body(server):
        assert (await server.get("/v1/models")).status == 200
        status, answer = await ask(server)
        assert status == 401
        assert answer["error"]["code"] == "invalid_api_key"
        assert (await ask(server, Authorization="Bearer wrong"))[0] == 401
        assert (await ask(server, Authorization=f"Bearer {KEY}"))[0] == 200
        assert (await ask(server, **{"X-Api-Key": KEY}))[0] == 200
        assert (await ask(server, "/readyz"))[0] == 200  # probes carry no keys
        assert (await ask(server, "/props"))[0] == 401
        assert (await ask(server, "/metrics"))[0] == 401

    run(body, tcp=True, keys=KeyRing([KEY, "other" * 5]), hosts=allowed_hosts("127.0.0.1:1", ()))


def test_a_rebound_host_name_is_refused_on_tcp_and_any_is_fine_on_the_socket(run):
    async def body(server):
        assert (await server.get("/livez", headers={"Host": "evil.example"})).status == 200
        assert (await ask(server, "/livez", Host="evil.example"))[0] == 403
        assert (await ask(server, "/livez", Host="localhost:99"))[0] == 200

    run(body, tcp=True, hosts=allowed_hosts("127.0.0.1:1", ()))


def test_keys_are_read_from_a_file_and_never_shown(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# comment\n\n{KEY}\n")
    ring = read_keys(str(file))
    assert ring.accepts(KEY)
    assert not ring.accepts("")
    assert KEY not in repr(ring)
    assert not read_keys("")
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="fewer than 16") as caught:
        read_keys(str(file))
    assert "short" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys("/nowhere")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(str(file))


def test_allowed_hosts():
    assert allowed_hosts("", ()) == frozenset()
    assert {"localhost", "127.0.0.1", "::1"} <= allowed_hosts("0.0.0.0:80", ("Me.Local",))
    assert "me.local" in allowed_hosts("10.0.0.1:80", ("Me.Local",))
    assert "localhost" not in allowed_hosts("10.0.0.1:80", ())
