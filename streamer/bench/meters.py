"""What a run costs: wall time, CPU time, peak host memory of its own, least free device memory."""

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30


@dataclass
class Cost:
    """Filled when the measured block ends."""

    wall_s: float = 0.0
    cpu_s: float = 0.0  # user and system, all threads of the process
    own_memory_nbytes: int = (
        0  # peak of anonymous and shared memory: page cache that is mapped does not count
    )
    least_free_nbytes: int = 0  # of device memory; 0 where it was not watched

    def gbps(self, nbytes: int) -> float:
        return nbytes / self.wall_s / 1e9

    def cpu_s_per_gib(self, nbytes: int) -> float:
        return self.cpu_s / (nbytes / GIB)


@contextmanager
def measured(*, free_memory: Callable[[], int] | None = None, interval_s: float = 0.02) -> Iterator[Cost]:
    """Measure the block. A thread samples memory every `interval_s`; it costs some 0.1 % of a core."""
    cost = Cost(own_memory_nbytes=own_memory())
    cost.least_free_nbytes = free_memory() if free_memory is not None else 0
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(interval_s):
            cost.own_memory_nbytes = max(cost.own_memory_nbytes, own_memory())
            if free_memory is not None:
                cost.least_free_nbytes = min(cost.least_free_nbytes, free_memory())

    watcher = threading.Thread(target=sample, name="meter", daemon=True)
    watcher.start()
    cpu_s, started_s = cpu_seconds(), time.perf_counter()
    try:
        yield cost
    finally:
        cost.wall_s = time.perf_counter() - started_s
        cost.cpu_s = cpu_seconds() - cpu_s
        stop.set()
        watcher.join()
        cost.own_memory_nbytes = max(cost.own_memory_nbytes, own_memory())
        if free_memory is not None:
            cost.least_free_nbytes = min(cost.least_free_nbytes, free_memory())


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def own_memory(pid: int | str = "self") -> int:
    """Bytes of a process's anonymous and shared memory in RAM now."""
    total = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            total += int(line.split()[1]) * 1024
    return total
