"""Configuration: which source wins, and what is said of a value that cannot work."""

import pytest

from streamer.config import (
    OPTIONS,
    Changes,
    Config,
    changed_options,
    client_socket_path,
    default_socket_path,
    load_config,
    split_host_port,
)
from streamer.errors import ConfigError


def test_flag_beats_environment_beats_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('max-queue = 5\nring_mib = 64\nalias = "a"\n')
    environ = {"GGUFD_RING_MIB": "96", "GGUFD_MAX_QUEUE": "6"}
    config = load_config({"max_queue": "7"}, environ, str(file))
    assert (config.max_queue, config.ring_mib, config.alias) == (7, 96, "a")
    assert config.sources == {
        "max_queue": "flag --max-queue",
        "ring_mib": "environment GGUFD_RING_MIB",
        "alias": str(file),
    }


def test_every_option_is_a_field_of_the_config_and_the_other_way_round():
    names = {option.name for option in OPTIONS}
    assert names == set(Config.__dataclass_fields__) - {"config_file", "sources", "flags"}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("max_queue", "0", "must be an integer from 1"),
        ("max_queue", "many", "must be an integer"),
        ("drain_timeout", "nan", "must be a number"),
        ("drain_timeout", "-1", "must be a number"),
        ("socket_mode", "0888", "octal"),
        ("device", "cuda:x", "must be auto, host"),
        ("listen", "8080", "HOST:PORT"),
        ("listen", "h:99999", "HOST:PORT"),
        ("kv_type", "f8", "must be one of"),
        ("allow_uid", "1,x", "must be an integer"),
        ("verify", "perhaps", "true or false"),
    ],
)
@pytest.mark.parametrize("source", ["flag", "environment"])
def test_a_bad_value_names_option_and_source(name, value, reason, source):
    flags = {name: value} if source == "flag" else {}
    environ = {"GGUFD_" + name.upper(): value} if source == "environment" else {}
    with pytest.raises(ConfigError) as caught:
        load_config(flags, environ)
    text = str(caught.value)
    assert text.startswith(name + ":")
    assert reason in text
    assert source in text
    assert caught.value.exit_code == 78


@pytest.mark.parametrize(
    "text", ["max_queue = true", "max_queue = 1.5", "no_such = 1", "= 1", 'verify = "perhaps"']
)
def test_a_bad_file_is_refused_with_its_name(tmp_path, text):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load_config({}, {}, str(file))


def test_a_missing_file_is_refused():
    with pytest.raises(ConfigError, match="No such file"):
        load_config({}, {"GGUFD_CONFIG": "/nowhere/c.toml"})


def test_an_empty_variable_is_not_set():
    assert load_config({}, {"GGUFD_MAX_QUEUE": ""}).max_queue == 256


@pytest.mark.parametrize("mode", ["0660", 0o660])
def test_modes_are_octal_text_or_a_toml_integer(mode):
    assert load_config({"socket_mode": mode}, {}).socket_mode == 0o660


def test_tcp_needs_a_key_or_loopback_and_no_auth():
    with pytest.raises(ConfigError, match="needs api_key_file"):
        load_config({"listen": "127.0.0.1:1"}, {})
    with pytest.raises(ConfigError, match="not a loopback"):
        load_config({"listen": "0.0.0.0:1", "no_auth": True}, {})
    assert load_config({"listen": "[::1]:1", "no_auth": True}, {}).no_auth
    assert load_config({"listen": "0.0.0.0:1", "api_key_file": "f"}, {}).listen


def test_host_and_port_of_ipv6():
    assert split_host_port("[::1]:80") == ("::1", 80)
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_host_port("::1:80")


def test_the_default_socket_follows_the_environment(tmp_path):
    assert default_socket_path({"RUNTIME_DIRECTORY": f"{tmp_path}:/x"}) == f"{tmp_path}/ggufd.sock"
    assert default_socket_path({"XDG_RUNTIME_DIR": str(tmp_path)}) == f"{tmp_path}/ggufd.sock"
    assert default_socket_path({}).startswith("/tmp/ggufd-")
    assert client_socket_path("/a/b", {}) == "/a/b"
    assert client_socket_path(None, {"GGUFD_SOCKET": "/c"}) == "/c"


def test_a_reload_knows_what_it_can_apply():
    new = Config(max_body_mib=2, ring_mib=2, ctx=64)
    assert changed_options(Config(max_body_mib=1, ring_mib=1), new) == Changes(
        live=["max_body_mib"], model=["ctx"], restart=["ring_mib"]
    )
