"""Where a step's time goes: graphs by what is left out of them, and steps as the engine queues them.

    python benchmarks/step_lab.py MODEL [--context 128]

Device times are medians of replays by events; wall times are of `Executor.step`, read at once or one behind.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from streamer.config import cache_directory
from streamer.device.cuda import open_cuda
from streamer.kernels.checksum import checksum_code
from streamer.kernels.cuda_attention import CudaAttention
from streamer.kernels.cuda_matmul import CudaMatmul
from streamer.kernels.cuda_sample import CudaSampler
from streamer.kernels.ops import Batch, SamplingBatch, Span
from streamer.load.pipeline import load
from streamer.residency.ledger import Ledger
from streamer.runtime.cuda import CudaPreparation
from streamer.runtime.planning import RuntimeOptions, plan_model, read_model
from streamer.transfer.choose import TransferOptions, open_transfer


def nothing(*_: Any, **__: Any) -> None:
    """Instead of a launch."""


LEFT_OUT: dict[str, list[tuple[type, str]]] = {
    "everything": [],
    "without attention": [(CudaAttention, "attend")],
    "without rotation": [(CudaAttention, "write")],
    "without sampling": [(CudaSampler, "sample")],
    "without head": [(CudaMatmul, "head"), (CudaSampler, "sample")],
    "without all of these": [
        (CudaAttention, "attend"), (CudaAttention, "write"), (CudaSampler, "sample"), (CudaMatmul, "head"),
    ],
}  # fmt: skip


class Lab:
    """One model bound to an executor, without an engine."""

    def __init__(self, path: str, n_ctx: int) -> None:
        cache = cache_directory() / "kernels"
        self.device = open_cuda(0, checksum_code=checksum_code(cache))
        directory, self.architecture = read_model(path)
        options = RuntimeOptions(n_ctx=n_ctx, max_sequences=64, batch_tokens=2048)
        free = self.device.memory_info().free
        model = plan_model(directory, self.architecture, options, kind="cuda", free_bytes=free)
        transfer = open_transfer(self.device, TransferOptions(), cores=8)
        preparation = CudaPreparation(self.device, model, cache)
        finisher = preparation.finisher
        self.weights = asyncio.run(
            load(model.plan, directory, self.device, transfer, Ledger(model.plan), finisher=finisher)
        )
        transfer.close()
        began = time.perf_counter()
        self.executor, self.closers = preparation.bind(self.weights, lambda: None)
        print(f"bind and warm {time.perf_counter() - began:.3f} s")
        preparation.close()
        page = self.architecture.cache_layout().page_size
        self.pages = np.arange(64 * (n_ctx // page), dtype=np.int32).reshape(64, -1)
        self.page_size = page

    def batch(self, n: int, position: int) -> Batch:
        i = np.int32
        spans = tuple(
            Span(s, s, 1, position, self.pages[s, : position // self.page_size + 1]) for s in range(n)
        )
        return Batch(np.full(n, -1, i), np.full(n, position, i), spans, np.arange(n, dtype=i))

    def event_seconds(self, work: Callable[[], None], repeats: int = 9) -> float:
        call, raw = self.device.driver.call, self.executor._stream.raw
        start, stop = call("cuEventCreate", 0), call("cuEventCreate", 0)
        times = []
        for _ in range(repeats):
            call("cuEventRecord", start, raw)
            work()
            call("cuEventRecord", stop, raw)
            call("cuEventSynchronize", stop)
            times.append(1e-3 * float(call("cuEventElapsedTime", start, stop)))
        return statistics.median(times)


def sampling(n: int) -> SamplingBatch:
    i, f = np.zeros(0, np.int32), np.zeros(0, np.float32)
    zeros = np.zeros(n, np.float32)
    return SamplingBatch(
        zeros, np.zeros(n, np.int32), np.ones(n, np.float32), zeros, zeros, np.arange(n, dtype=np.int32),
        np.full(n, -1, np.int32), i, i, f, f,
    )  # fmt: skip


def device_times(lab: Lab, context: int) -> None:
    """Graphs of each decode size; of one row with parts left out."""
    executor, stream = lab.executor, lab.executor._stream.handle
    for kind in executor._limits.graphs:
        n = kind.n_spans if kind.decode else 1
        executor.step(lab.batch(n, context), sampling(n)).result()
        executor._step_tables(kind, lab.batch(min(n, kind.n_spans), context), sampling(min(n, kind.n_spans)))
        graph = executor._graphs.setdefault(kind, executor._captured(kind))
        seconds = lab.event_seconds(lambda g=graph: g.replay(stream=stream))
        print(
            f"graph of {kind.n_rows:4d} rows, {kind.n_spans:3d} spans, decode {kind.decode!s:5}: "
            f"{1e3 * seconds:7.3f} ms, {graph.n_nodes} nodes",
            flush=True,
        )
    kind = executor._limits.graphs[0]
    executor._step_tables(kind, lab.batch(1, context), sampling(1))
    for name, parts in LEFT_OUT.items():
        kept = [(owner, method, getattr(owner, method)) for owner, method in parts]
        for owner, method in parts:
            setattr(owner, method, nothing)
        began = time.perf_counter()
        graph = executor._captured(kind)
        captured = time.perf_counter() - began
        for owner, method, original in kept:
            setattr(owner, method, original)
        seconds = lab.event_seconds(lambda g=graph: [g.replay(stream=stream) for _ in range(5)]) / 5
        print(
            f"1 row, {name:22}: {1e3 * seconds:7.3f} ms, {graph.n_nodes} nodes, "
            f"captured in {1e3 * captured:.1f} ms",
            flush=True,
        )
        graph.close()


def wall_times(lab: Lab, context: int, n: int, steps: int = 100) -> None:
    """Steps of n rows queued one after the other."""
    executor = lab.executor
    executor.step(lab.batch(n, context), sampling(n)).result()
    began = time.perf_counter()
    for i in range(steps):
        executor.step(lab.batch(n, context + i), sampling(n)).result()
    at_once = (time.perf_counter() - began) / steps
    behind, queued = None, 0.0
    began = time.perf_counter()
    for i in range(steps):
        before = time.perf_counter()
        now = executor.step(lab.batch(n, context + i), sampling(n))
        queued += time.perf_counter() - before
        if behind is not None:
            behind.result()
        behind = now
    if behind is not None:
        behind.result()
    overlapped = (time.perf_counter() - began) / steps
    print(
        f"{n:3d} rows: read at once {1e3 * at_once:7.3f} ms, one behind {1e3 * overlapped:7.3f} ms, "
        f"queueing {1e3 * queued / steps:6.3f} ms",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--context", type=int, default=128)
    options = parser.parse_args()
    lab = Lab(options.model, 1024)
    device_times(lab, options.context)
    for n in (1, 16, 64):
        wall_times(lab, options.context, n)
    return 0


if __name__ == "__main__":
    sys.exit(main())
