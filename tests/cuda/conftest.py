"""Devices for the tests that need a driver; a record of what ran on a real one.

Without a driver every test here is skipped with the reason. `test_on_fake_driver.py` runs the same tests over
the real bindings and a libcuda without a GPU (GGUFD_FAKE_CUDA set): such a run writes no record.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from streamer.bench.record import RESULTS, new_record
from streamer.config import cache_directory
from streamer.device.cuda import CudaDevice, open_cuda
from streamer.errors import DeviceNotFoundError
from streamer.kernels.checksum import checksum_code

if "pipeline_support" not in sys.modules:  # tests/support/pipeline.py
    _spec = spec_from_file_location("pipeline_support", Path(__file__).parents[1] / "support" / "pipeline.py")
    assert _spec is not None
    assert _spec.loader is not None
    _module = module_from_spec(_spec)
    sys.modules["pipeline_support"] = _module
    _spec.loader.exec_module(_module)

_outcomes: Counter[str] = Counter()
_durations: dict[str, float] = {}
_gpu: list[str] = []


@pytest.fixture(scope="session")
def open_device() -> Callable[..., CudaDevice]:
    """Opens cuda:0 anew; skips where no driver answers."""

    def opened(**options: bool) -> CudaDevice:
        code = checksum_code(cache_directory() / "kernels")
        try:
            device = open_cuda(0, checksum_code=code, **options)
        except DeviceNotFoundError as error:
            pytest.skip(f"no CUDA device: {error}")
        if device.capabilities.name not in _gpu:
            _gpu.append(device.capabilities.name)
        return device

    return opened


@pytest.fixture
def device(open_device: Callable[..., CudaDevice]) -> Iterator[CudaDevice]:
    """A device that has given everything back when the test ends."""
    opened = open_device()
    yield opened
    opened.close()
    statistics = opened.statistics()
    assert (statistics.allocated_bytes, statistics.pinned_bytes, statistics.live_streams) == (0, 0, 0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "tests/cuda/" in report.nodeid and (report.when == "call" or report.outcome != "passed"):
        _outcomes[report.outcome] += 1
        if report.when == "call":
            _durations[report.nodeid] = round(report.duration, 4)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of xdist has ended: its reports came here, its device did not."""
    _gpu.extend(getattr(node, "workeroutput", {}).get("gpu", []))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write benchmarks/results/gpu-tests-*.json (or below $GGUFD_RESULTS) after a run on a real device."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["gpu"] = _gpu
        return  # who runs the workers hears of all tests, and writes
    if not _gpu or not _durations or "GGUFD_FAKE_CUDA" in os.environ:
        return
    record = new_record(
        "gpu-tests",
        gpu=_gpu[0],
        parameters={"arguments": list(session.config.invocation_params.args)},
        metrics={name: float(_outcomes[name]) for name in ("passed", "failed", "skipped")},
        runs=[{"test": name, "seconds": seconds} for name, seconds in sorted(_durations.items())],
    )
    record.write(Path(os.environ.get("GGUFD_RESULTS", str(session.config.rootpath / RESULTS))))
