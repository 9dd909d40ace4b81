"""Many streams at once over the socket of a real daemon: tokens a second, latencies, probes, host time.

    python benchmarks/serve.py [--device cuda] [--models DIR] [--streams 1,4,16,64] [--out DIR]
    python benchmarks/serve.py smollm2-135m --device host --streams 1,8

The model is a path, a pulled name, or a shape of make_gguf.py, written to DIR if it lacks it (the default is
llama8b with q8_0 blocks). Every request has 128 random ids in and 128 tokens out.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gguf_shapes import SHAPES
from rich.console import Console

from streamer.bench.daemon import Daemon, running_daemon
from streamer.bench.record import RESULTS
from streamer.bench.serve import Loop, Measured, Plan, measure, print_table, write_record
from streamer.bench.serve_client import Endpoint
from streamer.bench.serve_shapes import Workload, parse_lengths
from streamer.pull import pulled_path

HERE = Path(__file__).resolve().parent
FLOORS = {1: 370, 4: 1200, 16: 3500, 64: 6000}  # tokens/s of the 8B model on an H200
AIMS = {1: 450, 4: 1600, 16: 5000, 64: 10000}


def model_path(name: str, type_name: str, models: Path) -> Path:
    """The file of a path, a pulled name or a shape; a shape's is written if it is not there."""
    if Path(name).exists():
        return Path(name)
    if (pulled := pulled_path(name)) is not None:
        return pulled
    if name not in SHAPES:
        raise SystemExit(f"{name}: no file, no pulled model, no shape of make_gguf.py")
    path = models / f"{name}_{type_name}.gguf"
    if not path.exists():
        models.mkdir(parents=True, exist_ok=True)
        started_s = time.perf_counter()
        maker = [sys.executable, str(HERE / "make_gguf.py"), name, str(path), "--type", type_name]
        subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)
        print(f"wrote {path.name} in {time.perf_counter() - started_s:.1f} s", flush=True)
    return path


def plan_for(daemon: Daemon, options: argparse.Namespace) -> Plan:
    model = daemon.get("/v1/models")["data"][0]
    return Plan(
        endpoint=Endpoint(socket_path=daemon.socket_path),
        workload=Workload(
            parse_lengths(options.prompt_tokens),
            parse_lengths(options.output_tokens),
            options.seed,
            model["meta"]["n_vocab"],
        ),
        members={"temperature": 0.0, "model": model["id"]},
        loops=[Loop(streams=int(n)) for n in options.streams.split(",")],
        requests=options.requests,
        duration_s=None,
        warm_up=None,
        timeout_s=300.0,
        probe_interval_s=0.01,
    )


def tell_floors(measured: Measured) -> None:
    """Beside what the 8B model has to reach on an H200."""
    for group in measured.groups:
        n = int(group.size)
        if n in FLOORS and "tok_s" in group.metrics:
            rate = group.metrics["tok_s"]
            verdict = "reached" if rate >= FLOORS[n] else "MISSED"
            print(f"{n:3} streams: {rate:8,.0f} tokens/s, floor {FLOORS[n]:,} {verdict}, aim {AIMS[n]:,}")


def add_ratios(measured: Measured) -> dict[str, float]:
    """What N streams give of what one gives: `streams_8.over_one`."""
    rates = {int(g.size): g.metrics["tok_s"] for g in measured.groups if "tok_s" in g.metrics}
    return {f"streams_{n}.over_one": rate / rates[1] for n, rate in rates.items() if n > 1 and 1 in rates}


def run(options: argparse.Namespace, path: Path) -> tuple[Measured, dict[str, Any]]:
    """Measure, and what the daemon says it runs on."""
    serve = ("--max-sequences", str(options.max_sequences), "--ctx", str(options.ctx), *options.serve_option)
    with running_daemon(str(path), device=options.device, options=serve, timeout_s=300.0) as daemon:
        print(f"ready after {daemon.ready_s:.1f} s", flush=True)
        measured = measure(plan_for(daemon, options), Console())
        measured.metrics.update(add_ratios(measured) | {"ready_s": daemon.ready_s})
        residency = dict(daemon.get("/readyz"))
        if options.keep_metrics:
            (options.out / "serve-metrics.txt").write_text(str(daemon.get("/metrics")))
        daemon.stop()
    return measured, residency


def main() -> int:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    path = model_path(options.model, options.type, options.models)
    measured, residency = run(options, path)
    print_table(measured)
    if options.model == "llama8b":
        tell_floors(measured)
    device = str(residency.get("device", "host"))
    parameters = {
        "model": path.stem,
        "streams": [int(g.size) for g in measured.groups],
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "max_sequences": options.max_sequences,
        "ctx": options.ctx,
        "serve_options": options.serve_option,
        "seed": options.seed,
        "conditions": options.conditions,
    }
    gpu = None if device == "host" else device.partition(" ")[2]
    print(write_record(measured, parameters, gpu=gpu, out=options.out, commit=options.commit))
    failed = sum(g.metrics["errors"] for g in measured.groups) + measured.metrics.get("probe_failures", 0)
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", default="llama8b")
    add("--type", default="q8_0", help="blocks of a model that is written")
    add("--models", type=Path, default=Path("/var/tmp/ggufd-models"), help="where models are written")
    add("--device", default="auto")
    add("--streams", default="1,4,16,64")
    add("--requests", type=int, help="of each loop [four a stream, at least 16]")
    add("--prompt-tokens", default="128")
    add("--output-tokens", default="128")
    add("--max-sequences", type=int, default=64)
    add("--ctx", type=int, default=1024)
    add("--serve-option", action="append", default=[], help="for the daemon, again and again")
    add("--seed", type=int, default=0)
    add("--conditions", default="", help="what else the machine did, for the record")
    add("--keep-metrics", action="store_true", help="leave the daemon's /metrics beside the record")
    add("--commit")
    add("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
