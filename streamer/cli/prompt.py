"""`ggufd prompt`: sends a prompt to a running daemon and streams the answer."""

import json
import sys
import time
from typing import Any

import click

from streamer.cli.bar import wait_ready
from streamer.cli.client import RefusedError, post, post_events
from streamer.cli.probe import one_line
from streamer.cli.stdio import check_text, read_text, write_utf8
from streamer.config import client_socket_path

PATIENCE_S = 3.0  # for somebody to listen, unless a time was given


@click.command()
@click.argument("text")
@click.option("--socket", "socket_flag", metavar="PATH", help="the daemon's socket")
@click.option("--raw", is_flag=True, help="continue the text as it is, without the chat template")
@click.option("--system", metavar="TEXT", help="a system message")
@click.option("--max-tokens", type=int, metavar="N", help="at most this many tokens")
@click.option("--temperature", type=float, metavar="X", help="0 takes the likeliest token")
@click.option("--seed", type=int, metavar="N", help="the same seed gives the same answer")
@click.option("--json", "as_json", is_flag=True, help="print the whole answer as JSON")
@click.option(
    "--timeout", type=float, metavar="S", help="longest wait for readiness [none, once a daemon answers]"
)
def command(
    text: str,
    socket_flag: str | None,
    raw: bool,
    system: str | None,
    as_json: bool,
    timeout: float | None,
    **sampling: float | None,
) -> int:
    """Send TEXT (- reads standard input) and stream the answer; waits for readiness."""
    check_text(text, "TEXT")
    check_text(system or "", "--system")
    path = client_socket_path(socket_flag)
    deadline = None if timeout is None else time.monotonic() + timeout
    residency = wait_ready(path, deadline, patience_s=PATIENCE_S if timeout is None else None)
    if residency["status"] != "ready":
        raise RefusedError(f"the daemon is not ready: {one_line(residency)}")
    text = read_text() if text == "-" else text
    route, body = request_body(text, raw=raw, system=system, **sampling)
    if as_json:
        write_utf8(json.dumps(post(path, route, body), ensure_ascii=False) + "\n")
        return 0
    for event in post_events(path, route, {**body, "stream": True}):
        sys.stdout.write(event_text(event))
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def request_body(
    text: str, *, raw: bool, system: str | None, **sampling: float | None
) -> tuple[str, dict[str, Any]]:
    """(route, body)."""
    body: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    if raw:
        return "/v1/completions", {"prompt": text, "max_tokens": -1, **body}
    messages = [{"role": "system", "content": system}] if system is not None else []
    return "/v1/chat/completions", {"messages": [*messages, {"role": "user", "content": text}], **body}


def event_text(event: dict[str, Any]) -> str:
    """The new text of a stream's event, whichever API it is of."""
    pieces = []
    for choice in event.get("choices", []):
        delta = choice.get("delta", {})
        pieces.append(choice.get("text") or delta.get("reasoning_content") or delta.get("content") or "")
    return "".join(pieces)
