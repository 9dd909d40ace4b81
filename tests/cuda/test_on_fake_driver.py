"""The CUDA tests through the real bindings over a libcuda that needs no GPU: names, types, returns, leaks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a libcuda.so.1 made of fake/libcuda.c."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: the driver without a GPU cannot be built")
    folder = tmp_path_factory.mktemp("libcuda")
    command = [
        compiler,
        "-O1",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(folder / "libcuda.so.1"),
    ]
    subprocess.run([*command, str(HERE / "fake" / "libcuda.c"), "-lpthread", "-ldl"], check=True)
    return folder


def run_python(fake_driver: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(fake_driver), "GGUFD_FAKE_CUDA": "1", **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )


FILES = ("cuda/test_device.py", "cuda/test_load.py", "cuda/test_driver_faults.py", "contract")


@pytest.mark.parametrize("file", FILES)
def test_cuda_tests_pass_without_a_gpu(fake_driver: Path, file: str) -> None:
    result = run_python(
        fake_driver,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "cuda",
        "-rs",
        f"tests/{file}",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert "no CUDA device" not in result.stdout


def test_load_benchmark_runs_without_a_gpu(fake_driver: Path, tmp_path: Path) -> None:
    model = ROOT / "tests" / "data" / "tiny-llama.gguf"
    command = ["-m", "streamer", "bench", "load", str(model), "--device", "cuda", "--out", str(tmp_path)]
    arms = ["--arms", "link", "device", "ring", "window", "kept", "verify"]
    small = {"FAKE_CUDA_MEMORY": str(64 << 20)}
    result = run_python(fake_driver, *command, "--repeats", "1", "--chunk-mib", "0.0625", *arms, **small)
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads((next(tmp_path.glob("load-fake-gpu-*.json"))).read_text())
    assert record["metrics"]["unplanned_mib"] == 0
    assert record["metrics"]["checksum_gbps"] > 0


def test_no_step_captures_a_graph_that_could_wait(fake_driver: Path, tmp_path: Path) -> None:
    """Kernels are compiled and launched, their work is not done."""
    model = ROOT / "tests" / "data" / "tiny-llama.gguf"
    result = run_python(fake_driver, str(HERE / "fake" / "graphs.py"), str(model), str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("graphs")
