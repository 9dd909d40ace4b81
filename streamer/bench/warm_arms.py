"""The arms with the file in the page cache: link, ring, windows, kept registration, verification, a sweep."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from streamer.bench.cold import warm
from streamer.bench.link import MIB, LinkRates, measure_allocation, measure_checksum, measure_link
from streamer.bench.subject import LoadRun, Subject, run_load
from streamer.device.base import Device
from streamer.errors import ConfigError
from streamer.trace import RecordingTracer
from streamer.transfer.base import Transfer
from streamer.transfer.choose import TransferOptions, open_transfer

SWEEP = tuple(product((8, 10, 12, 14), (2, 3), (1, 2, 4)))  # workers, slots a worker, streams


@dataclass
class Report:
    """What the arms have found so far."""

    metrics: dict[str, float] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    link: LinkRates | None = None
    traced: RecordingTracer | None = None  # of one ring load, for the picture

    def add_run(self, arm: str, run: LoadRun, **more: Any) -> None:
        self.runs.append(
            {
                "arm": arm,
                "seconds": round(run.cost.wall_s, 4),
                "gbps": round(run.gbps, 3),
                "cpu_s_per_gib": round(run.cpu_s_per_gib, 4),
                "storage_gb": round(run.storage_nbytes / 1e9, 6),
                "pinned_mib": round(run.device.peak_pinned_bytes / MIB, 1),
                "own_memory_mib": round(run.cost.own_memory_nbytes / MIB, 1),
                **more,
            }
        )


@dataclass(frozen=True)
class Setting:
    """What every arm is given."""

    device: Device
    open_other: Callable[[], Device] | None  # the same GPU with the stream-ordered pool
    subject: Subject
    options: TransferOptions
    cores: int
    repeats: int
    model: str  # path, as the daemon is given it
    serve_options: tuple[str, ...] = ()
    copy_trace: Path | None = None  # library made of benchmarks/copy_trace.c


@contextmanager
def pinned_transfer(setting: Setting, **changes: Any) -> Iterator[Transfer]:
    """A transfer with its slots already pinned, as the daemon has it by the time the header is read."""
    options = replace(setting.options, **changes)
    transfer = open_transfer(setting.device, options, cores=setting.cores)
    try:
        transfer.prepare()
        yield transfer
    finally:
        transfer.close()


def link_arm(setting: Setting, report: Report) -> None:
    nbytes = min(4096 * MIB, setting.subject.mappings[0].nbytes)
    link = report.link = measure_link(setting.device, setting.subject.mappings[0], nbytes=nbytes)
    report.metrics |= {
        "link_peak_gbps": link.peak_gbps,
        "pageable_gbps": link.pageable_gbps,
        "submit_us": link.submit_us,
    }


def device_arm(setting: Setting, report: Report) -> None:
    """Allocation both ways, and the checksum's rate."""
    free = setting.device.memory_info().free
    piece = min(256 * MIB, free // 32)
    report.metrics["checksum_gbps"] = measure_checksum(setting.device, nbytes=min(2048 * MIB, free // 4))
    report.metrics["allocate_ms"] = measure_allocation(setting.device, nbytes=piece, count=8)
    if setting.open_other is not None:
        pool = setting.open_other()
        try:
            report.metrics["allocate_pool_ms"] = measure_allocation(pool, nbytes=piece, count=8)
            report.metrics["reallocate_pool_ms"] = measure_allocation(pool, nbytes=piece, count=8)
        finally:
            pool.close()


def ring_arm(setting: Setting, report: Report) -> None:
    """The default strategy. The first load warms up and is watched; the last one is traced."""
    warm(setting.subject.mappings)
    with pinned_transfer(setting, asked="ring") as transfer:
        first = run_load(setting.device, transfer, setting.subject, watch_memory=True)
        runs = [run_load(setting.device, transfer, setting.subject) for _ in range(setting.repeats)]
        report.traced = RecordingTracer()
        traced = run_load(setting.device, transfer, setting.subject, tracer=report.traced)
        shape = transfer.statistics()
    report.add_run("ring, watched", first, unplanned_mib=round((first.unplanned_nbytes or 0) / MIB, 2))
    for run in runs:
        report.add_run("ring", run, workers=shape.workers, slots=shape.slots)
    report.add_run("ring, traced", traced)
    rate = statistics.median(run.gbps for run in runs)
    report.metrics |= {
        "ring_gbps": rate,
        "ring_best_gbps": max(run.gbps for run in runs),
        "ring_cpu_s_per_gib": statistics.median(run.cpu_s_per_gib for run in runs),
        "ring_workers": shape.workers,
        "ring_slots": shape.slots,
        "pinned_mib": shape.pinned_bytes / MIB,
        "host_rss_mib": max(run.cost.own_memory_nbytes for run in runs) / MIB,
        "unplanned_mib": (first.unplanned_nbytes or 0) / MIB,
    }
    _ratio(report, "ring_ratio", rate)
    if report.link is not None:
        report.metrics["ring_over_pageable"] = rate / report.link.pageable_gbps


def verify_arm(setting: Setting, report: Report) -> None:
    """The same with every byte proved on the device."""
    plain: list[LoadRun] = []
    proved: list[LoadRun] = []
    for _ in range(max(2, setting.repeats)):  # in turns, so that a drift meets both
        for verify, runs in ((False, plain), (True, proved)):
            with pinned_transfer(setting, asked="ring", verify=verify) as transfer:
                runs.append(run_load(setting.device, transfer, setting.subject, verify=verify))
    for run in proved:
        report.add_run("ring, verified", run)
    without_s = statistics.median(run.cost.wall_s for run in plain)
    report.metrics["verify_cost"] = statistics.median(run.cost.wall_s for run in proved) / without_s - 1
    report.metrics["verify_cpu_s_per_gib"] = statistics.median(run.cpu_s_per_gib for run in proved)


def window_arm(setting: Setting, report: Report) -> None:
    """Registered windows: no copy by the CPU."""
    warm(setting.subject.mappings)
    with pinned_transfer(setting, asked="window") as transfer:
        runs = [run_load(setting.device, transfer, setting.subject) for _ in range(setting.repeats)]
    for run in runs:
        report.add_run("window", run)
    report.metrics["window_gbps"] = statistics.median(run.gbps for run in runs)
    report.metrics["window_cpu_s_per_gib"] = statistics.median(run.cpu_s_per_gib for run in runs)


def kept_arm(setting: Setting, report: Report) -> None:
    """One registration that is kept, and the reloads it makes possible."""
    with pinned_transfer(setting, asked="window", keep_registered=True) as transfer:
        first = run_load(setting.device, transfer, setting.subject)
        runs = [run_load(setting.device, transfer, setting.subject) for _ in range(setting.repeats)]
    report.add_run("kept, first load", first)
    for run in runs:
        report.add_run("kept, reload", run)
    rate = statistics.median(run.gbps for run in runs)
    report.metrics["kept_gbps"] = rate
    report.metrics["kept_cpu_s_per_gib"] = statistics.median(run.cpu_s_per_gib for run in runs)
    _ratio(report, "kept_ratio", rate)


def sweep_arm(setting: Setting, report: Report) -> None:
    """Workers, slots and streams of the ring: one warm-up and two loads each."""
    warm(setting.subject.mappings)
    for workers, slots, streams in SWEEP:
        if workers > max(2, setting.cores):
            continue
        ring = workers * slots * setting.options.chunk_nbytes
        try:
            with pinned_transfer(
                setting, asked="ring", fill="threads", workers=workers, ring_nbytes=ring, streams=streams
            ) as transfer:
                runs = [run_load(setting.device, transfer, setting.subject) for _ in range(3)][1:]
        except ConfigError:
            continue
        best = max(runs, key=lambda run: run.gbps)
        report.add_run("sweep", best, workers=workers, slots=slots, streams=streams)


def _ratio(report: Report, name: str, rate: float) -> None:
    if report.link is not None:
        report.metrics[name] = rate / report.link.peak_gbps
