"""Everything about loading that needs a GPU, in one go: tests, models, the load benchmark; a table last.

    python benchmarks/gpu_session.py --out DIR [--models DIR] [--minutes 9] [--steps tests models load]

Runs from the source tree (which is put on PYTHONPATH). Every step is a process with its log in DIR;
a step that fails or runs late costs the others nothing.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/cuda/test_device.py",
    "tests/cuda/test_load.py",
    "tests/cuda/test_driver_faults.py",
    "tests/contract",
)
MODELS = {  # file -> arguments of make_gguf.py
    "llama8b-bf16.gguf": ("llama8b", "--type", "bf16"),
    "qwen35-27b.gguf": ("qwen35_27b",),
}


@dataclass(frozen=True)
class Step:
    name: str
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True)
class Outcome:
    step: Step
    code: int | None  # None: ran out of time
    seconds: float
    tail: str


def plan_steps(options: argparse.Namespace, copy_trace: Path | None) -> list[Step]:
    python = sys.executable
    small, large = (options.models / name for name in MODELS)
    steps = []
    if "tests" in options.steps:
        test = (
            python,
            "-m",
            "pytest",
            "-m",
            "cuda",
            "-rs",
            "-p",
            "no:cacheprovider",
            "-W",
            "default",
            *TESTS,
        )
        steps.append(Step("tests", test, 150))
    if "models" in options.steps:
        for name, arguments in MODELS.items():
            if name.startswith(options.skip_model or "-"):
                continue
            maker = (
                python,
                str(ROOT / "benchmarks" / "make_gguf.py"),
                arguments[0],
                str(options.models / name),
            )
            steps.append(Step(name, (*maker, *arguments[1:]), 120))
    if "load" in options.steps:
        load = [python, str(ROOT / "benchmarks" / "load.py"), str(small), "--out", str(options.out)]
        load += ["--device", "cuda", "--all", "--repeats", "3"]
        if not (options.skip_model and large.name.startswith(options.skip_model)):
            load += ["--ready-model", str(large)]
        if copy_trace is not None:
            load += ["--copy-trace", str(copy_trace)]
        if options.commit:
            load += ["--commit", options.commit]
        steps.append(Step("load", tuple(load), 480))
    return steps


def build_copy_trace(out: Path) -> Path | None:
    """The copy counter for the driver, or None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = out / "copy_trace.so"
    source = ROOT / "benchmarks" / "copy_trace.c"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-lpthread", "-ldl"]
    return library if subprocess.run(command, check=False).returncode == 0 else None


def cupti_path() -> str | None:
    """libcupti beside the other NVIDIA libraries that Python packages carry, if it is there."""
    for folder in sys.path:
        for found in sorted(Path(folder or ".").glob("nvidia/*/lib/libcupti.so.1[0-9]")):
            return str(found)
    return None


def python_path() -> str:
    """The source tree before what else the caller has put there (packages, on a machine without a venv)."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


def run_step(step: Step, out: Path, deadline_s: float) -> Outcome:
    environment = {**os.environ, "PYTHONPATH": python_path(), "GGUFD_RESULTS": str(out)}
    cupti = cupti_path()
    if cupti is not None:
        environment.setdefault("COPY_TRACE_CUPTI", cupti)
    started_s = time.monotonic()
    limit_s = min(step.limit_s, deadline_s - started_s)
    log = out / f"{step.name}.log"
    code: int | None = None
    if limit_s > 1:
        with log.open("wb") as output:
            process = subprocess.Popen(
                step.command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                code = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
    text = log.read_text(errors="replace") if log.exists() else ""
    return Outcome(step, code, time.monotonic() - started_s, text[-5000:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for records, pictures and logs")
    parser.add_argument("--models", type=Path, default=Path("/tmp"), help="folder for the model files [/tmp]")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument(
        "--steps", nargs="+", choices=("tests", "models", "load"), default=("tests", "models", "load")
    )
    parser.add_argument("--skip-model", default="", help="name of a model not to make, e.g. qwen35-27b")
    parser.add_argument("--commit", default="", help="for the record, where there is no git checkout")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + options.minutes * 60
    outcomes = []
    for step in plan_steps(options, build_copy_trace(options.out)):
        outcomes.append(run_step(step, options.out, deadline_s))
        print(f"== {step.name}: {outcomes[-1].code} after {outcomes[-1].seconds:.1f} s", flush=True)
    for outcome in outcomes:
        if outcome.code != 0 or outcome.step.name in ("tests", "load"):
            print(f"---- {outcome.step.name}\n{outcome.tail}")
    print("step                     code  seconds")
    for outcome in outcomes:
        print(f"{outcome.step.name:<24} {outcome.code!s:>4} {outcome.seconds:8.1f}")
    return 0 if all(outcome.code == 0 for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
