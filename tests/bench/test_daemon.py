"""Daemons that benchmarks start: in which environment."""

import sys
from pathlib import Path

from streamer.bench import daemon as bench_daemon


def test_a_started_daemon_may_write_bytecode_as_an_installed_one_has_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nenv\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with bench_daemon.started_daemon("m", device="host", environment={"MORE": "1"}) as (daemon, _):
        daemon.process.wait(20)
        told = dict(line.split("=", 1) for line in daemon.log.read_text().splitlines() if "=" in line)
    assert "PYTHONDONTWRITEBYTECODE" not in told
    assert told["MORE"] == "1"
    assert told["NOTIFY_SOCKET"].endswith("/notify.sock")
