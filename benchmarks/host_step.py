"""The host's own work of a decode step, without a device and without clients: what a step can never be below.

    python benchmarks/host_step.py [--sequences 1 16 64] [--steps 2000]

The real step loop (schedule, build the batch, draw, read, make events) over an executor that packs the tables
a GPU would get and answers at once. Microseconds of the thread's processor time a step, by quantile: waiting
for a processor or for the interpreter lock is not in it.
"""

import argparse
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streamer.bench.record import RESULTS, new_record
from streamer.cache.pages import PagePool
from streamer.engine.request import Request, SamplingParameters
from streamer.engine.sequence import new_sequence
from streamer.engine.steps import EngineOptions, StepLoop
from streamer.kernels.cuda_tables import TableLayout, TableShape, pack
from streamer.kernels.ops import Batch, SamplingBatch, StepResult

N_CTX, PAGE, N_VOCAB, N_PROMPT = 4096, 32, 128_256, 128
QUANTILES = (10, 50, 90)


class StatelessExecutor:
    """What an executor does beside steps, where there is nothing to do."""

    def warm(self) -> None: ...
    def prepare_more(self) -> bool:
        return False

    def close(self) -> None: ...
    def copy_state(self, source_slot: int, target_slot: int) -> None: ...
    def reset_state(self, slot: int) -> None: ...


class PackingExecutor(StatelessExecutor):
    """Packs every step's tables; ids are 0, 1, 2, ... of the row."""

    def __init__(self, max_sequences: int, max_rows: int) -> None:
        pages = N_CTX // PAGE
        words = -(-N_VOCAB // 32)
        self._shapes = {
            rows: TableLayout(TableShape(rows, max_sequences, max_sequences, pages, 64, 4, words))
            for rows in (max_sequences, max_rows)
        }
        memory = memoryview(bytearray(max(layout.nbytes for layout in self._shapes.values())))
        self._views = {rows: layout.views(memory) for rows, layout in self._shapes.items()}

    def step(self, batch: Batch, sampling: SamplingBatch) -> "Answered":
        rows = next(rows for rows in self._shapes if batch.n_rows <= rows)
        pack(batch, sampling, self._shapes[rows], self._views[rows])
        n = len(batch.logit_rows)
        zeros, nothing = np.zeros(n, np.float32), np.zeros((n, 0), np.float32)
        ids = np.arange(n, dtype=np.int32)
        return Answered(StepResult(ids, zeros, zeros, nothing.astype(np.int32), nothing, np.ones(n, bool)))


@dataclass(frozen=True)
class Answered:
    value: StepResult

    def result(self) -> StepResult:
        return self.value


class Reader:
    """Whoever reads the events; it never falls behind."""

    sent = taken = 0
    paused = False


def step_times_us(n_sequences: int, n_steps: int) -> np.ndarray:
    """(n_steps,) microseconds of processor time of decode steps of so many sequences."""
    rng, max_rows = np.random.default_rng(0), 2048
    options = EngineOptions(
        max_sequences=n_sequences,
        n_ctx=N_CTX,
        max_rows=max_rows,
        max_logit_rows=max(128, n_sequences),
        backlog_limit=1 << 40,
    )
    loop = StepLoop(
        PackingExecutor(n_sequences, max_rows),
        PagePool(n_sequences * N_CTX // PAGE, PAGE),
        options,
        snapshots=None,
        clock=time.monotonic,
        weight_h2d_bytes=lambda: 0,
    )
    for i in range(n_sequences):
        prompt = rng.integers(0, N_VOCAB, N_PROMPT).tolist()
        request = Request(str(i), prompt, SamplingParameters(seed=i), max_tokens=N_CTX)
        loop.submit(new_sequence(request, N_CTX, i, Reader(), time.monotonic()))
    while any(s.goal == s.n_prompt for s in loop.scheduler.running) or loop.scheduler.waiting:
        loop.turn()
    gc.collect()
    gc.freeze()
    found = np.empty(n_steps)
    for i in range(n_steps):
        loop.outcomes.outbox.clear()
        began_s = time.thread_time()
        loop.turn()
        found[i] = time.thread_time() - began_s
    assert len(loop.scheduler.running) == n_sequences, "a sequence has ended: fewer rows than were meant"
    loop.close()
    gc.unfreeze()
    return found * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--results", default=str(RESULTS))
    options = parser.parse_args()
    metrics = {}
    for n in options.sequences:
        times = np.percentile(step_times_us(n, options.steps), QUANTILES)
        metrics |= {
            f"sequences_{n}.p{q}_us": round(float(t), 1) for q, t in zip(QUANTILES, times, strict=True)
        }
    for name, value in metrics.items():
        print(f"{name}: {value:g}")
    record = new_record("host-step", gpu=None, parameters=vars(options), metrics=metrics, runs=[])
    print(record.write(Path(options.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
