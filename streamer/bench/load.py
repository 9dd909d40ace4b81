"""`ggufd bench load`: how fast a model file becomes resident here, against what link and disk give.

Every ratio is of rates measured in the same run. Writes the record (record.py) after every arm, so that a run
that is cut short leaves what it has, and the timeline picture of one load beside it.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from streamer.bench.arguments import count, number
from streamer.bench.cold_arms import cold_arm, touch_arm
from streamer.bench.ready_arms import copies_arm, interrupt_arm, ready_arm
from streamer.bench.record import RESULTS, new_record, prepare_directory
from streamer.bench.subject import open_subject
from streamer.bench.timeline import timeline_svg
from streamer.bench.warm_arms import (
    Report,
    Setting,
    device_arm,
    kept_arm,
    link_arm,
    ring_arm,
    sweep_arm,
    verify_arm,
    window_arm,
)
from streamer.config import cache_directory, load_config
from streamer.device.base import Device
from streamer.device.open import open_device
from streamer.errors import GgufdError
from streamer.kernels.checksum import checksum_code
from streamer.transfer.base import MIB, PAGE_NBYTES
from streamer.transfer.choose import FILLERS, TransferOptions

Arm = Callable[[Setting, Report], None]

# In order: what later arms compare with comes first; cold arms evict the file, so they come late.
ARMS: Mapping[str, Arm] = {
    "link": link_arm,
    "device": device_arm,
    "ring": ring_arm,
    "window": window_arm,
    "kept": kept_arm,
    "verify": verify_arm,
    "ready": ready_arm,
    "interrupt": interrupt_arm,
    "copies": copies_arm,
    "cold": cold_arm,
    "touch": touch_arm,
    "sweep": sweep_arm,
}
DEFAULT_ARMS = ("link", "ring", "window", "kept", "verify", "ready")
CUDA_ONLY = frozenset({"copies"})

# metric -> (what it is, unit, what it must reach on an H200 with 16 cores, or None)
TABLE: Mapping[str, tuple[str, str, str | None]] = {
    "file_gb": ("weights of the file", "GB", None),
    "link_peak_gbps": ("link, pinned 64 MiB chunks", "GB/s", None),
    "pageable_gbps": ("driver's copy from the mapping", "GB/s", None),
    "submit_us": ("submitting a copy", "us", "< 10"),
    "ring_gbps": ("pinned ring", "GB/s", None),
    "ring_ratio": ("  of the link", "", ">= 0.92"),
    "ring_over_pageable": ("  times the driver's copy", "", ">= 7"),
    "ring_cpu_s_per_gib": ("  CPU seconds a GiB", "s", "< 0.25"),
    "window_gbps": ("registered windows", "GB/s", ">= 19"),
    "window_cpu_s_per_gib": ("  CPU seconds a GiB", "s", "< 0.06"),
    "kept_gbps": ("reload, registration kept", "GB/s", None),
    "kept_ratio": ("  of the link", "", ">= 0.97"),
    "verify_cost": ("proof of every byte, of the load", "", "< 0.02 by default"),
    "checksum_gbps": ("checksum on the device", "GB/s", ">= 500"),
    "allocate_ms": ("256 MiB of device memory", "ms", None),
    "allocate_pool_ms": ("  from the pool, first", "ms", None),
    "reallocate_pool_ms": ("  from the pool's reserve", "ms", None),
    "cold_gbps": ("cold file, ring", "GB/s", None),
    "odirect_gbps": ("cold file, plain O_DIRECT", "GB/s", None),
    "cold_ratio": ("  ring of plain", "", ">= 0.95"),
    "cold_touch_gbps": ("cold file, touch and copy", "GB/s", None),
    "cold_untouched_gbps": ("cold file, driver faults", "GB/s", None),
    "touch_ratio": ("  touched of untouched", "", "> 1"),
    "ready_file_gb": ("weights of the daemon's file", "GB", None),
    "cuda_start_s": ("cuInit and context", "s", None),
    "ready_first_s": ("exec to READY, kernels not compiled", "s", None),
    "ready_s": ("exec to READY", "s", None),
    "ready_floor_s": ("  floor: start + bytes / link", "s", None),
    "ready_ratio": ("  of the floor", "", "<= 1.6"),
    "stop_s": ("SIGTERM to gone", "s", "< 2"),
    "interrupt_s": ("SIGTERM in mid-load to gone", "s", "< 2"),
    "pinned_mib": ("pinned memory", "MiB", "<= 256"),
    "host_rss_mib": ("host memory of its own", "MiB", None),
    "unplanned_mib": ("device memory beyond the plan", "MiB", "0 (2 MiB pages)"),
    "driver_h2d_bytes_until_ready": ("driver's copies until READY", "bytes", None),
    "driver_h2d_bytes_after_ready": ("driver's copies of 2 requests", "bytes", None),
    "weight_h2d_bytes_serve": ("weight bytes after READY", "bytes", "0"),
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    load_config({"device": options.device}, environ={})  # refuses what `serve` refuses, as `serve` does
    prepare_directory(options.out)
    device = _open(options)
    chunk_nbytes = int(options.chunk_mib * MIB)
    try:
        with open_subject(options.model, chunk_nbytes=chunk_nbytes, layers=options.layers) as subject:
            ring = TransferOptions(
                chunk_nbytes=chunk_nbytes,
                workers=options.threads,
                streams=options.streams,
                fill=options.fill,
                ring_nbytes=None if options.ring_mib is None else options.ring_mib * MIB,
            )
            cores = len(os.sched_getaffinity(0))
            other = _pool_opener(device) if device.capabilities.kind == "cuda" else None
            setting = Setting(
                device,
                other,
                subject,
                ring,
                cores,
                options.repeats,
                options.ready_model or options.model,
                tuple(options.serve_option),
                options.copy_trace,
            )
            report = Report(metrics={"file_gb": subject.nbytes / 1e9})
            failed = _run_arms(setting, report, options)
            path = _write(setting, report, options)
    finally:
        device.close()
    print(render(report.metrics))
    print(path)
    return 1 if failed else 0


def _run_arms(setting: Setting, report: Report, options: argparse.Namespace) -> list[str]:
    """Run the chosen arms; one arm's failure is told and costs the others nothing. Returns who failed."""
    failed = []
    for name in options.arms:
        if name in CUDA_ONLY and setting.device.capabilities.kind != "cuda":
            continue
        print(f"arm={name}", file=sys.stderr, flush=True)
        try:
            ARMS[name](setting, report)
        except (GgufdError, OSError, RuntimeError, AssertionError, KeyError, ValueError) as error:
            print(f"arm={name} error={error!r}", file=sys.stderr, flush=True)
            report.runs.append({"arm": name, "error": f"{type(error).__name__}: {error}"})
            failed.append(name)
        _write(setting, report, options)
    return failed


def _write(setting: Setting, report: Report, options: argparse.Namespace) -> Path:
    capabilities = setting.device.capabilities
    record = new_record(
        "load",
        gpu=capabilities.name if capabilities.kind == "cuda" else None,
        parameters={
            "model": Path(options.model).name,
            "ready_model": Path(options.ready_model or options.model).name,
            "weights": len(setting.subject.plan.weights),
            "layers": options.layers,
            "chunk_mib": options.chunk_mib,
            "repeats": options.repeats,
            "arms": list(options.arms),
        },
        metrics=report.metrics,
        runs=report.runs,
        commit=options.commit,
    )
    path = record.write(options.out)
    if report.traced is not None:
        title = f"{Path(options.model).name} on {capabilities.name}: one load, page cache warm"
        path.with_suffix(".svg").write_text(timeline_svg(report.traced.records(), title))
    return path


def _open(options: argparse.Namespace) -> Device:
    code = checksum_code(cache_directory() / "kernels")
    if options.spin:
        from streamer.device.cuda import open_cuda

        return open_cuda(int(options.device.partition(":")[2] or 0), checksum_code=code, spin=True)
    device, note = open_device(
        options.device, checksum_code=code, host_link_bytes_per_s=options.host_link * 1e9
    )
    if note:
        print(note, file=sys.stderr)
    return device


def _pool_opener(device: Device) -> Callable[[], Device]:
    from streamer.device.cuda import open_cuda

    ordinal = device.capabilities.ordinal
    return lambda: open_cuda(ordinal, checksum_code=lambda capability: b"", pool=True)


def render(metrics: Mapping[str, float]) -> str:
    """The table a person reads: what was measured, and what it must reach on an H200."""
    lines = []
    for name, (text, unit, goal) in TABLE.items():
        if name in metrics:
            value = f"{metrics[name]:,.0f}" if unit == "bytes" else f"{metrics[name]:.4g}"
            lines.append(f"{text:<34}{value:>16} {unit:<6}{goal or '':<18}{name}")
    return "\n".join(lines)


def _chunk_mib(text: str) -> float:
    """A chunk is a page at least, and held twice by every thread."""
    return number(text, float, PAGE_NBYTES / MIB, 1024)


def _rate(text: str) -> float:
    return number(text, float, 0, 1e6)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ggufd bench load", description=__doc__)
    parser.add_argument("model", help="a GGUF file, better larger than 4 GB")
    parser.add_argument("--device", default="auto", help="auto, host, cuda or cuda:N [auto]")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder of the record [{RESULTS}]")
    parser.add_argument(
        "--arms", nargs="+", choices=tuple(ARMS), default=None, help="which arms, in this order"
    )
    parser.add_argument(
        "--all", action="store_true", help="every arm; cold arms evict the file from the cache"
    )
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--layers", type=count, default=None, help="load only the first layers")
    parser.add_argument("--chunk-mib", type=_chunk_mib, default=4)
    parser.add_argument(
        "--threads", type=count, default=None, help="fill threads or processes; else by machine"
    )
    parser.add_argument(
        "--streams", type=count, default=None, help="upload streams of the ring; else by device"
    )
    parser.add_argument(
        "--ring-mib", type=count, default=None, help="pinned memory of the ring; else two slots a thread"
    )
    parser.add_argument(
        "--fill", choices=FILLERS, default="auto", help="who fills the ring; auto: processes on many cores"
    )
    parser.add_argument("--spin", action="store_true", help="CUDA: wait for events spinning, not asleep")
    parser.add_argument("--host-link", type=_rate, default=0.0, help="host device: simulated link, GB/s")
    parser.add_argument("--ready-model", default=None, help="another file for the arms that start a daemon")
    parser.add_argument("--serve-option", action="append", default=[], help="passed to `ggufd serve`")
    parser.add_argument("--copy-trace", type=Path, default=None, help="library of benchmarks/copy_trace.c")
    parser.add_argument("--commit", default=None, help="written into the record; else asked of git")
    options = parser.parse_args(argv)
    if options.arms is None:
        options.arms = tuple(ARMS) if options.all else DEFAULT_ARMS
    if options.copy_trace is None:
        options.arms = tuple(name for name in options.arms if name != "copies")
    return options
