"""How many threads BLAS uses: chosen by measuring what this machine gives now, never more than it allows."""

import os
import time
from pathlib import Path

import numpy as np
import threadpoolctl

SAMPLE_NBYTES = 32 << 20  # a matrix beyond the caches: decode is bound by reading weights
ROUNDS = 5
WORTH = 0.9  # a larger count must be that much faster: idle cores are of use to others


class BlasThreads:
    """`asked` None: measure in `choose`. The setting is the process's; `restore` puts the old one back."""

    def __init__(self, asked: int | None = None) -> None:
        self._asked = asked
        self._controller = threadpoolctl.ThreadpoolController()
        self._before = self._counts()
        self.count = self._before[0] if self._before else 1

    def choose(self) -> int:
        self.set(self._asked if self._asked is not None else fastest(self, allowed_cpus()))
        return self.count

    def set(self, count: int) -> None:
        for library in self._libraries():
            library.set_num_threads(count)
        self.count = count

    def restore(self) -> None:
        for library, count in zip(self._libraries(), self._before, strict=True):
            library.set_num_threads(count)

    def _libraries(self) -> list[threadpoolctl.LibController]:
        return [x for x in self._controller.lib_controllers if x.user_api == "blas"]

    def _counts(self) -> list[int]:
        return [library.num_threads for library in self._libraries()]


def fastest(threads: BlasThreads, most: int) -> int:
    """The smallest thread count that is nearly as fast as the best, for a matrix-vector product from memory."""
    matrix = np.ones((SAMPLE_NBYTES // 4096, 1024), np.float32)
    vector = np.ones((1, 1024), np.float32)
    chosen, best = 1, float("inf")
    for count in candidates(most):
        threads.set(count)
        seconds = _seconds(matrix, vector)
        if seconds < best * WORTH:
            chosen, best = count, seconds
    return chosen


def candidates(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    counts = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*counts, most]


def _seconds(matrix: np.ndarray, vector: np.ndarray) -> float:
    """The best of several rounds: others' work only ever adds."""
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        np.matmul(vector, matrix.T)
        best = min(best, time.perf_counter() - begin)
    return best


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
