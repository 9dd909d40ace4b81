"""Every option of the daemon: one table, one frozen value. Flag beats environment (GGUFD_*) beats TOML file
beats default.

The environment is read here and in systemd.py only. Imports nothing heavy: `ggufd status` passes through
here.
"""

import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from streamer.errors import ConfigError

Parser = Callable[[object], Any]


@dataclass(frozen=True)
class Config:
    """What the daemon runs with. Sizes in the unit the name says; times in seconds."""

    model: str = ""
    socket: str = ""
    socket_mode: int = 0o660
    socket_group: str = ""
    device: str = "auto"
    ctx: int = 0  # tokens a sequence; 0: the model's own, at most 8192
    max_sequences: int = 0  # 0: by device
    batch_tokens: int = 0  # rows of a step; 0: by device
    kv_type: str = "auto"
    transfer: str = "auto"
    ring_mib: int = 128
    touch_threads: int = 0  # 0: by machine
    verify: bool = False
    keep_registered: bool = False
    prefix_cache: bool = True
    listen: str = ""
    api_key_file: str = ""
    no_auth: bool = False
    allow_host: tuple[str, ...] = ()
    allow_uid: tuple[int, ...] = ()
    allow_gid: tuple[int, ...] = ()
    alias: str = ""
    trace: str = ""
    drain_timeout: float = 30.0
    max_queue: int = 256
    max_body_mib: int = 16
    max_connections: int = 1024
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    queue_timeout: float = 300.0
    request_timeout: float = 0.0  # 0: none
    write_timeout: float = 60.0
    keepalive_interval: float = 10.0
    template_timeout: float = 5.0
    log_format: str = "kv"
    log_level: str = "info"
    log_prompts: bool = False
    debug: bool = False
    blas_threads: int = 0  # 0: by machine
    host_link_bytes_per_s: float = 0.0  # simulated link of the host device; 0: as fast as memory
    config_file: str = ""  # where the file's values came from; "" when there was none
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    flags: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)  # kept for a reload


# ---- parsers: a value from a flag or the environment (str) or TOML (typed) -> the field's type, or ValueErro


def _integer(low: int, high: int) -> Parser:
    def parse(value: object) -> int:
        try:
            number = value if isinstance(value, int) and not isinstance(value, bool) else int(str(value), 10)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise ValueError(f"must be an integer from {low} to {high}, not {value!r}")
        return number

    return parse


def _seconds(low: float, high: float = 86400.0) -> Parser:
    def parse(value: object) -> float:
        try:
            number = float(str(value))
        except ValueError:
            number = float("nan")
        if not low <= number <= high:  # NaN fails too
            raise ValueError(f"must be a number from {low:g} to {high:g}, not {value!r}")
        return number

    return parse


def _choice(*names: str) -> Parser:
    def parse(value: object) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}, not {value!r}")
        return str(value)

    return parse


_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    answer = _BOOLEANS.get(str(value).lower())
    if answer is None:
        raise ValueError(f"must be true or false, not {value!r}")
    return answer


def _text(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"must be text, not {value!r}")
    return value


def _name(value: object) -> str:
    """Text that answers carry: UTF-8, which a flag or a variable need not be."""
    name = _text(value)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"must be UTF-8, not {value!r}") from None
    return name


def _mode(value: object) -> int:
    """Octal: '0660' on the command line and in TOML strings; a TOML integer is taken as written (0o660)."""
    try:
        number = value if isinstance(value, int) and not isinstance(value, bool) else int(str(value), 8)
    except ValueError:
        number = -1
    if not 0 <= number <= 0o777:
        raise ValueError(f"must be an octal mode from 0000 to 0777, not {value!r}")
    return number


def _device(value: object) -> str:
    if not re.fullmatch(r"auto|host|cuda(:\d{1,3})?", str(value)):
        raise ValueError(f"must be auto, host, cuda or cuda:N, not {value!r}")
    return str(value)


def _listen(value: object) -> str:
    if value != "":
        split_host_port(str(value))
    return str(value)


def _texts(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [x for x in str(value).split(",") if x]
    return tuple(_text(x).strip() for x in items)


def _integers(value: object) -> tuple[int, ...]:
    items = value if isinstance(value, list) else [x for x in str(value).split(",") if x]
    one = _integer(0, 2**32 - 2)
    return tuple(one(x) for x in items)


def split_host_port(text: str) -> tuple[str, int]:
    """'127.0.0.1:8080' or '[::1]:8080' -> (host, port). ValueError otherwise."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/\s]+)):(\d{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"must be HOST:PORT, not {text!r}")
    return match[1] or match[2], int(match[3])


# ---- the table ---------------------------------------------------------------------------------------------


KV_TYPES = ("auto", "f32", "f16", "bf16", "fp8_e4m3", "int8")


@dataclass(frozen=True)
class Option:
    """One row: the field of Config, how its value is read, and what `--help` says.

    The flag is the name with dashes.
    """

    name: str
    parse: Parser
    help: str
    metavar: str = ""
    hidden: bool = False
    reload: str = ""  # what a reload needs to apply it: "" a restart, "live" nothing, "model" another load

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "GGUFD_" + self.name.upper()

    @property
    def is_switch(self) -> bool:
        return self.parse is _boolean


OPTIONS: tuple[Option, ...] = (
    Option("model", _text, "a GGUF file (of a split set: the first) or a pulled name", "MODEL"),
    Option("socket", _text, "Unix socket to serve on", "PATH"),
    Option("socket_mode", _mode, "mode of the socket file, from its birth [0660]", "MODE"),
    Option("socket_group", _text, "group that owns the socket file", "GROUP"),
    Option("device", _device, "auto, host, cuda or cuda:N [auto]", "NAME"),
    Option(
        "ctx",
        _integer(0, 1 << 24),
        "tokens a sequence; 0: the model's own, at most 8192",
        "N",
        reload="model",
    ),
    Option(
        "max_sequences", _integer(0, 4096), "sequences that run at once; 0: by device", "N", reload="model"
    ),
    Option("batch_tokens", _integer(0, 1 << 20), "tokens of one step; 0: by device", "N", reload="model"),
    Option("kv_type", _choice(*KV_TYPES), "type of cached keys and values [auto]", "TYPE", reload="model"),
    Option("transfer", _choice("auto", "ring", "window", "touch"), "how weights move [auto]", "NAME"),
    Option("ring_mib", _integer(1, 4096), "pinned memory of the staging ring [128]", "N"),
    Option("touch_threads", _integer(0, 256), "threads that touch and stage; 0: by machine", "N"),
    Option("verify", _boolean, "prove that device bytes equal the file's bytes before READY"),
    Option("keep_registered", _boolean, "keep the file's pages registered for a fast reload"),
    Option("prefix_cache", _boolean, "reuse the cached beginning of a prompt [on]", reload="model"),
    Option("listen", _listen, "also serve on TCP; needs a key, or loopback and --no-auth", "HOST:PORT"),
    Option("api_key_file", _text, "keys that TCP clients must send, one a line", "FILE", reload="live"),
    Option("no_auth", _boolean, "TCP on a loopback address without a key"),
    Option("allow_host", _texts, "further Host names answered on TCP", "NAME,..."),
    Option("allow_uid", _integers, "only these users may connect to the socket", "UID,..."),
    Option("allow_gid", _integers, "only these groups may connect to the socket", "GID,..."),
    Option("alias", _name, "the model's name in /v1/models [the file's name]", "NAME"),
    Option("trace", _text, "write a Chrome trace of the load", "FILE"),
    Option(
        "drain_timeout", _seconds(0), "how long requests may finish after SIGTERM [30]", "S", reload="live"
    ),
    Option("max_queue", _integer(1, 65536), "requests that may wait; more get 429 [256]", "N"),
    Option("max_body_mib", _integer(1, 1024), "largest request body [16]", "N", reload="live"),
    Option("max_connections", _integer(1, 65536), "more get 503 [1024]", "N", reload="live"),
    Option("header_timeout", _seconds(0.1), "time for a request's header [10]", "S", reload="live"),
    Option("body_timeout", _seconds(0.1), "time for a request's body [60]", "S", reload="live"),
    Option("queue_timeout", _seconds(0.1), "longest wait in the queue [300]", "S"),
    Option("request_timeout", _seconds(0), "longest life of a request; 0: none", "S", reload="live"),
    Option("write_timeout", _seconds(0.1), "slower readers are dropped [60]", "S", reload="live"),
    Option("keepalive_interval", _seconds(0.05), "SSE comments in a pause [10]", "S", reload="live"),
    Option("template_timeout", _seconds(0.05, 600), "time for rendering a chat template [5]", "S"),
    Option("log_format", _choice("kv", "json"), "kv or json [kv]", "NAME"),
    Option("log_level", _choice("debug", "info", "warning", "error"), "[info]", "NAME", reload="live"),
    Option("log_prompts", _boolean, "write the text of prompts into the log"),
    Option("debug", _boolean, "tracebacks, and the event loop's own checks"),
    Option("blas_threads", _integer(0, 1024), "threads of host matrix products; 0: by machine", "N"),
    Option("host_link_bytes_per_s", _seconds(0, 1e15), "simulated host link", "N", hidden=True),
)
_BY_NAME = {option.name: option for option in OPTIONS}
_ALIASES = {"host_link_rate": "host_link_bytes_per_s"}


def load_config(
    flags: Mapping[str, object], environ: Mapping[str, str] | None = None, file: str = ""
) -> Config:
    """Merge the sources. `flags` holds only what was given.

    ConfigError names the option and where its value came from.
    """
    environ = os.environ if environ is None else environ
    file = file or environ.get("GGUFD_CONFIG", "")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value, source in (*_from_file(file), *_from_environment(environ), *_from_flags(flags)):
        try:
            values[name] = _BY_NAME[name].parse(value)
        except ValueError as error:
            raise ConfigError(f"{name}: {error} (from {source})") from None
        sources[name] = source
    config = Config(**values, config_file=file, sources=sources, flags=dict(flags))
    _check_together(config)
    return config


def _from_file(file: str) -> list[tuple[str, object, str]]:
    if not file:
        return []
    try:
        table = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config: cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {file}: {error}") from None
    for name in table:
        if name.replace("-", "_") not in _BY_NAME:
            raise ConfigError(f"{name}: there is no such option (from {file})")
    return [(name.replace("-", "_"), value, file) for name, value in table.items()]


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, object, str]]:
    found = [
        (o.name, environ[o.variable], f"environment {o.variable}") for o in OPTIONS if o.variable in environ
    ]
    for alias, name in _ALIASES.items():
        variable = "GGUFD_" + alias.upper()
        if variable in environ:
            found.append((name, environ[variable], f"environment {variable}"))
    return [
        x for x in found if x[1] != ""
    ]  # a variable set to nothing is not set (systemd's EnvironmentFile)


def _from_flags(flags: Mapping[str, object]) -> list[tuple[str, object, str]]:
    return [
        (n, v, "the argument MODEL" if n == "model" else f"flag {_BY_NAME[n].flag}") for n, v in flags.items()
    ]


def _check_together(config: Config) -> None:
    if config.api_key_file and not config.listen:
        raise ConfigError("api_key_file: has no effect without listen: the socket needs no key")
    if not config.listen or config.api_key_file:
        return
    host, _ = split_host_port(config.listen)
    if not config.no_auth:
        raise ConfigError("listen: needs api_key_file (or a loopback address and no_auth)")
    if not is_loopback(host):
        raise ConfigError(f"no_auth: {host} is not a loopback address; give api_key_file")


def is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


@dataclass(frozen=True)
class Changes:
    """Options that differ between two configurations, by what applying them needs."""

    live: list[str]
    model: list[str]  # another load of the model
    restart: list[str]


def changed_options(old: Config, new: Config) -> Changes:
    names = [f.name for f in fields(Config) if f.compare and getattr(old, f.name) != getattr(new, f.name)]
    needs = {name: _BY_NAME[name].reload if name in _BY_NAME else "" for name in names}
    needs.pop("config_file", None)
    return Changes(*([name for name in needs if needs[name] == what] for what in ("live", "model", "")))


# ---- places ------------------------------------------------------------------------------------------------


def default_socket_path(environ: Mapping[str, str] | None = None) -> str:
    """$RUNTIME_DIRECTORY under systemd, else $XDG_RUNTIME_DIR, else /tmp/ggufd-UID."""
    environ = os.environ if environ is None else environ
    runtime = environ.get("RUNTIME_DIRECTORY", "").split(":")[0] or environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return f"{runtime}/ggufd.sock"
    return f"/tmp/ggufd-{os.getuid()}/ggufd.sock"


UNIT_SOCKETS = "/run/ggufd"  # where ggufd@NAME.socket listens: NAME.sock


def client_socket_path(flag: str | None, environ: Mapping[str, str] | None = None) -> str:
    """Where a client looks: flag, $GGUFD_SOCKET, the default place, then the only system unit's."""
    environ = os.environ if environ is None else environ
    path = flag or environ.get("GGUFD_SOCKET") or default_socket_path(environ)
    if flag or "GGUFD_SOCKET" in environ or _is_socket(path):
        return path
    units = [str(x) for x in Path(UNIT_SOCKETS).glob("*.sock") if _is_socket(str(x))]
    return units[0] if len(units) == 1 else path


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where pulled models and compiled kernels lie.

    $CACHE_DIRECTORY (systemd), $XDG_CACHE_HOME/ggufd, ~/.cache/ggufd.
    """
    environ = os.environ if environ is None else environ
    if environ.get("CACHE_DIRECTORY"):
        return Path(environ["CACHE_DIRECTORY"].split(":")[0])
    base = environ.get("XDG_CACHE_HOME") or os.path.join(
        environ.get("HOME") or os.path.expanduser("~"), ".cache"
    )
    return Path(base) / "ggufd"


def to_journal(environ: Mapping[str, str] | None = None) -> bool:
    """True when stderr goes to the journal, whose level prefixes (`<6>`) are then understood."""
    environ = os.environ if environ is None else environ
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(2)
        return (int(device), int(inode)) == (status.st_dev, status.st_ino)
    except (ValueError, OSError):
        return False
