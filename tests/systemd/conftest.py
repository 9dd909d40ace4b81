"""A real systemd in a box: PID 1 of private namespaces, over an overlay of this machine's root.

Needs root, unshare and Debian's systemd, which is installed when it is missing. Nothing of the box outlives
it.
"""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

if "systemd_box" not in sys.modules:
    _spec = spec_from_file_location("systemd_box", Path(__file__).with_name("box.py"))
    assert _spec is not None
    assert _spec.loader is not None
    _module = module_from_spec(_spec)
    sys.modules["systemd_box"] = _module
    _spec.loader.exec_module(_module)

from systemd_box import Box, Unit

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "data" / "tiny-llama.gguf"
SYSTEMD = Path("/lib/systemd/systemd")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything that takes a box is marked, and stays on one worker where a scheduler groups."""
    for item in items:
        if "box" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.systemd)
            item.add_marker(pytest.mark.xdist_group("systemd"))


def _need_root_and_systemd() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: namespaces and mounts")
    if missing := [x for x in ("unshare", "nsenter", "chroot", "bash") if shutil.which(x) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    if not SYSTEMD.exists():
        _install_systemd()


def _install_systemd() -> None:
    if shutil.which("apt-get") is None:
        pytest.skip("systemd is missing, and so is apt-get")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in ("apt-get update", "apt-get install -y --no-install-recommends systemd dbus procps"):
        try:
            done = subprocess.run(command.split(), env=environment, capture_output=True, timeout=90)
        except subprocess.TimeoutExpired:
            pytest.skip(f"systemd cannot be installed: {command} takes too long")
        if done.returncode != 0:
            pytest.skip(f"systemd cannot be installed: {done.stderr[-200:].decode(errors='replace')}")


def _python_binds() -> tuple[list[tuple[Path, str]], str]:
    """(what the box must see of this interpreter, the interpreter's path in the box)."""
    base = Path(sys.base_prefix).resolve()
    binds = [(ROOT, "/opt/src"), (Path(sysconfig.get_paths()["purelib"]), "/opt/site-packages")]
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if base.is_relative_to("/usr"):
        return binds, f"{base}/bin/{name}"
    return [*binds, (base, "/opt/python")], f"/opt/python/bin/{name}"


@pytest.fixture(scope="session")
def box(smollm2_path: Path) -> Iterator[Box]:
    """A box where the units are installed by deploy/install.sh over this checkout's interpreter."""
    _need_root_and_systemd()
    binds, python = _python_binds()
    models = [(smollm2_path, "/srv/ggufd/smollm2.gguf"), (TINY, "/srv/ggufd/tiny.gguf")]
    box = Box([*binds, *models])
    try:
        command = f"PYTHONPATH=/opt/src:/opt/site-packages exec {python} -P -X faulthandler -m streamer"
        library = f"LD_LIBRARY_PATH={Path(python).parents[1]}/lib PYTHONDONTWRITEBYTECODE=1"
        box.write("/usr/local/bin/ggufd", f'#!/bin/sh\n{library} {command} "$@"\n')
        box.path("/usr/local/bin/ggufd").chmod(0o755)
        box.run("/opt/src/deploy/install.sh", "--units-only")
        box.run("systemctl", "log-level", "debug")  # systemd then tells of every notification it gets
        yield box
    finally:
        box.close()


@pytest.fixture
def make_unit(box: Box) -> Iterator[Callable[..., Unit]]:
    """make_unit(name, config, **service settings): an instance, not yet started."""
    units: list[Unit] = []

    def make(name: str, config: dict[str, Any], **service: Any) -> Unit:
        units.append(Unit(box, name, config, service))
        return units[-1]

    yield make
    for unit in units:
        unit.close()


@pytest.fixture
def stop_process(box: Box) -> Callable[[Unit], None]:
    """Halts a unit's process as a hang would: it lives, and nothing in it moves."""

    def stop(unit: Unit) -> None:
        box.run("kill", f"-{signal.SIGSTOP.value}", unit.show("MainPID")["MainPID"])

    return stop
