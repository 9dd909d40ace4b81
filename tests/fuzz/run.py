"""Coverage-guided fuzzing with atheris: every target in a process of its own, the time shared between them.

  python tests/fuzz/run.py [--seconds 600] [--target NAME] [--jobs 2]

What is found lies in .fuzz/TARGET/ (crash-*, timeout-*, oom-*); the corpus that was grown stays there for the
next run. Exit 1 when anything was found. A find becomes a test by a copy to tests/fuzz/found/TARGET/.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parent
PLACE = HERE.parents[1] / ".fuzz"
SECONDS_AN_INPUT, MEMORY_MIB = 20, 2048
BOUNDED_ELSEWHERE = {"template"}  # its process has a deadline in the product: endless is no find here


class OutOfTimeError(Exception):
    """An input of a target whose time is bounded elsewhere took too long."""


def fuzz_one(name: str, arguments: list[str]) -> None:
    """In a process of its own: never returns."""
    import atheris

    sys.path.insert(0, str(HERE))
    with atheris.instrument_imports(include=["streamer", "jinja2"]):
        from targets import TARGETS
    run = TARGETS[name]

    def out_of_time(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError

    def bounded(data: bytes) -> None:
        signal.setitimer(signal.ITIMER_REAL, 2.0)
        try:
            run(data)
        except (OutOfTimeError, MemoryError):
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    if name in BOUNDED_ELSEWHERE:
        signal.signal(signal.SIGALRM, out_of_time)
    atheris.Setup(["fuzz", *arguments], bounded if name in BOUNDED_ELSEWHERE else run)
    atheris.Fuzz()


def run_target(name: str, seconds: int) -> tuple[str, int, int, list[Path]]:
    """(name, inputs run, seconds, finds). The seeds are written beside the corpus first."""
    from seeds import seeds

    corpus, made, finds = (PLACE / name / x for x in ("corpus", "seeds", "finds"))
    for folder in (corpus, made, finds):
        folder.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(seeds(name)):
        (made / str(i)).write_bytes(seed)
    arguments = [
        f"-max_total_time={seconds}", f"-timeout={SECONDS_AN_INPUT}", f"-rss_limit_mb={MEMORY_MIB}",
        f"-artifact_prefix={finds}/", "-max_len=16384", "-print_final_stats=1", str(corpus), str(made),
    ]  # fmt: skip
    began, before = time.monotonic(), set(finds.iterdir())
    n_inputs, left = 0, seconds
    while left > 0:
        done = subprocess.run(
            [sys.executable, __file__, "--one", name, "--", *arguments],
            capture_output=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        log = done.stderr.decode(errors="replace")
        (PLACE / name / "log").write_text(log[-200_000:] + done.stdout.decode(errors="replace")[-20_000:])
        n_inputs += int(
            (
                re.findall(r"stat::number_of_executed_units:\s*(\d+)", log)
                or re.findall(r"#(\d+)\s", log)
                or ["0"]
            )[-1]
        )
        if done.returncode == 0 or set(finds.iterdir()) != before:
            break
        left = seconds - int(time.monotonic() - began)  # it ended without a find: go on
        arguments[0] = f"-max_total_time={max(left, 1)}"
    return name, n_inputs, round(time.monotonic() - began), sorted(set(finds.iterdir()) - before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="in all [600]")
    parser.add_argument("--target", action="append", help="only this one (may be repeated)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    own, rest = parser.parse_known_args()
    if own.one:
        fuzz_one(own.one, [x for x in rest if x != "--"])
        return 0
    sys.path.insert(0, str(HERE))
    names = own.target or ["header", "vocabulary", "template", "request", "stream"]
    jobs = min(own.jobs, len(names))
    seconds = max(1, own.seconds * jobs // len(names))
    found = 0
    with ThreadPoolExecutor(jobs) as pool:
        for name, n_inputs, took, finds in pool.map(lambda n: run_target(n, seconds), names):
            print(f"{name}: {n_inputs} inputs in {took} s, {len(finds)} finds", flush=True)
            for path in finds:
                print(f"  {path}")
            found += len(finds)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
