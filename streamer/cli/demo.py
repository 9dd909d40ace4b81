"""`make run` and `make serve`.

Pull a small model, start the daemon, ask it twice, say what happened, stop it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from streamer.cli.bar import wait_ready
from streamer.cli.client import post_events
from streamer.cli.probe import Unreachable, amount, one_line
from streamer.cli.prompt import event_text, request_body
from streamer.cli.pull import pull_with_bar
from streamer.config import default_socket_path
from streamer.errors import GgufdError
from streamer.pull import pulled_path

MODEL = "smollm2-135m"
QUESTION = "In one sentence: why is the sky blue?"
START_S = 300.0


class DemoError(GgufdError):
    """The daemon did not do what the demonstration shows."""


@click.command(hidden=True)
@click.option("--stay", is_flag=True, help="keep the daemon running afterwards")
@click.option("--device", default="auto", metavar="NAME")
def command(stay: bool, device: str) -> int:
    """Pull SmolLM2-135M, make it resident, ask it, print what happened."""
    if pulled_path(MODEL) is None:
        print(f"fetching {MODEL} (98 MB, once)", flush=True)
    path = pull_with_bar(MODEL)
    for number in (signal.SIGTERM, signal.SIGHUP):  # whoever stops us stops the daemon too, as Ctrl-C does
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="ggufd-") as folder:
        socket_path = default_socket_path() if stay else f"{folder}/ggufd.sock"
        log = Path(folder) / "log"
        daemon = _start(path, socket_path, device, log)
        try:
            residency = _wait(daemon, socket_path, log)
            answers = [_ask(socket_path), _ask(socket_path, quietly=True)]
            print(_summary(residency, answers))
            if stay:
                _stay(daemon, socket_path, log)
        finally:
            code = _stop(daemon)
        if code != 0:
            raise DemoError(f"the daemon ended with exit code {code}: {log.read_text()[-2000:]}")
    print("stopped cleanly")
    return 0


def _start(path: str, socket_path: str, device: str, log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "streamer", "serve", path, "--socket", socket_path, "--device", device]
    environment = {
        k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", "LISTEN_FDS", "WATCHDOG_USEC")
    }
    with log.open("wb") as output:  # a session of its own: Ctrl-C reaches it through us only
        return subprocess.Popen(
            [*command, "--verify"], stderr=output, stdout=output, env=environment, start_new_session=True
        )


def _wait(daemon: "subprocess.Popen[bytes]", socket_path: str, log: Path) -> dict[str, Any]:
    try:
        residency = wait_ready(socket_path, time.monotonic() + START_S, pid=daemon.pid, lines=True)
    except Unreachable:
        raise DemoError(f"the daemon did not start: {log.read_text()[-2000:].strip()}") from None
    print(one_line(residency), flush=True)
    if residency["status"] != "ready":
        raise DemoError(f"the daemon did not become ready: {log.read_text()[-2000:].strip()}")
    return residency


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it."""

    first_text_s: float
    total_s: float
    n_tokens: int
    details: dict[str, Any]  # the `ggufd` object


def _ask(socket_path: str, *, quietly: bool = False) -> Answer:
    """Stream one answer. Nothing is reused from the request before: both times are of the same work."""
    route, body = request_body(QUESTION, raw=False, system=None, temperature=0.0, max_tokens=48)
    body |= {"stream": True, "stream_options": {"include_usage": True}, "cache_prompt": False}
    started = time.monotonic()
    first: float | None = None
    last: dict[str, Any] = {}
    if not quietly:
        print(f"\n> {QUESTION}\n", flush=True)
    for event in post_events(socket_path, route, body):
        text = event_text(event)
        if text and first is None:
            first = time.monotonic() - started
        if not quietly:
            sys.stdout.write(text)
            sys.stdout.flush()
        last = event if "usage" in event else last
    if not quietly:
        print("\n")
    total = time.monotonic() - started
    return Answer(first or total, total, last["usage"]["completion_tokens"], last["ggufd"])


def _summary(r: dict[str, Any], answers: list[Answer]) -> str:
    proof = ", every byte proved on the device" if r["verified"] else ""
    source = f"{amount(r['source']['page_cache_bytes'])} from the page cache"
    source += f", {amount(r['source']['storage_bytes'])} from storage"
    rows = [
        ("resident", f"{r['bytes_resident']:,} of {r['bytes_total']:,} bytes on {r['device']}{proof}"),
        ("", f"{r['tensors_resident']} tensors, {r['layers_resident']} layers; {source}"),
        ("rate", f"{amount(r['bytes_per_s'])}/s while uploading"),
        (
            "phases",
            ", ".join(f"{name} {s:.2f} s" for name, s in r["phase_seconds"].items() if name != "ready"),
        ),
        ("ready after", f"{r['elapsed_s']:.2f} s"),
    ]
    for name, answer in zip(("first request", "second request"), answers, strict=True):
        rate = answer.n_tokens / max(answer.details["decode_ms"] / 1e3, 1e-9)
        times = f"first text after {answer.first_text_s:.3f} s, all after {answer.total_s:.3f} s"
        moved = f"weight bytes moved: {answer.details['weight_h2d_bytes']}"
        rows.append((name, f"{times} ({answer.n_tokens} tokens, {rate:.1f} a second); {moved}"))
    return "\n".join(f"{name:<15} {text}" for name, text in rows)


def _stay(daemon: "subprocess.Popen[bytes]", socket_path: str, log: Path) -> None:
    lines = (
        f"\nserving on {socket_path} (Ctrl-C stops it), log in {log}; in another terminal, for example\n",
        f"  curl --unix-socket {socket_path} http://localhost/v1/chat/completions \\",
        '    -d \'{"messages": [{"role": "user", "content": "Hello!"}]}\'',
        f'  {Path(sys.executable).parent}/ggufd prompt --socket {socket_path} "Hello!"',
    )
    try:
        print("\n".join(lines), flush=True)
        daemon.wait()
    except KeyboardInterrupt:
        print()


def _stop(daemon: "subprocess.Popen[bytes]") -> int:
    if daemon.poll() is None:
        daemon.send_signal(signal.SIGTERM)
    try:
        return daemon.wait(timeout=60)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        daemon.kill()
        return daemon.wait()
