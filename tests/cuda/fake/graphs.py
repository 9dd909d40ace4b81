"""Run by test_on_fake_driver.py: which graph a step takes, and when graphs come to be. Prints one line."""

import asyncio
import sys
from pathlib import Path

import numpy as np

from streamer.kernels import cublas
from streamer.kernels.cuda_executor import MISSES
from streamer.kernels.ops import Batch, SamplingBatch, Span
from streamer.residency.ledger import Ledger
from streamer.runtime.options import StartOptions
from streamer.runtime.planning import RuntimeOptions
from streamer.runtime.start import start_runtime


class NoProducts:
    """Instead of cuBLASLt, which would want a real driver."""

    def __init__(self, **options):
        pass

    def multiply(self, *arguments, **options):
        pass

    def close(self):
        pass


def decode_step(executor, n):
    rows, floats = np.arange(n, dtype=np.int32), np.zeros(n, np.float32)
    zeros, none = np.zeros(n, np.int32), np.zeros(0, np.int32)
    spans = tuple(Span(i, i, 1, 5, np.array([i], np.int32)) for i in range(n))
    sampling = SamplingBatch(
        floats, zeros, floats, floats, floats, rows, zeros - 1, none, none, floats[:0], floats[:0]
    )
    before = executor.statistics().details["replays"]
    executor.step(Batch(zeros, zeros + 5, spans, rows), sampling).result()
    return executor.statistics().details["replays"] - before


async def main(model, cache):
    cublas.CublasLt = NoProducts
    runtime_options = RuntimeOptions(n_ctx=64, max_sequences=16)
    options = StartOptions(model, device="cuda", runtime=runtime_options, cache_directory=Path(cache))
    runtime = await start_runtime(options, Ledger(model=model))
    runtime.engine.stop()  # the executor is ours from here on
    executor = runtime.bound.executor

    def graphs():
        return executor.statistics().details["graphs"]

    assert decode_step(executor, 3) == 1, "the first graphs are there before READY"
    first = graphs()
    assert decode_step(executor, 10) == 0, "without its graph a step is launched one by one"
    assert graphs() == first
    for _ in range(MISSES):
        decode_step(executor, 10)
    assert graphs() == first + 1, "who misses a graph often gets it"
    assert decode_step(executor, 10) == 1
    assert decode_step(executor, 6) == 1, "a larger graph does meanwhile"
    while executor.prepare_more():
        pass
    assert graphs() > first + 2
    assert not executor.prepare_more()
    runtime.close()
    print("graphs", first, "then all")


asyncio.run(main(*sys.argv[1:]))
