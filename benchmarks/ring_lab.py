"""A laboratory of ways from the page cache to the GPU, each on the same file in one run, against the link.

    python benchmarks/ring_lab.py MODEL [--layers N] [--sections link fixed crewed threads window kept naive]

The link's peak first, then where the fixed time of a load goes; the ring filled by processes over its sizes;
filled by threads; registered windows by hand and ours; a kept registration; last a plain ring (threads that
touch, copy, queue, wait; nothing else). Wants a file of 8 GB or more in the page cache. Prints a table.
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
from dataclasses import dataclass
from typing import Any

from streamer.bench.cold import warm
from streamer.bench.meters import cpu_seconds
from streamer.bench.subject import Subject, open_subject
from streamer.config import cache_directory
from streamer.device.base import CopyKind
from streamer.device.cuda import CudaDevice, open_cuda
from streamer.kernels.checksum import checksum_code
from streamer.load.pipeline import load
from streamer.load.weights import ResidentWeights
from streamer.residency.ledger import Ledger
from streamer.transfer import crew_child
from streamer.transfer.base import MIB, Transfer
from streamer.transfer.crewed_ring import CHILD_WAYS, CrewedRing
from streamer.transfer.pinned_ring import PinnedRing
from streamer.transfer.registered_window import RegisteredWindow
from streamer.transfer.source_policy import Way

GIB = 1 << 30
#            processes, MiB of ring, chunks a copy, MiB a piece
CREWS = (
    (12, 128, 4, 4),
    (10, 128, 4, 4),
    (14, 128, 4, 4),
    (8, 128, 4, 4),
    (12, 64, 4, 4),
    (12, 192, 4, 4),
    (12, 128, 2, 4),
    (12, 192, 8, 4),
    (12, 128, 4, 2),
    (12, 64, 2, 2),
)
THREADS = ((8, 4), (12, 8), (14, 8))  # threads, MiB of a slot
WINDOWS = ((64, 4, 8), (64, 4, 16), (128, 2, 16), (32, 6, 8))  # MiB, windows, chunks a copy


@dataclass
class Lab:
    """What every experiment is given, and where it tells what it found."""

    device: CudaDevice
    subject: Subject  # chunks of 4 MiB
    large: Subject  # the same in chunks of 8 MiB
    peak: float = 0.0  # GB/s of the link

    def tell(self, what: str, nbytes: int, wall_s: float, cpu_s: float, more: str = "") -> float:
        rate = nbytes / wall_s / 1e9
        share = rate / self.peak if self.peak else 1.0
        print(
            f"{what:<58}{rate:8.2f} GB/s {share:6.3f} {cpu_s / (nbytes / GIB):7.3f} CPU-s/GiB {more}",
            flush=True,
        )
        return rate

    def best_of(self, what: str, nbytes: int, body: Callable[[], object], repeats: int = 2) -> float:
        """Run and tell the fastest. What the body returns is closed outside its time."""
        found = []
        for _ in range(repeats):
            cpu_s, wall_s = cpu_seconds(), time.perf_counter()
            result = body()
            found.append((time.perf_counter() - wall_s, cpu_seconds() - cpu_s))
            if isinstance(result, ResidentWeights):
                result.close()
        return self.tell(what, nbytes, *min(found))


# ---- the link, and a plain ring ----------------------------------------------------------------------------


def link(lab: Lab) -> None:
    """Pinned copies, one after the other."""
    device, total = lab.device, 8 * GIB
    pinned, buffer = device.allocate_pinned(128 * MIB), device.allocate(128 * MIB)
    streams = [device.create_stream(f"link {i}") for i in range(2)]
    try:
        for chunk, count in (
            (64 * MIB, 1),
            (4 * MIB, 1),
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
    _naive(lab, 14, 4 * MIB, read=False)
    _naive(lab, 14, 4 * MIB, read=True)


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


def run(lab: Lab, subject: Subject, transfer: Transfer) -> ResidentWeights:
    plan, ledger = subject.plan, Ledger(subject.plan)
    return asyncio.run(load(plan, subject.directory, lab.device, transfer, ledger, sources=subject.mappings))


@contextlib.contextmanager
def opened(transfer: Any) -> Iterator[Any]:
    try:
        transfer.prepare()
        yield transfer
    finally:
        transfer.close()


def crew(lab: Lab, processes: int, ring: int, batch: int, piece: int, more: str = "") -> None:
    with opened(
        CrewedRing(
            lab.device,
            processes=processes,
            chunk_nbytes=4 * MIB,
            ring_nbytes=ring * MIB,
            batch=batch,
            piece_nbytes=piece * MIB,
        )
    ) as transfer:
        name = f"{processes} processes, {ring} MiB, {batch} chunks a copy, pieces of {piece}{more}"
        lab.best_of(name, lab.subject.nbytes, lambda: run(lab, lab.subject, transfer))


def crewed(lab: Lab) -> None:
    """The ring filled by processes; the last with preadv instead of touch and memcpy."""
    warm(lab.subject.mappings)
    for shape in CREWS:
        crew(lab, *shape)
    CHILD_WAYS[Way.MAP] = crew_child.READ
    crew(lab, *CREWS[0], more=", preadv")
    CHILD_WAYS[Way.MAP] = crew_child.MAP


def threads(lab: Lab) -> None:
    """The ring filled by threads."""
    warm(lab.subject.mappings)
    for workers, slot in THREADS:
        subject = lab.subject if slot == 4 else lab.large
        with opened(PinnedRing(lab.device, chunk_nbytes=slot * MIB, workers=workers)) as transfer:
            name = f"{workers} threads x 2 of {slot} MiB"
            lab.best_of(name, subject.nbytes, lambda t=transfer, s=subject: run(lab, s, t))  # type: ignore[misc]


# ---- windows -----------------------------------------------------------------------------------------------


def window(lab: Lab) -> None:
    _sequence(lab, 128 * MIB)
    for size in (64, 128):
        _two_threads(lab, size * MIB)
    for size, count, chunks in WINDOWS:
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
    for chunks in (8, 16):
        transfer = RegisteredWindow(lab.device, chunk_nbytes=4 * MIB, batch=chunks, keep=True)
        for name, repeats in (("registering", 1), ("reload", 3)):
            lab.best_of(
                f"kept, {name}, batch {chunks}",
                lab.subject.nbytes,
                lambda t=transfer: run(lab, lab.subject, t),  # type: ignore[misc]
                repeats,
            )
        breakdown(lab, transfer, f"kept, batch {chunks}")
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
        load(lab.subject.plan, lab.subject.directory, device, transfer, ledger, sources=lab.subject.mappings)
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
    device = lab.device
    spent = dict.fromkeys(("the crew and its ring", "closing them", "28 slots of 4 MiB", "freeing them"), 0.0)
    transfer = CrewedRing(device, processes=12, chunk_nbytes=4 * MIB, ring_nbytes=128 * MIB)
    with _timed(spent, "the crew and its ring"):
        transfer.prepare()
    for name in ("12 processes, at once", "12 processes, again"):
        breakdown(lab, transfer, name)
    with _timed(spent, "closing them"):
        transfer.close()
    with _timed(spent, "28 slots of 4 MiB"):
        pinned = [device.allocate_pinned(4 * MIB) for _ in range(28)]
    with _timed(spent, "freeing them"):
        for owned in pinned:
            owned.close()
    spent |= dict.fromkeys(("3 streams", "closing the streams", "an empty loop", "14 threads"), 0.0)
    with _timed(spent, "3 streams"):
        streams = [device.create_stream(f"s{i}") for i in range(3)]
    with _timed(spent, "closing the streams"):
        for stream in streams:
            stream.close()
    with _timed(spent, "an empty loop"):
        asyncio.run(asyncio.sleep(0))
    with _timed(spent, "14 threads"):
        _threads(14, lambda i: None)
    print("-- " + ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in spent.items()))


SECTIONS: dict[str, Callable[[Lab], None]] = {
    "link": link,
    "fixed": fixed,
    "crewed": crewed,
    "threads": threads,
    "window": window,
    "kept": kept,
    "naive": naive,
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
