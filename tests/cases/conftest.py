"""Daemons forked from a warm process, model files packed by hand: modules `case_builder`, `case_daemon`."""

import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

if "case_daemon" not in sys.modules:
    for _name, _file in (("case_builder", "builder.py"), ("case_daemon", "daemon.py")):
        _spec = spec_from_file_location(_name, Path(__file__).with_name(_file))
        assert _spec is not None
        assert _spec.loader is not None
        _module = module_from_spec(_spec)
        sys.modules[_name] = _module
        _spec.loader.exec_module(_module)

from case_daemon import Daemon, Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def launch(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """`launch(model, *options, ready=True, change=None)`: on the host device; killed after the test."""
    running: list[Daemon] = []

    def start(model: object, *options: str, **more: object) -> Daemon:
        running.append(Daemon(nursery, tmp_path / f"d{len(running)}", model, options, **more))
        return running[-1]

    yield start
    for daemon in running:
        daemon.close()


@pytest.fixture(scope="module")
def shared(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A scripted daemon for all tests of a module that leave it as they found it."""
    from case_builder import scripted

    folder = tmp_path_factory.mktemp("shared")
    daemon = Daemon(nursery, folder / "d", scripted().write(folder / "m.gguf"), ())
    yield daemon
    daemon.close()
