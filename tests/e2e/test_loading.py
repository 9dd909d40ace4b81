"""A load as operators meet it: probes, notifications, signals, sockets (cases 44-47)."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

LOADING = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'


@pytest.fixture
def slow(start, smollm2_path):
    """A daemon whose link gives so many bytes a second, listening but not ready."""

    def go(rate=60e6, *options, **more):
        daemon = start(
            smollm2_path,
            *options,
            ready=False,
            environment={"GGUFD_HOST_LINK_RATE": str(rate), **more.pop("environment", {})},
            **more,
        )
        daemon.wait_listening()
        return daemon

    return go


class Prober(threading.Thread):
    """Asks /livez all the time; `delays` in seconds."""

    def __init__(self, daemon):
        super().__init__()
        self.daemon_process, self.over, self.delays = daemon, threading.Event(), []
        self.start()

    def run(self):
        while not self.over.wait(0.005):
            began = time.perf_counter()
            assert self.daemon_process.get("/livez").status == 200
            self.delays.append(time.perf_counter() - began)

    def end(self):
        self.over.set()
        self.join()
        return sorted(self.delays)


def test_probes_tell_the_truth_all_through_a_load(slow, limit_s):
    daemon = slow()
    prober = Prober(daemon)
    seen = []
    while True:
        ready = daemon.get("/readyz")
        seen.append(ready.json)
        if ready.status == 200:
            break
        assert ready.headers["Retry-After"] == "1"
        assert ready.json["status"] == "loading"
        if daemon.get("/readyz").status == 503:  # not become ready meanwhile
            health = daemon.get("/health")
            answer = daemon.complete(prompt="x")
            if daemon.get("/readyz").status == 503:
                assert (health.status, health.body) == (503, LOADING)
                assert (answer.status, answer.body) == (503, LOADING)  # case 44
        time.sleep(0.01)
    delays = prober.end()
    assert delays[int(len(delays) * 0.99)] < limit_s(0.1)
    fractions = [r["fraction"] for r in seen]
    assert fractions == sorted(fractions)
    assert len({r["bytes_resident"] for r in seen}) > 10
    assert seen[-1]["bytes_resident"] == seen[-1]["bytes_total"] == seen[-1]["weight_h2d_bytes_load"]
    phases = list(dict.fromkeys(r["phase"] for r in seen))
    order = ["open", "plan", "upload", "verify", "warm", "ready"]
    assert phases == [p for p in order if p in phases]
    assert daemon.complete(prompt="The sky is", max_tokens=1).status == 200


def test_the_manager_hears_everything_in_order(slow):
    """Case 45."""
    daemon = slow(environment={"WATCHDOG_USEC": "400000"})
    daemon.wait_notified("READY=1")
    for _ in range(3):
        assert daemon.listen(5.0)  # the watchdog is fed while the loop lives
    assert daemon.stop() == 0
    lines = daemon.lines
    ready, stopping = lines.index("READY=1"), lines.index("STOPPING=1")
    assert lines.count("READY=1") == lines.count("STOPPING=1") == 1
    statuses = [x for x in lines[:ready] if x.startswith("STATUS=loading")]
    assert any("MB/s" in x for x in statuses)
    extended = [m for m in daemon.notified if any(x.startswith("EXTEND_TIMEOUT_USEC=") for x in m)]
    assert len(extended) > 2
    assert any(x == "WATCHDOG=1" for x in lines[ready:stopping])
    assert daemon.notified[-1][0] == "STOPPING=1"
    assert not any(x.startswith("READY") for x in lines[stopping:])


def test_without_progress_the_managers_patience_is_not_extended(slow):
    daemon = slow(rate=1000)  # one chunk takes an hour
    deadline = time.monotonic() + 20
    while sum(x.startswith("STATUS=loading (upload)") for x in daemon.lines) < 6:
        assert time.monotonic() < deadline
        daemon.listen(0.5)
    last = [m for m in daemon.notified if m[0].startswith("STATUS=loading (upload)")][-3:]
    assert all(len(message) == 1 for message in last)
    assert daemon.get("/readyz").json["last_progress_s"] > 0.5


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_sigterm_in_a_load_ends_it_within_two_seconds(slow, fraction, limit_s):
    """Case 46."""
    daemon = slow()
    while daemon.get("/readyz").json["fraction"] < fraction:
        time.sleep(0.002)
    began = time.monotonic()
    code = daemon.stop()
    assert code == 0 or limit_s(1.0) > 2.0  # on a machine this busy it may have had to leave the hard way
    assert time.monotonic() - began < limit_s(2.0)
    assert not os.path.exists(daemon.path)
    assert "READY=1" not in daemon.lines
    assert daemon.notified[-1][0] == "STOPPING=1"
    assert "Traceback" not in daemon.text


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3])
def test_sigterm_at_the_very_beginning_is_clean(start, smollm2_path, delay_s, limit_s):
    daemon = start(smollm2_path, ready=False)
    daemon.wait_listening()
    time.sleep(delay_s)
    began = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began < limit_s(2.0)
    assert not os.path.exists(daemon.path)


def test_sigterm_amid_the_imports_is_clean(start, smollm2_path):
    """From the moment that the process handles signals at all, which is before the service is imported."""
    daemon = start(smollm2_path, ready=False)
    status = f"/proc/{daemon.process.pid}/status"
    while True:
        with open(status) as file:
            caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))
        if caught >> (signal.SIGTERM - 1) & 1:
            break
    assert not os.path.exists(daemon.path)
    assert daemon.stop() == 0
    assert not os.path.exists(daemon.path)
    assert "Traceback" not in daemon.text


def test_the_second_signal_ends_at_once(slow, start):
    daemon = slow(rate=20e6)
    daemon.process.send_signal(signal.SIGSTOP)  # both signals arrive before it can do anything
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.send_signal(signal.SIGINT)
    daemon.process.send_signal(signal.SIGCONT)
    assert daemon.process.wait(5) in (0, 130, -signal.SIGTERM, -signal.SIGINT)
    assert not os.path.exists(daemon.path)


def test_a_second_start_is_refused_and_the_first_serves_on(smollm2, start, smollm2_path):
    """Case 47."""
    second = start(smollm2_path, socket_path=smollm2.path, ready=False)
    assert second.process.wait(20) == 73
    assert second.text.strip().splitlines()[-1].startswith(f"ggufd: {smollm2.path}: ")
    assert "Traceback" not in second.text
    assert smollm2.get("/readyz").status == 200


def test_after_kill_9_a_start_works_at_once(start, make_scripted, scripted, tmp_path):
    model = make_scripted(tmp_path / "m.gguf", scripted.ids("ab"))
    first = start(model)
    first.process.kill()
    first.process.wait()
    assert os.path.exists(first.path)  # stale
    second = start(model, socket_path=first.path)
    assert second.get("/readyz").status == 200
    assert second.stop() == 0
    assert not os.path.exists(first.path)


ACTIVATE = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, "-m", "streamer", *sys.argv[1:]])
"""


def test_a_socket_given_by_the_manager_is_used_and_left(make_scripted, scripted, tmp_path, start):
    """LISTEN_FDS: connections made before the start are answered, and told 503 until ready."""
    path = str(tmp_path / "activated")
    given = socket.socket(socket.AF_UNIX)
    given.bind(path)
    given.listen()
    early = socket.socket(socket.AF_UNIX)
    early.connect(path)
    early.sendall(b"GET /livez HTTP/1.0\r\nHost: x\r\n\r\n")
    model = make_scripted(tmp_path / "m.gguf", scripted.ids("ab"))
    script = f"import os; os.dup2({given.fileno()}, 3); os.set_inheritable(3, True)" + ACTIVATE
    environment = {**os.environ, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "api"}
    process = subprocess.Popen(
        [sys.executable, "-c", script, "serve", str(model), "--device", "host"],
        env=environment,
        pass_fds=(given.fileno(),),
        stderr=subprocess.PIPE,
    )
    try:
        early.settimeout(20)
        assert early.recv(100).startswith(b"HTTP/1.0 200")
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=20)
        assert process.returncode == 0, text
        assert os.path.exists(path)  # the manager's, not ours
    finally:
        process.kill()
        process.communicate()
        early.close()
        given.close()


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda p: p.write_bytes(b""), 65, ["empty"]),
        (lambda p: p.write_bytes(b"GGUF"), 65, []),
        (lambda p: p.write_text("text"), 65, ["GGUF"]),
        (lambda p: p.mkdir(), 65, []),
        (lambda p: None, 65, ["No such file"]),
    ],
    ids=["empty", "magic", "text", "directory", "missing"],
)
def test_a_refused_model_is_one_line_and_its_exit_code(start, tmp_path, make, code, words, limit_s):
    model = tmp_path / "model.gguf"
    make(model)
    began = time.monotonic()
    daemon = start(model, "--device", "auto", ready=False)  # nothing about the device either
    assert daemon.process.wait(20) == code
    assert time.monotonic() - began < limit_s(2.0)
    (line,) = daemon.text.strip().splitlines()
    assert line.startswith(f"ggufd: {model}: ")
    assert all(word in line for word in words)
    assert not os.path.exists(daemon.path)
    daemon.listen(0)
    assert "READY=1" not in daemon.lines


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--max-queue", "x"], 78, "max_queue"),
        (["--listen", "0.0.0.0:1"], 78, "listen"),
        (["--config", "/nowhere.toml"], 78, "nowhere"),
        (["--no-such-option"], 2, "no-such-option"),
        (["--device", "cuda:77"], 69, "cuda"),
        (["--ctx", "100000000"], 78, "ctx"),
        (["--trace", "/nowhere/x"], 78, "trace: cannot write /nowhere/x: No such file"),
        (["--trace", "/tmp"], 78, "trace: cannot write /tmp: Is a directory"),
        (["--trace", "/dev/full"], 78, "trace: cannot write /dev/full: is not a regular file"),
        (["--alias", "bad\udcff"], 78, "alias: must be UTF-8"),
    ],
)
def test_options_that_cannot_work(start, smollm2_path, options, code, word):
    daemon = start(smollm2_path, *options, ready=False)
    assert daemon.process.wait(20) == code
    assert word in daemon.text
    assert "Traceback" not in daemon.text


def test_a_name_that_is_not_utf8_is_served_readably(start, make_scripted, scripted, tmp_path):
    model = make_scripted(tmp_path / "m.gguf", scripted.ids("ab")).rename(tmp_path / "bad\udcff.gguf")
    daemon = start(model)
    for route in ("/readyz", "/residency", "/health", "/metrics", "/props", "/v1/models"):
        assert daemon.get(route).status == 200, route
    assert daemon.get("/readyz").json["model"] == f"{tmp_path}/bad\\xff.gguf"
    assert daemon.get("/v1/models").json["data"][0]["id"] == "bad\\xff"
    assert daemon.complete(prompt=[8], max_tokens=1).json["model"] == "bad\\xff"
    assert daemon.stop() == 0


def test_a_context_beyond_the_training_is_cut_and_told(start, make_scripted, scripted, tmp_path):
    daemon = start(make_scripted(tmp_path / "m.gguf", scripted.ids("ab"), n_ctx=256), "--ctx", "257")
    (line,) = (x for x in daemon.text.splitlines() if "reduced" in x)
    assert "ctx=257 reduced=true n_ctx=256 reason=training-context" in line


def test_a_trace_is_written(start, make_scripted, scripted, tmp_path):
    trace = tmp_path / "trace.json"
    start(make_scripted(tmp_path / "m.gguf", scripted.ids("ab")), "--trace", str(trace))
    assert b"traceEvents" in trace.read_bytes()


def test_a_trace_that_finds_no_room_costs_only_the_trace(start, make_scripted, scripted, tmp_path):
    trace, full = tmp_path / "trace.json", [sys.executable, "-c", NO_ROOM]
    daemon = start(
        make_scripted(tmp_path / "m.gguf", scripted.ids("ab")), "--trace", str(trace), command=full
    )
    assert daemon.complete(prompt=[8], max_tokens=1).status == 200
    (line,) = (x for x in daemon.text.splitlines() if "the trace cannot be written" in x)
    assert "level=warning" in line
    assert f"{trace}: No space left on device" in line
    assert daemon.stop() == 0


NO_ROOM = """
import errno
from streamer.__main__ import main
from streamer.trace import RecordingTracer
def write(self, path):
    raise OSError(errno.ENOSPC, "No space left on device")
RecordingTracer.write = write
main()
"""
