"""The arms that start a daemon: from exec to READY against the floor, and the copies of the time after."""

import re
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamer.bench.cold import warm
from streamer.bench.daemon import Daemon, cuda_start_s, interrupt_load, running_daemon
from streamer.bench.link import MIB
from streamer.bench.start_parts import start_parts
from streamer.bench.subject import open_subject
from streamer.bench.warm_arms import Report, Setting

COMPLETION = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}


def ready_arm(setting: Setting, report: Report) -> None:
    """Floor: cuInit and context in a process of their own, plus the bytes at the link's peak of this run.

    The first start fills the cache of compiled kernels and counts only by itself.
    """
    capabilities = setting.device.capabilities
    on_gpu = capabilities.kind == "cuda"
    device = f"cuda:{capabilities.ordinal}" if on_gpu else "host"
    start_s = statistics.median(cuda_start_s(capabilities.ordinal) for _ in range(3)) if on_gpu else 0.0
    runs = []
    with open_subject(setting.model, chunk_nbytes=setting.options.chunk_nbytes) as subject:
        warm(subject.mappings)
        for turn in range(1 + setting.repeats):
            with running_daemon(setting.model, device=device, options=setting.serve_options) as daemon:
                runs.append(_daemon_run(daemon))
            report.runs.append({"arm": "ready" if turn else "ready, first start", **runs[-1]})
        nbytes = subject.nbytes
    report.metrics["ready_file_gb"] = nbytes / 1e9
    report.metrics["cuda_start_s"] = start_s
    report.runs.append({"arm": "start in parts", "seconds": start_parts(setting, on_gpu=on_gpu)})
    report.metrics["ready_first_s"] = runs[0]["ready_s"]
    report.metrics["ready_s"] = statistics.median(run["ready_s"] for run in runs[1:])
    report.metrics["stop_s"] = max(run["stop_s"] for run in runs)
    report.metrics["ready_own_memory_mib"] = max(run["own_memory_mib"] for run in runs)
    if report.link is not None:
        floor = start_s + nbytes / 1e9 / report.link.peak_gbps
        report.metrics["ready_floor_s"] = floor
        report.metrics["ready_ratio"] = report.metrics["ready_s"] / floor


def copies_arm(setting: Setting, report: Report) -> None:
    """Two requests after READY: what the daemon's counter says, and what CUPTI saw the driver carry out."""
    device = f"cuda:{setting.device.capabilities.ordinal}"
    with tempfile.TemporaryDirectory(prefix="ggufd-bench-") as folder:
        counts = Path(folder) / "copies"
        environment = {"CUDA_INJECTION64_PATH": str(setting.copy_trace), "COPY_TRACE_FILE": str(counts)}
        with running_daemon(
            setting.model, device=device, options=setting.serve_options, environment=environment
        ) as daemon:
            at_ready = settled_count(counts)
            answers = [daemon.post("/v1/completions", COMPLETION) for _ in range(2)]
            after = settled_count(counts)
            residency = daemon.get("/readyz")
    report.runs.append(
        {
            "arm": "copies",
            "counted_weight_bytes_load": residency["weight_h2d_bytes_load"],
            "counted_weight_bytes_serve": residency["weight_h2d_bytes_serve"],
            "answers": [answer.get("ggufd", answer) for answer in answers],
            "driver_bytes_until_ready": at_ready,
            "driver_bytes_after_ready": after - at_ready,
        }
    )
    report.metrics["driver_h2d_bytes_until_ready"] = at_ready
    report.metrics["driver_h2d_bytes_after_ready"] = after - at_ready
    report.metrics["weight_h2d_bytes_serve"] = residency["weight_h2d_bytes_serve"]


def interrupt_arm(setting: Setting, report: Report) -> None:
    """SIGTERM while the load runs: how long until the process is gone, and is the device's memory back?"""
    capabilities = setting.device.capabilities
    device = f"cuda:{capabilities.ordinal}" if capabilities.kind == "cuda" else "host"
    free = setting.device.memory_info().free
    for fraction in (0.1, 0.5, 0.8):
        met, seconds = interrupt_load(
            setting.model, device=device, fraction=fraction, options=setting.serve_options
        )
        lost = free - setting.device.memory_info().free
        report.runs.append(
            {"arm": "interrupt", "fraction": round(met, 3), "stop_s": round(seconds, 3), "lost_bytes": lost}
        )
        report.metrics["interrupt_s"] = max(seconds, report.metrics.get("interrupt_s", 0.0))


def settled_count(path: Path) -> int:
    """Bytes in the trace's file once two looks 0.2 s apart agree."""
    before = -1
    while True:
        text = path.read_text().split() if path.exists() else []
        now = int(text[0]) if text else 0
        if now == before:
            return now
        before = now
        time.sleep(0.2)


def _daemon_run(daemon: Daemon) -> dict[str, Any]:
    residency = daemon.get("/readyz")
    metrics = daemon.get("/metrics")
    phases = phase_seconds(metrics if isinstance(metrics, str) else "")
    own = round(daemon.own_memory_nbytes / MIB, 1)
    return {
        "ready_s": round(daemon.ready_s, 3),
        "own_memory_mib": own,
        "phases": {"imports": round(daemon.ready_s - float(residency["elapsed_s"]), 4), **phases},
        "transfer": residency.get("transfer"),
        "weight_h2d_bytes_load": residency.get("weight_h2d_bytes_load"),
        "source": residency.get("source"),
        "stop_s": round(daemon.stop(), 3),
    }


def phase_seconds(metrics: str) -> Mapping[str, float]:
    """`ggufd_load_phase_seconds{phase="upload"} 0.31` lines as a table."""
    found = re.findall(r'^ggufd_load_phase_seconds\{phase="([^"]+)"\} ([-+.\deE]+)$', metrics, re.MULTILINE)
    return {phase: round(float(value), 4) for phase, value in found}
