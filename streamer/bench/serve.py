"""`ggufd bench serve`: what users of a running server get, from one stream to many. A load generator.

    ggufd bench serve --streams 1,4,16,64                        N users, each asking again when answered
    ggufd bench serve --rate 2,8 --duration 30                   users who come at random, so many a second
    ggufd bench serve --prompt-tokens lognormal:400:0.8 --output-tokens uniform:16:256
    ggufd bench serve --url http://127.0.0.1:8080 --vocabulary 32000

Lengths: N, fixed:N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MAX], or a file of JSON lines with prompt or
prompt_tokens, and output_tokens. Prompts are random ids (no prefix is ever in a cache) unless --text is
given.
Answers run to their length. Prints a table, writes the record and a picture (SVG) beside it.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from streamer.bench.record import RESULTS, Record, new_record, prepare_directory
from streamer.bench.serve_client import Endpoint
from streamer.bench.serve_load import Budget, Driver
from streamer.bench.serve_picture import picture_svg
from streamer.bench.serve_probe import Prober, ask
from streamer.bench.serve_results import (
    Group,
    Samples,
    make_group,
    probe_metrics,
    read_samples,
    server_metrics,
)
from streamer.bench.serve_shapes import Workload, parse_lengths, read_lines
from streamer.config import client_socket_path

WARM_UP_TOKENS = 16
DEFAULT_STREAMS = (1, 4, 16, 64)
PIPE_COLUMNS = 130
COLUMNS = (  # metric, heading
    ("requests", "requests"),
    ("errors", "errors"),
    ("tok_s", "tokens/s"),
    ("ttft_p50_ms", "first p50"),
    ("ttft_p99_ms", "first p99"),
    ("itl_p50_ms", "gap p50"),
    ("itl_p99_ms", "gap p99"),
    ("e2e_p50_ms", "whole p50"),
    ("e2e_p99_ms", "whole p99"),
)


@dataclass(frozen=True)
class Loop:
    """Closed with that many streams, or open at that many requests a second."""

    streams: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        return f"streams_{self.streams}" if self.streams else f"rate_{self.rate:g}"

    @property
    def label(self) -> str:
        return f"{self.streams} stream{'s' * (self.streams > 1)}" if self.streams else f"{self.rate:g}/s"


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    endpoint: Endpoint
    workload: Workload
    members: dict[str, Any]
    loops: Sequence[Loop]  # one after the other
    requests: int | None  # a loop's; None: four a stream, at least 16
    duration_s: float | None
    warm_up: int | None  # requests before each loop; None: one a stream
    timeout_s: float
    probe_interval_s: float  # 0: no probes


@dataclass(frozen=True)
class Measured:
    groups: Sequence[Group]
    metrics: dict[str, float]


# ---- measuring ---------------------------------------------------------------------------------------------


async def measure_loop(plan: Plan, loop: Loop, first: int) -> Group:
    """Warm up, then count. `first`: number of the first request, so that no two loops ask the same."""
    warm_up = plan.warm_up if plan.warm_up is not None else max(1, loop.streams)
    driver = Driver(plan.endpoint, plan.workload, plan.members, plan.timeout_s)
    try:
        driver.max_tokens = WARM_UP_TOKENS
        await driver.closed(max(1, loop.streams), Budget(warm_up, None, first))
        driver.max_tokens, driver.outcomes, driver.peak_in_flight = None, [], 0
        requests = plan.requests
        if requests is None and plan.duration_s is None:
            requests = max(16, 4 * loop.streams)
        budget = Budget(requests, plan.duration_s, first + warm_up)
        if loop.streams:
            await driver.closed(loop.streams, budget)
        else:
            await driver.open(loop.rate, budget)
    finally:
        driver.close()
    return make_group(
        loop.name, loop.label, loop.streams or loop.rate, driver.outcomes, driver.peak_in_flight
    )


def measure(plan: Plan, console: Console) -> Measured:
    """All loops, probes beside them. Blocking."""
    groups: list[Group] = []
    prober = Prober(plan.endpoint, plan.probe_interval_s)
    before: Samples = {}
    with (
        prober if plan.probe_interval_s else contextlib.nullcontext(),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        for number, loop in enumerate(plan.loops):
            before = server_samples(plan.endpoint)
            group = runner.run(measure_loop(plan, loop, number << 20))
            groups.append(group)
            console.print(f"{group.label}: {group.metrics.get('tok_s', 0):,.0f} tokens/s", highlight=False)
    after = server_samples(plan.endpoint)
    metrics = {f"{g.name}.{name}": value for g in groups for name, value in g.metrics.items()}
    if plan.probe_interval_s:
        metrics |= probe_metrics(prober.latencies, prober.failures)
    return Measured(groups, metrics | server_metrics(before, after))  # of the last loop, the fullest


def server_samples(endpoint: Endpoint) -> Samples:
    """The server's /metrics; empty where it has none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        head, _, body = ask(endpoint, "/metrics").partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 200"):
            return read_samples(body.decode())
    return {}


def server_model(endpoint: Endpoint) -> dict[str, Any]:
    """The first model of /v1/models; empty where there is none. OSError when nobody listens."""
    _, _, body = ask(endpoint, "/v1/models").partition(b"\r\n\r\n")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return dict(json.loads(body)["data"][0])
    return {}


# ---- telling -----------------------------------------------------------------------------------------------


def print_table(measured: Measured) -> None:
    table = Table(title="times in ms", box=SIMPLE)
    for heading in ("load", *(heading for _, heading in COLUMNS)):
        table.add_column(heading, justify="right", no_wrap=True)
    for group in measured.groups:
        values = [group.metrics.get(name) for name, _ in COLUMNS]
        table.add_row(
            group.label, *("" if v is None else f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in values)
        )
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
    console.print(table)
    for group in measured.groups:
        if group.errors:
            found = ", ".join(f"{n} x {kind}" for kind, n in sorted(group.errors.items()))
            console.print(f"{group.label}: failed: {found}", highlight=False)
    others = {k: v for k, v in measured.metrics.items() if "." not in k}
    console.print("  ".join(f"{k}={v:.4g}" for k, v in others.items()), highlight=False)


def runs_of(measured: Measured) -> list[dict[str, Any]]:
    """A record's runs: each loop's metrics and errors."""
    return [
        {"loop": g.name, "peak_in_flight": g.peak_in_flight, "error_kinds": dict(g.errors), **g.metrics}
        for g in measured.groups
    ]


def write_record(
    measured: Measured, parameters: dict[str, Any], *, gpu: str | None, out: Path, commit: str | None = None
) -> Path:
    """Record and picture; the record's path."""
    record: Record = new_record(
        "serve",
        gpu=gpu,
        parameters=parameters,
        metrics=measured.metrics,
        runs=runs_of(measured),
        commit=commit,
    )
    path = record.write(out)
    title = f"{parameters.get('model', 'serve')}, {record.machine.slug}, {record.date}"
    path.with_suffix(".svg").write_text(picture_svg(measured.groups, title))
    return path


# ---- the command -------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    prepare_directory(options.out)
    endpoint = _endpoint(options)
    try:
        model = server_model(endpoint)
    except OSError as error:
        print(f"ggufd: {endpoint.socket_path or endpoint.host}: {error}", file=sys.stderr)
        return 69
    try:
        plan = _plan(options, endpoint, model)
    except (OSError, ValueError) as error:
        print(f"ggufd: bench serve: {error}", file=sys.stderr)
        return 2
    started_s = time.perf_counter()
    measured = measure(plan, Console(stderr=True))
    print_table(measured)
    parameters = {
        "model": model.get("id", ""),
        "url": options.url,
        "loops": [loop.name for loop in plan.loops],
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "lengths": options.lengths and options.lengths.name,
        "text": not plan.workload.n_vocab,
        "seed": options.seed,
        "seconds": round(time.perf_counter() - started_s, 1),
    }
    print(write_record(measured, parameters, gpu=options.gpu, out=options.out, commit=options.commit))
    return 0 if any("tok_s" in g.metrics for g in measured.groups) else 1


def _plan(options: argparse.Namespace, endpoint: Endpoint, model: dict[str, Any]) -> Plan:
    """ValueError for what cannot be asked."""
    n_vocab = 0 if options.text else options.vocabulary or (model.get("meta") or {}).get("n_vocab") or 0
    if not n_vocab and not options.text:
        raise ValueError("the server does not tell its vocabulary's size: give --vocabulary N, or --text")
    workload = Workload(
        parse_lengths(options.prompt_tokens),
        parse_lengths(options.output_tokens),
        options.seed,
        n_vocab,
        read_lines(options.lengths) if options.lengths else (),
    )
    members = {"temperature": options.temperature, **({"model": model["id"]} if "id" in model else {})}
    loops = [Loop(streams=int(x)) for x in options.streams.split(",") if x]
    loops += [Loop(rate=float(x)) for x in options.rate.split(",") if x]
    if any(loop.streams <= 0 and loop.rate <= 0 for loop in loops):
        raise ValueError("streams and rates are above zero")
    return Plan(
        endpoint=endpoint,
        workload=workload,
        members=members,
        loops=loops or [Loop(streams=n) for n in DEFAULT_STREAMS],
        requests=options.requests,
        duration_s=options.duration,
        warm_up=options.warm_up,
        timeout_s=options.timeout,
        probe_interval_s=0.0 if options.no_probes else options.probe_interval,
    )


def _endpoint(options: argparse.Namespace) -> Endpoint:
    key = options.api_key_file.read_text().split("\n")[0].strip() if options.api_key_file else ""
    if not options.url:
        return Endpoint(socket_path=client_socket_path(options.socket), api_key=key)
    parts = urlsplit(options.url if "//" in options.url else f"//{options.url}")
    return replace(Endpoint(api_key=key), host=parts.hostname or "localhost", port=parts.port or 80)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ggufd bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--socket", help="the server's Unix socket [where ggufd serves]")
    add("--url", default="", help="or its address, http://HOST:PORT")
    add("--api-key-file", type=Path)
    add("--streams", default="", help="numbers of users at once, with commas [1,4,16,64]")
    add("--rate", default="", help="requests a second, with commas")
    add("--requests", type=int, help="of each loop [four a stream, at least 16]")
    add("--duration", type=float, help="seconds of each loop, instead of --requests")
    add("--warm-up", type=int, help="requests before each loop that do not count [one a stream]")
    add("--prompt-tokens", default="128", metavar="LENGTHS")
    add("--output-tokens", default="128", metavar="LENGTHS")
    add("--lengths", type=Path, metavar="FILE", help="requests to send, JSON lines")
    add("--text", action="store_true", help="prompts of words instead of random ids")
    add("--vocabulary", type=int, help="random ids are below this [the server's]")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=300.0, help="seconds for one request")
    add("--probe-interval", type=float, default=0.01, help="seconds between probes")
    add("--no-probes", action="store_true")
    add("--gpu", help="the server's GPU, for the record [none]")
    add("--commit", help="for the record [this checkout's]")
    add("--out", type=Path, default=RESULTS)
    return parser.parse_args(arguments)
