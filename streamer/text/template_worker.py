"""The process that renders chat templates: jinja2's sandbox under limits of memory and output.

Run by `worker.Worker`; imports jinja2 and the standard library only. What it answers is JSON, so that nothing
a template could do here is executed by the owner. The owner keeps the deadline and kills it when that passes.
"""

import datetime
import json
import resource
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MEMORY_NBYTES = 1 << 30
_MAX_OUTPUT_CHARS = 64 << 20


class RaisedByTemplateError(jinja2.TemplateError):
    """`raise_exception(message)`: the template refuses the conversation."""


class _Generation(Extension):
    """`{% generation %}`: marks what a model wrote, for training; here only its contents matter."""

    tags = {"generation"}  # noqa: RUF012 - the name jinja2 reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """`namespace()` without names that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")
        super().__setitem__(name, value)


def make_environment() -> ImmutableSandboxedEnvironment:
    """The environment that models' templates are written for (transformers')."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> NoReturn:
    raise RaisedByTemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


class Renderer:
    """Templates by name, compiled on first use; one that does not compile answers with the reason."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._environment = make_environment()
        self._sources = sources
        self._templates: dict[str, jinja2.Template] = {}
        self._broken: dict[str, str] = {}

    def compile(self, name: str) -> None:
        if name in self._templates or name in self._broken:
            return
        try:
            self._templates[name] = self._environment.from_string(self._sources[name])
        except Exception as error:  # noqa: BLE001 - the compiler evaluates constants: anything can happen
            self._broken[name] = _reason(error)

    def answer(self, name: str, variables: dict[str, Any]) -> dict[str, str]:
        """`{"text": ...}`, or `{"error": reason, "kind": "compile" | "raised" | "failed"}`."""
        self.compile(name)
        if name in self._broken:
            return {"error": self._broken[name], "kind": "compile"}
        parts: list[str] = []
        n_chars = 0
        try:
            for part in self._templates[name].generate(variables):
                n_chars += len(part)
                if n_chars > _MAX_OUTPUT_CHARS:
                    return {"error": "it writes too much text", "kind": "failed"}
                parts.append(part)
        except RaisedByTemplateError as error:
            return {"error": str(error), "kind": "raised"}
        except Exception as error:  # noqa: BLE001 - whatever the model's program does wrong is its answer
            return {"error": _reason(error), "kind": "failed"}
        return {"text": "".join(parts)}


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    message = f"{type(error).__name__}: {error}"
    line = getattr(error, "lineno", None)
    return (f"line {line}: " if line else "") + message[:500]


def main(_payload: None, fds: Sequence[int]) -> None:
    """First message: the templates' sources. Then `name, [variables, ...]`, answered by a list."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_NBYTES, _MEMORY_NBYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    channel = Connection(fds[0])
    try:
        renderer = Renderer(channel.recv())
        channel.send_bytes(b"ready")
        while True:
            name, sets = channel.recv()
            renderer.compile(name)
            answers = [renderer.answer(name, variables) for variables in sets]
            channel.send_bytes(json.dumps(answers).encode())
    except (EOFError, OSError):
        return
