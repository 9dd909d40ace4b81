"""The record every benchmark writes: one JSON file with machine, parameters, metrics and runs.

`benchmarks/results/NAME-MACHINE-DATE.json`; the newest record of a benchmark is the claim. Metrics are finite
numbers under the names of the benchmark's own table.
"""

import json
import math
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from streamer.errors import ConfigError

RESULTS = Path("benchmarks/results")


@dataclass(frozen=True)
class Machine:
    gpu: str | None  # the driver's name of the device; None on the host
    driver: str | None  # the kernel module's version
    cpu: str
    cores: int  # usable by this process
    memory_gib: float
    kernel: str
    python: str

    @property
    def slug(self) -> str:
        """Short name for files: "h200", "cpu-2"."""
        if self.gpu is None:
            return f"cpu-{self.cores}"
        return re.sub(r"[^a-z0-9]+", "-", self.gpu.lower().removeprefix("nvidia ")).strip("-")


@dataclass(frozen=True)
class Record:
    benchmark: str  # "load" | "decode" | "serve" | "soak" | "gpu-tests"
    date: str  # YYYY-MM-DD
    commit: str
    machine: Machine
    parameters: Mapping[str, Any]
    metrics: Mapping[str, float]
    runs: Sequence[Mapping[str, Any]]

    def write(self, directory: Path = RESULTS) -> Path:
        """Write the record's file and return its path. ValueError when a metric is no finite number."""
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"{name}: {value} is no finite number")
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.benchmark}-{self.machine.slug}-{self.date}.json"
        path.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")
        return path


def prepare_directory(directory: Path) -> None:
    """Make the folder and try it, before the hours whose record it is for. ConfigError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"--out: {directory} cannot be written: {error.strerror}") from None


def new_record(
    benchmark: str,
    *,
    gpu: str | None,
    parameters: Mapping[str, Any],
    metrics: Mapping[str, float],
    runs: Sequence[Mapping[str, Any]] = (),
    commit: str | None = None,
) -> Record:
    """A record of today, on this machine. `gpu`: the device's name, None for the host."""
    rounded = {name: float(f"{value:.5g}") for name, value in metrics.items()}
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    return Record(
        benchmark, today, commit or read_commit(), read_machine(gpu), parameters, rounded, list(runs)
    )


def read_machine(gpu: str | None) -> Machine:
    return Machine(
        gpu=gpu,
        driver=_first_line("/sys/module/nvidia/version") if gpu is not None else None,
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        kernel=platform.release(),
        python=platform.python_version(),
    )


def read_commit() -> str:
    """The checkout's commit, with "+" when files differ from it; "unknown" outside a checkout."""
    root = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    match = re.search(r"model name\s*:\s*(.+)", text)
    return match[1].strip() if match else platform.machine()


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text().split("\n")[0].strip() or None
    except OSError:
        return None
