"""What a run costs: wall time, CPU time, peak host memory of its own, least free device memory."""

import contextlib
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
    cpu_s: float = 0.0  # user and system, all threads of the process and its children
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
    """User and system time so far of this process and its children, living and gone."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return own + sum(_process_seconds(child) for child in children())


def children(pid: int | str = "self") -> list[int]:
    """Living children of a process; none where the kernel does not tell."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _process_seconds(pid: int) -> float:
    """CPU time of another process by its clock (as clock_getcpuclockid numbers it)."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0  # gone meanwhile


def own_memory(pid: int | str = "self") -> int:
    """Bytes in RAM now: a process's anonymous and shared memory, and its children's anonymous memory."""
    total = _resident(pid, ("RssAnon:", "RssShmem:"))
    for child in children(pid):
        with contextlib.suppress(OSError):
            total += _resident(child, ("RssAnon:",))  # what they share with it is counted
    return total


def _resident(pid: int | str, fields: tuple[str, ...]) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(fields))
