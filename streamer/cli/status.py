"""`ggufd status`: the probe for people, scripts and `exec` probes. Exit 0 exactly when the answer is yes."""

import json
import sys
import time

import click

from streamer.cli.probe import Unreachable, get, get_residency, one_line
from streamer.cli.stdio import OutputError, drop_output
from streamer.config import client_socket_path

POLL_S = 0.1


@click.command()
@click.option("--socket", "socket_flag", metavar="PATH", help="the daemon's socket")
@click.option("--json", "as_json", is_flag=True, help="the residency object")
@click.option(
    "--wait", is_flag=True, help="until the answer is yes (or the load failed), with a bar on a terminal"
)
@click.option(
    "--ready/--live", "ready", default=True, help="ask whether it is ready [default], or only alive"
)
@click.option(
    "--timeout", type=float, default=None, metavar="S", help="for one answer [5]; with --wait, in all [none]"
)
def command(socket_flag: str | None, as_json: bool, wait: bool, ready: bool, timeout: float | None) -> int:
    """Say how far the daemon is; exit 0 exactly when the answer is yes."""
    path = client_socket_path(socket_flag)
    deadline = None if timeout is None else time.monotonic() + timeout
    if not ready:
        return _live(path, wait, timeout or 5.0, deadline)
    if wait:
        from streamer.cli.bar import wait_ready

        residency = wait_ready(path, deadline)
    else:
        residency = get_residency(path, timeout or 5.0)
    _say(json.dumps(residency) if as_json else one_line(residency))
    return 0 if residency["status"] == "ready" else 1


def _say(text: str) -> None:
    """The exit code is the answer, whether or not somebody takes the words."""
    try:
        print(text, flush=True)
    except OutputError:
        drop_output()


def _live(path: str, wait: bool, timeout_s: float, deadline: float | None) -> int:
    while True:
        try:
            status, _ = get("/livez", path, timeout_s)
            _say("alive" if status == 200 else f"HTTP {status}")
            return 0 if status == 200 else 1
        except Unreachable as error:
            if not wait or (deadline is not None and time.monotonic() > deadline):
                print(error, file=sys.stderr)
                return 1
        time.sleep(POLL_S)
