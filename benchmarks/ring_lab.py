"""A laboratory of ways from the page cache to the GPU, each on the same file in one run, against the link.

    python benchmarks/ring_lab.py MODEL [--layers N] [--sections link naive ours batch window kept fixed]

Yardsticks first: the link's peak and a plain ring (threads that touch, copy, queue, wait; nothing else).
Then ours over workers, streams, slot sizes and batches; registered windows by hand and ours; where the fixed
time of a load goes. Wants a file of 8 GB or more in the page cache; a minute at most. Prints a table.
"""

import argparse
import asyncio
import contextlib
import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamer.bench.cold import warm
from streamer.bench.meters import cpu_seconds
from streamer.bench.subject import Subject, open_subject
from streamer.config import cache_directory
from streamer.device.base import CopyKind
from streamer.device.cuda import CudaDevice, open_cuda
from streamer.kernels.checksum import checksum_code
from streamer.load.pipeline import load
from streamer.residency.ledger import Ledger
from streamer.transfer.base import MIB, Transfer
from streamer.transfer.pinned_ring import PinnedRing
from streamer.transfer.registered_window import RegisteredWindow

GIB = 1 << 30
WORKERS = (4, 6, 8, 10, 12, 14)


@dataclass
class Lab:
    """What every experiment is given, and where it tells what it found."""

    device: CudaDevice
    subject: Subject  # chunks of 4 MiB
    large: Subject  # the same in chunks of 8 MiB
    peak: float = 0.0  # GB/s of the link
    best: dict[str, int] = field(default_factory=dict)

    def tell(self, what: str, nbytes: int, wall_s: float, cpu_s: float, more: str = "") -> float:
        rate = nbytes / wall_s / 1e9
        share = rate / self.peak if self.peak else 1.0
        print(
            f"{what:<46}{rate:8.2f} GB/s {share:6.3f} {cpu_s / (nbytes / GIB):7.3f} CPU-s/GiB {more}",
            flush=True,
        )
        return rate

    def best_of(self, what: str, nbytes: int, body: Callable[[], object], repeats: int = 2) -> float:
        """Run and tell the fastest."""
        found = []
        for _ in range(repeats):
            cpu_s, wall_s = cpu_seconds(), time.perf_counter()
            body()
            found.append((time.perf_counter() - wall_s, cpu_seconds() - cpu_s))
        return self.tell(what, nbytes, *min(found))


# ---- the link, and a plain ring ----------------------------------------------------------------------------


def link(lab: Lab) -> None:
    """Pinned copies, one after the other."""
    device, total = lab.device, 4 * GIB
    pinned, buffer = device.allocate_pinned(128 * MIB), device.allocate(128 * MIB)
    streams = [device.create_stream(f"link {i}") for i in range(2)]
    try:
        for chunk, count in (
            (64 * MIB, 1),
            (64 * MIB, 1),
            (4 * MIB, 1),
            (4 * MIB, 2),
            (8 * MIB, 1),
            (16 * MIB, 1),
        ):
            used = streams[:count]

            def copy(chunk: int = chunk, used: Sequence[Any] = used) -> None:
                for turn in range(total // chunk):
                    at = turn * chunk % (128 * MIB)
                    device.upload(
                        buffer,
                        at,
                        pinned.address + at,
                        chunk,
                        stream=used[turn % len(used)],
                        kind=CopyKind.TABLES,
                    )
                    if turn % 256 == 255:
                        used[0].sync()
                for stream in used:
                    stream.sync()

            lab.peak = max(lab.peak, lab.best_of(f"link, {chunk // MIB} MiB, {count} streams", total, copy))
    finally:
        for owned in (*streams, buffer, pinned):
            owned.close()


def naive(lab: Lab) -> None:
    """The yardstick: threads own two slots each and go over the file in strides."""
    for workers in (8, 12, 14):
        _naive(lab, workers, 4 * MIB, read=False)
    _naive(lab, 8, 8 * MIB, read=False)
    for workers in (8, 12, 14):
        _naive(lab, workers, 4 * MIB, read=True)


def _naive(lab: Lab, workers: int, slot: int, *, read: bool) -> None:
    device, mapping = lab.device, lab.subject.mappings[0]
    api = device.driver.api
    count = min(8 * GIB, mapping.nbytes) // slot
    pinned, buffer = device.allocate_pinned(2 * workers * slot), device.allocate(2 * workers * slot)
    streams = [device.create_stream(f"naive {i}") for i in range(2)]

    def work(worker: int) -> None:
        device.activate()
        stream = streams[worker % 2].raw
        events = [api.cuEventCreate(2 | 1)[1] for _ in range(2)]
        used = [False, False]
        for turn, index in enumerate(range(worker, count, workers)):
            side = turn % 2
            at = (2 * worker + side) * slot
            if used[side]:
                api.cuEventSynchronize(events[side])
            if read:
                mapping.read_into(pinned.address + at, index * slot, slot)
            else:
                mapping.touch(index * slot, slot)
                ctypes.memmove(pinned.address + at, mapping.address + index * slot, slot)
            api.cuMemcpyHtoDAsync(buffer.handle + at, pinned.address + at, slot, stream)
            api.cuEventRecord(events[side], stream)
            used[side] = True
        for event in events:
            api.cuEventSynchronize(event)
            api.cuEventDestroy(event)

    try:
        way = "preadv" if read else "map"
        lab.best_of(
            f"plain ring, {way}, {workers} workers, {slot // MIB} MiB",
            count * slot,
            lambda: _threads(workers, work),
        )
    finally:
        for owned in (*streams, buffer, pinned):
            owned.close()


def _threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- our loads ---------------------------------------------------------------------------------------------


def run(
    lab: Lab, subject: Subject, transfer: Transfer, device: Any = None, ledger: Ledger | None = None
) -> None:
    weights = asyncio.run(
        load(
            subject.plan,
            subject.directory,
            device or lab.device,
            transfer,
            ledger or Ledger(subject.plan),
            sources=subject.mappings,
        )
    )
    weights.close()


@contextlib.contextmanager
def opened(transfer: Any) -> Iterator[Any]:
    try:
        transfer.prepare()
        yield transfer
    finally:
        transfer.close()


def ring(lab: Lab, workers: int, streams: int, slot: int, slots: int = 2, batch: int = 4) -> float:
    subject = lab.subject if slot == 4 else lab.large
    options = {"workers": workers, "streams": streams, "slots_per_worker": slots, "batch": batch}
    with opened(PinnedRing(lab.device, chunk_nbytes=slot * MIB, **options)) as transfer:
        name = f"ours, {workers} workers x {slots} of {slot} MiB, {streams} str., batch {batch}"
        return lab.best_of(name, subject.nbytes, lambda: run(lab, subject, transfer))


def ours(lab: Lab) -> None:
    warm(lab.subject.mappings)
    rates = {}
    for slot, streams in ((4, 1), (4, 2), (8, 1)):
        for workers in WORKERS:
            if workers * slot * 2 <= 192:
                rates[workers, streams, slot] = ring(lab, workers, streams, slot)
    lab.best = dict(zip(("workers", "streams", "slot"), max(rates, key=lambda k: rates[k]), strict=True))


def batch(lab: Lab) -> None:
    """Around the best of `ours`."""
    best = lab.best or {"workers": 12, "streams": 1, "slot": 4}
    for chunks in (1, 2, 8, 16):
        ring(lab, **best, batch=chunks)
    ring(lab, **best, slots=3)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    print("with a switch interval of 0.1 ms:")
    ring(lab, **best)
    sys.setswitchinterval(before)


# ---- windows -----------------------------------------------------------------------------------------------


def window(lab: Lab) -> None:
    for size in (16, 64, 128, 256):
        _sequence(lab, size * MIB)
    for size in (32, 64, 128):
        _two_threads(lab, size * MIB)
    for size, count, chunks in (
        (64, 1, 8),
        (64, 2, 8),
        (64, 3, 8),
        (128, 1, 16),
        (128, 2, 16),
        (32, 4, 8),
        (256, 1, 16),
    ):
        options = {"window_nbytes": size * MIB, "max_windows": count, "batch": chunks}
        transfer = RegisteredWindow(lab.device, chunk_nbytes=4 * MIB, **options)
        name = f"our windows, {count} of {size} MiB, batch {chunks}"
        lab.best_of(name, lab.subject.nbytes, lambda t=transfer: run(lab, lab.subject, t))  # type: ignore[misc]
        transfer.close()


def _sequence(lab: Lab, size: int) -> None:
    """One thread, one window at a time, each step by itself."""
    device, mapping = lab.device, lab.subject.mappings[0]
    count = min(4 * GIB, mapping.nbytes) // size
    buffer, stream = device.allocate(size), device.create_stream("window")
    spent = dict.fromkeys(("touch", "register", "copy", "unregister"), 0.0)
    cpu_s, started_s = cpu_seconds(), time.perf_counter()
    for index in range(count):
        address = mapping.address + index * size
        with _timed(spent, "touch"):
            mapping.touch(index * size, size)
        with _timed(spent, "register"):
            registration = device.register(address, size)
        with _timed(spent, "copy"):
            device.upload(buffer, 0, address, size, stream=stream, kind=CopyKind.TABLES)
            stream.record().sync()
        with _timed(spent, "unregister"):
            registration.close()
    wall_s = time.perf_counter() - started_s
    steps = " ".join(
        f"{step} {count * size / max(seconds, 1e-9) / 1e9:.0f}" for step, seconds in spent.items()
    )
    lab.tell(f"windows in sequence, {size // MIB} MiB", count * size, wall_s, cpu_seconds() - cpu_s, steps)
    stream.close()
    buffer.close()


@contextlib.contextmanager
def _timed(spent: dict[str, float], step: str) -> Iterator[None]:
    started_s = time.perf_counter()
    yield
    spent[step] += time.perf_counter() - started_s


def _two_threads(lab: Lab, size: int) -> None:
    """One thread registers ahead and queues copies, another waits for them and unregisters; three windows."""
    device, mapping = lab.device, lab.subject.mappings[0]
    count = min(4 * GIB, mapping.nbytes) // size
    buffer, stream = device.allocate(size), device.create_stream("window")
    done: queue.Queue[Any] = queue.Queue()
    free = threading.Semaphore(3)

    def give_back(_: int) -> None:
        while (item := done.get()) is not None:
            item[1].sync()
            item[0].close()
            free.release()

    def go() -> None:
        closer = threading.Thread(target=give_back, args=(0,))
        closer.start()
        for index in range(count):
            free.acquire()
            mapping.touch(index * size, size)
            registration = device.register(mapping.address + index * size, size)
            device.upload(
                buffer, 0, mapping.address + index * size, size, stream=stream, kind=CopyKind.TABLES
            )
            done.put((registration, stream.record()))
        done.put(None)
        closer.join()

    lab.best_of(f"windows by two threads, {size // MIB} MiB", count * size, go)
    stream.close()
    buffer.close()


def kept(lab: Lab) -> None:
    for chunks in (1, 4, 8, 16):
        transfer = RegisteredWindow(lab.device, chunk_nbytes=4 * MIB, batch=chunks, keep=True)
        name = f"kept, batch {chunks}"
        lab.best_of(
            f"{name}, registering", lab.subject.nbytes, lambda t=transfer: run(lab, lab.subject, t), 1
        )  # type: ignore[misc]
        lab.best_of(name, lab.subject.nbytes, lambda t=transfer: run(lab, lab.subject, t), 3)  # type: ignore[misc]
        if chunks == 8:
            breakdown(lab, transfer, "kept")
        transfer.close()


# ---- where the rest of the time goes -----------------------------------------------------------------------


class Watched:
    """A device that notes when copies were queued and what allocating and streams cost."""

    def __init__(self, inner: CudaDevice) -> None:
        self._inner = inner
        self.first_s = self.last_s = 0.0
        self.spent = dict.fromkeys(("allocate", "create_stream", "upload"), 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def allocate(self, nbytes: int, *, what: str = "") -> Any:
        with _timed(self.spent, "allocate"):
            return self._inner.allocate(nbytes, what=what)

    def create_stream(self, name: str) -> Any:
        with _timed(self.spent, "create_stream"):
            return self._inner.create_stream(name)

    def upload(self, *arguments: Any, **named: Any) -> None:
        started_s = time.perf_counter()
        self._inner.upload(*arguments, **named)
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or started_s
        self.spent["upload"] += self.last_s - started_s


class Noting(Ledger):
    done_s = 0.0

    def completed(self, weight: int, nbytes: int) -> None:
        super().completed(weight, nbytes)
        self.done_s = time.perf_counter()


def breakdown(lab: Lab, transfer: Transfer, name: str) -> None:
    device, ledger = Watched(lab.device), Noting(lab.subject.plan)
    started_s = time.perf_counter()
    weights = asyncio.run(
        load(lab.subject.plan, lab.subject.directory, device, transfer, ledger, sources=lab.subject.mappings)  # type: ignore[arg-type]
    )
    ended_s = time.perf_counter()
    weights.close()
    freed_s = time.perf_counter()
    marks = {
        "until the first copy": device.first_s - started_s,
        "first to last copy queued": device.last_s - device.first_s,
        "until the last is done": ledger.done_s - device.last_s,
        "until load() returns": ended_s - ledger.done_s,
        "freeing the weights": freed_s - ended_s,
        **{f"  within: {step}": seconds for step, seconds in device.spent.items()},
    }
    print(
        f"-- one load, {name}: " + ", ".join(f"{mark} {s * 1e3:.2f} ms" for mark, s in marks.items()),
        flush=True,
    )


def fixed(lab: Lab) -> None:
    best = lab.best or {"workers": 12, "streams": 1, "slot": 4}
    with opened(
        PinnedRing(lab.device, workers=best["workers"], chunk_nbytes=4 * MIB, streams=best["streams"])
    ) as it:
        breakdown(lab, it, "ring")
        breakdown(lab, it, "ring again")
    device = lab.device
    spent: dict[str, float] = {}
    for count, size in ((1, 112), (14, 8), (28, 4)):
        name = f"pinning {count} x {size} MiB"
        spent[name] = spent["freeing " + name] = 0.0
        with _timed(spent, name):
            pinned = [device.allocate_pinned(size * MIB) for _ in range(count)]
        with _timed(spent, "freeing " + name):
            for owned in pinned:
                owned.close()
    spent |= dict.fromkeys(("streams", "closing them", "an empty loop", "14 threads"), 0.0)
    with _timed(spent, "streams"):
        streams = [device.create_stream(f"s{i}") for i in range(3)]
    with _timed(spent, "closing them"):
        for stream in streams:
            stream.close()
    with _timed(spent, "an empty loop"):
        asyncio.run(asyncio.sleep(0))
    with _timed(spent, "14 threads"):
        _threads(14, lambda i: None)
    print("-- " + ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in spent.items()))


SECTIONS: dict[str, Callable[[Lab], None]] = {
    "link": link,
    "naive": naive,
    "ours": ours,
    "batch": batch,
    "window": window,
    "kept": kept,
    "fixed": fixed,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--layers", type=int, default=None, help="load only the first layers")
    parser.add_argument("--sections", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS))
    options = parser.parse_args()
    device = open_cuda(0, checksum_code=checksum_code(cache_directory() / "kernels"))
    try:
        with (
            open_subject(options.model, chunk_nbytes=4 * MIB, layers=options.layers) as subject,
            open_subject(options.model, chunk_nbytes=8 * MIB, layers=options.layers) as large,
        ):
            lab = Lab(device, subject, large)
            print(f"{subject.nbytes / 1e9:.2f} GB, {subject.cached_share:.0%} in the page cache")
            for section in options.sections:
                started_s = time.perf_counter()
                SECTIONS[section](lab)
                print(f"({section}: {time.perf_counter() - started_s:.1f} s)", flush=True)
    finally:
        device.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
