"""Makes tests/support/pipeline.py importable as `pipeline_support`."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if "pipeline_support" not in sys.modules:
    _spec = spec_from_file_location("pipeline_support", Path(__file__).parents[1] / "support" / "pipeline.py")
    assert _spec is not None
    assert _spec.loader is not None
    _module = module_from_spec(_spec)
    sys.modules["pipeline_support"] = _module
    _spec.loader.exec_module(_module)

from collections.abc import Iterator

import pytest

from streamer.config import cache_directory
from streamer.device.base import Device
from streamer.device.cuda import open_cuda
from streamer.device.faulty import FaultyDevice
from streamer.device.host import HostDevice
from streamer.errors import DeviceNotFoundError
from streamer.kernels.checksum import checksum_code


@pytest.fixture(params=["host", "faulty host", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Every backend, poisoned where possible; after the test it must hold nothing."""
    opened: Device
    if request.param == "cuda":
        try:
            opened = open_cuda(0, checksum_code=checksum_code(cache_directory() / "kernels"))
        except DeviceNotFoundError as error:
            pytest.skip(f"no CUDA device: {error}")
    else:
        opened = HostDevice(poison=0xA5)
        if request.param == "faulty host":
            opened = FaultyDevice(opened)  # wrapped, failing nothing: must behave the same
    yield opened
    opened.close()
    statistics = opened.statistics()
    assert (statistics.allocated_bytes, statistics.pinned_bytes, statistics.live_streams) == (0, 0, 0)
