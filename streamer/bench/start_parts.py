"""What a daemon's start is made of, each part by itself: what its phases overlap cannot be read from them."""

import subprocess
import sys
import time
from collections.abc import Callable

from streamer.bench.daemon import installed_environment
from streamer.bench.warm_arms import Setting
from streamer.gguf.reader import read_directory
from streamer.text.tokenizer import build_tokenizer
from streamer.transfer.choose import open_transfer

# part -> what a fresh interpreter executes
PROGRAMS = {
    "python": "pass",
    "import_service": "import streamer.service",
    "import_bindings": "from cuda.bindings import driver",
}


def start_parts(setting: Setting, *, on_gpu: bool) -> dict[str, float]:
    """Seconds: interpreter, imports (exec to done), header, tokenizer, pinned memory with its processes."""
    parts = {name: _program_s(code) for name, code in PROGRAMS.items() if on_gpu or name != "import_bindings"}
    directory = read_directory(setting.model)
    parts["header"] = _timed_s(lambda: read_directory(setting.model))
    parts["tokenizer"] = _timed_s(lambda: build_tokenizer(directory.metadata, path=setting.model))
    transfer = open_transfer(setting.device, setting.options, cores=setting.cores)
    try:
        parts["pin"] = _timed_s(transfer.prepare)
    finally:
        transfer.close()
    return {name: round(seconds, 4) for name, seconds in parts.items()}


def _timed_s(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _program_s(code: str) -> float:
    """Seconds from exec until `code` has run; the better of two."""
    found, environment = [], installed_environment()
    for _ in range(2):
        started_s = time.monotonic()  # one clock for all processes
        command = [sys.executable, "-c", f"{code}\nimport time\nprint(time.monotonic())"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found.append(float(answer.stdout) - started_s)
    return min(found)
