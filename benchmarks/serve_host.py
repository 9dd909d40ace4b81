"""What the host side of serving can pass: the real server, text and engine over a device that only waits.

    python benchmarks/serve_host.py [--streams 64] [--step-ms 6] [--launch-ms 0.3]

The device takes `--step-ms` for a step (plus `--row-us` a prefill row) without the interpreter lock, and its
launch `--launch-ms` with it. Prints tokens a second beside what such a device could give, and the CPU time a
token costs in the loop's thread, in the engine's, and in the client.
"""

import argparse
import asyncio
import gc
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import uvloop
from aiohttp import web
from gguf_shapes import SHAPES, tokenizer_keys
from host_step import StatelessExecutor
from rich.console import Console

from streamer.bench.record import read_commit, read_machine
from streamer.bench.serve import Loop, Measured, Plan, measure, print_table
from streamer.bench.serve_client import Endpoint
from streamer.bench.serve_shapes import Fixed, Workload
from streamer.cache.pages import PagePool
from streamer.engine.engine import Engine
from streamer.engine.steps import EngineOptions
from streamer.kernels.ops import Batch, SamplingBatch, StepResult
from streamer.runtime.account import Snapshot
from streamer.runtime.step_times import StepTimes
from streamer.server.app import make_runner
from streamer.server.logs import configure_logging
from streamer.server.metrics import Metrics
from streamer.server.sockets import bind_unix
from streamer.server.state import Backend, ModelCard, ServerState
from streamer.server.textwork import build_text
from streamer.service import SWITCH_S

SHAPE = SHAPES["llama8b"]
N_CTX, PAGE = 4096, 16


class WaitingDevice(StatelessExecutor):
    """An executor whose steps take their time one after the other and give random ids."""

    def __init__(self, step_s: float, row_s: float, launch_s: float) -> None:
        self._step_s, self._row_s, self._launch_s = step_s, row_s, launch_s
        self._free_at_s = 0.0
        self._rng = np.random.default_rng(0)

    def step(self, batch: Batch, sampling: SamplingBatch) -> "WaitingStep":
        until_s = time.perf_counter() + self._launch_s
        while time.perf_counter() < until_s:
            pass
        n, n_prefill = len(batch.logit_rows), batch.n_rows - len(batch.spans)
        start_s = max(time.perf_counter(), self._free_at_s)
        self._free_at_s = start_s + self._step_s + n_prefill * self._row_s
        zeros, empty = np.zeros(n, np.float32), np.zeros((n, 0), np.float32)
        ids = self._rng.integers(0, SHAPE.n_vocab - 256, n).astype(np.int32)
        result = StepResult(ids, zeros, zeros, empty.astype(np.int32), empty, np.ones(n, bool))
        return WaitingStep(self._free_at_s, result)


@dataclass(frozen=True)
class WaitingStep:
    done_at_s: float
    value: StepResult

    def result(self) -> StepResult:
        time.sleep(max(0.0, self.done_at_s - time.perf_counter()))
        return self.value


async def serve(path: str, options: argparse.Namespace, ready: Event) -> None:
    """The daemon's rooms over a waiting device, until the process is terminated."""
    metadata = tokenizer_keys(SHAPE)
    text = await build_text(metadata, "m", SHAPE.n_vocab, template_timeout_s=5.0)
    device = WaitingDevice(options.step_ms / 1e3, options.row_us / 1e6, options.launch_ms / 1e3)
    steps, n = StepTimes(), options.max_sequences
    engine = Engine(
        device,
        PagePool(n * N_CTX // PAGE, PAGE),
        EngineOptions(max_sequences=n, n_ctx=N_CTX, max_rows=2048, max_logit_rows=max(128, n)),
        on_step=steps.observe,
    )
    engine.start()
    card = ModelCard("m", "m", 1, "llama", N_CTX, N_CTX, 8 << 30, SHAPE.n_vocab, 4096, 8 << 30, "Q8_0")
    metrics = Metrics(lambda: Snapshot(step_seconds=steps.statistics()), lambda: (0, 0))
    state = ServerState(
        residency=lambda _: {"status": "ready"}, metrics=metrics, model_id="m", status="ready"
    )
    state.backend = Backend(engine, text, card)
    runner = make_runner(state)
    await runner.setup()
    await web.SockSite(runner, bind_unix(path).socket).start()
    gc.collect()
    gc.freeze()
    ready.set()
    await asyncio.Event().wait()


def server_process(path: str, options: argparse.Namespace, ready: Event) -> None:
    configure_logging(style="kv", level="info", journal=False, debug=False)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(path, options, ready))


def thread_seconds(pid: int) -> Mapping[str, float]:
    """CPU seconds of a server's threads: the loop is the main one, the engine the busiest of the others."""
    found = {"loop": 0.0, "engine": 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = "loop" if task.name == str(pid) else "engine"
        found[name] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def main() -> int:
    options = parse()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path, ready = f"{folder}/s", context.Event()
        server = context.Process(target=server_process, args=(path, options, ready), daemon=True)
        server.start()
        assert ready.wait(60)
        assert server.pid is not None
        plan = Plan(
            endpoint=Endpoint(socket_path=path),
            workload=Workload(
                Fixed(options.prompt_tokens), Fixed(options.output_tokens), 0, SHAPE.n_vocab - 256
            ),
            members={"temperature": 0.0},
            loops=[Loop(streams=options.streams)],
            requests=options.requests or 4 * options.streams,
            duration_s=None,
            warm_up=None,
            timeout_s=300.0,
            probe_interval_s=0.01,
        )
        before, own = thread_seconds(server.pid), cpu_seconds()
        measured = measure(plan, Console(stderr=True))
        after, own = thread_seconds(server.pid), cpu_seconds() - own
        server.terminate()
        server.join()
    tell(options, measured, {k: v - before.get(k, 0.0) for k, v in after.items()}, own)
    return 0


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def tell(options: argparse.Namespace, measured: Measured, threads: Mapping[str, float], own_s: float) -> None:
    print_table(measured)
    (group,) = measured.groups
    n_tokens = sum(o.n_tokens for o in group.outcomes) + 16 * options.streams  # and the warm-up's
    could = options.streams / (options.step_ms / 1e3)
    load = os.getloadavg()[0]
    print(f"{read_commit()}  {read_machine(None).slug}  load {load:.1f}")
    print(f"tokens/s {group.metrics['tok_s']:,.0f} of {could:,.0f} that the device gives in steady decode")
    for name, seconds in (*threads.items(), ("client", own_s)):
        if seconds > 0.005:
            print(f"  {name:16} {1e6 * seconds / n_tokens:7.1f} us of CPU a token")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument("--requests", type=int, help="[four a stream]")
    parser.add_argument("--step-ms", type=float, default=6.0)
    parser.add_argument("--row-us", type=float, default=20.0)
    parser.add_argument("--launch-ms", type=float, default=0.3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
