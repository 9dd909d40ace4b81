"""What `make run` and `make serve` show to somebody who has just come."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest


@pytest.fixture
def demo(tmp_path, smollm2_path):
    """Starts `demo`; whatever it started must be gone with it."""
    del smollm2_path  # pulled before: no download here
    started = []

    def start(*arguments):
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "RUNTIME_DIRECTORY": ""}
        command = [sys.executable, "-m", "streamer", "demo", "--device", "host", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen(command, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_whole_way_from_the_bar_to_a_clean_stop(demo):
    process = demo()
    text = process.communicate(timeout=110)[0].decode()
    assert process.returncode == 0, text
    lines = text.splitlines()
    assert any("] 100.0%" in line for line in lines)  # the bar, as lines where there is no terminal
    for request in ("first request", "second request"):
        (line,) = [x for x in lines if x.startswith(request)]
        assert line.endswith("weight bytes moved: 0")
    assert "every byte proved on the device" in text
    assert lines[-1] == "stopped cleanly"


def test_whoever_stops_the_staying_one_stops_its_daemon(demo, tmp_path):
    process = demo("--stay")
    seen, deadline = b"", time.monotonic() + 110
    while b"serving on" not in seen and time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 1.0)[0]:
            seen += os.read(process.stdout.fileno(), 4096)
    assert b"serving on" in seen, seen
    assert (tmp_path / "ggufd.sock").is_socket()
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    assert rest.endswith(b"stopped cleanly\n")
    assert not (tmp_path / "ggufd.sock").exists()
