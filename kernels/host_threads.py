"""Threads for the host's large products: our own, because BLAS's lose on a busy machine.

BLAS's threads wait for each other by spinning, 120 times a token: beside two other processes on two cores
decode fell from 37 to 2 tokens/s. So BLAS keeps to one thread, and products of over a millisecond are cut
into pieces that whoever is free takes: a helper that gets no core takes none, and nobody waits for it.
"""

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import threadpoolctl

from streamer.kernels.matmul import BLOCK, blocked_matmul
from streamer.kernels.ops import Float32s

WORTH_SPLITTING_S = 1.0e-3  # waking a helper costs some 30 us
PIECE_S = 0.5e-3
_PROBE_BLOCKS, _PROBE_INPUTS = 384, 1024  # 48 MiB: beyond the caches

Piece = Callable[[int], None]


class Team:
    """The calling thread and `size - 1` helpers. `run` may be called by one thread at a time."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._helpers = [
            threading.Thread(target=self._help, name=f"host-{i}", daemon=True) for i in range(1, self.size)
        ]
        for helper in self._helpers:
            helper.start()

    def run(self, n_pieces: int, compute: Piece) -> None:
        """compute(0) .. compute(n_pieces - 1), each once, on any thread; returns when all are done.

        The first exception of a piece is raised here, after all pieces have ended.
        """
        job = _Job(n_pieces, compute)
        for _ in self._helpers[: n_pieces - 1]:
            self._jobs.put(job)
        job.work()
        job.wait()

    def _help(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.work()

    def close(self) -> None:
        """End the helpers. Idempotent."""
        for _ in self._helpers:
            self._jobs.put(None)
        for helper in self._helpers:
            helper.join()
        self._helpers = []


class _Job:
    def __init__(self, n_pieces: int, compute: Piece) -> None:
        self._n, self._compute = n_pieces, compute
        self._left = (
            itertools.count()
        )  # next() is one step under the interpreter lock: each index goes out once
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work(self) -> None:
        """Take pieces until none is left. A helper that comes late finds none."""
        while (index := next(self._left)) < self._n:
            try:
                self._compute(index)
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                self._ended.put(error)
            else:
                self._ended.put(None)

    def wait(self) -> None:
        errors = [error for error in (self._ended.get() for _ in range(self._n)) if error is not None]
        if errors:
            raise errors[0]


class HostProducts:
    """Products over blocked weights, cut into pieces for the team where that pays."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._seconds_per_byte = 1 / 15e9  # of weights, by a few rows; `measure` replaces both guesses
        self._seconds_per_product = 1 / 40e9  # multiply-add, by many rows

    def measure(self) -> None:
        """What a core gives (some 20 ms)."""
        blocks = np.ones((_PROBE_BLOCKS, _PROBE_INPUTS, BLOCK), np.float32)
        few, many = (self._seconds(blocks, n) for n in (1, 64))
        self._seconds_per_byte = few / blocks.nbytes
        self._seconds_per_product = many / (64 * blocks.size)

    @staticmethod
    def _seconds(blocks: Float32s, n_rows: int) -> float:
        """The best of three, in this thread's own time: on a busy machine less, not more, must be split."""
        x = np.ones((n_rows, blocks.shape[1]), np.float32)
        out = np.empty((n_rows, len(blocks) * BLOCK), np.float32)
        times = []
        for _ in range(3):
            begin = time.thread_time()
            blocked_matmul(x, blocks, out)
            times.append(time.thread_time() - begin)
        return min(times)

    def multiply(self, x: Float32s, blocks: Float32s) -> Float32s:
        """(n_rows, n_blocks * 32)."""
        n_rows, n_blocks = len(x), len(blocks)
        out = np.empty((n_rows, n_blocks * BLOCK), np.float32)
        expected = max(
            blocks.nbytes * self._seconds_per_byte, n_rows * blocks.size * self._seconds_per_product
        )
        if self.team.size == 1 or expected < WORTH_SPLITTING_S:
            blocked_matmul(x, blocks, out)
            return out
        n_pieces = min(n_blocks, max(self.team.size, int(expected / PIECE_S)))
        cuts = [n_blocks * i // n_pieces for i in range(n_pieces + 1)]
        self.team.run(n_pieces, lambda i: blocked_matmul(x, blocks, out, cuts[i], cuts[i + 1]))
        return out


class SingleThreadedBlas:
    """Sets BLAS to one thread for the whole process; `restore` puts the old counts back."""

    def __init__(self) -> None:
        controllers = threadpoolctl.ThreadpoolController().lib_controllers
        self._before = [(c, c.num_threads) for c in controllers if c.user_api == "blas"]
        for controller, _ in self._before:
            controller.set_num_threads(1)

    def restore(self) -> None:
        for controller, count in self._before:
            controller.set_num_threads(count)


def allowed_cpus(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPUs this process may run on: its affinity, and its control group's quota rounded up."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup.read_text().split()
        if quota != "max":
            count = min(count, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        return count  # no quota that we can read
    return max(count, 1)
