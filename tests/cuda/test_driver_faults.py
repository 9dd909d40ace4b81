"""Every driver call of a small load fails once: each time all is freed, and the fault is named."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamer.bench.subject import Subject, open_subject
from streamer.config import cache_directory
from streamer.device.cuda import CudaDevice
from streamer.device.cuda_driver import Driver
from streamer.errors import DeviceError, GgufdError
from streamer.kernels.checksum import checksum_code
from streamer.load.pipeline import load
from streamer.residency.ledger import Ledger
from streamer.transfer.choose import TransferOptions, open_transfer

pytestmark = pytest.mark.cuda
MODEL = Path(__file__).parents[1] / "data" / "tiny-llama.gguf"
CHUNK = 64 << 10
PAIRS = frozenset({"cuMemAlloc", "cuMemAllocAsync", "cuMemHostAlloc"})  # unpacked as (code, value)
GIVING_BACK = frozenset(
    {
        "cuMemFree",
        "cuMemFreeHost",
        "cuMemHostUnregister",
        "cuStreamDestroy",
        "cuEventDestroy",
        "cuModuleUnload",
        "cuDevicePrimaryCtxRelease",
    }
)  # these do their work and then report the failure: what cannot be freed is nobody's leak
UNKNOWN = 999  # CUDA_ERROR_UNKNOWN
DRIVERS_OWN_NBYTES = 32 << 20
NEVER = frozenset({"cuGetErrorName", "cuGetErrorString"})
HARMLESS = frozenset({"cuMemHostAlloc"})  # a smaller ring carries on
NAMES_A_WEIGHT = frozenset({"cuMemcpyHtoDAsync", "cuEventQuery", "cuEventSynchronize", "cuLaunchKernel"})


class FailingDriver:
    """`cuda.bindings.driver` whose nth call answers with an error; counts them all. None fails nothing.

    `quick` are the driver's quick calls under the same count.
    """

    def __init__(self, real: Any, quick: Any) -> None:
        self._real = real
        self.quick = FailingQuick(quick, self)
        self._lock = threading.Lock()
        self.nth: int | None = None
        self.calls = 0
        self.failed: str | None = None

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._real, name)
        if not name.startswith("cu") or name in NEVER or not callable(function):
            return function

        def called(*arguments: Any) -> Any:
            if not self.is_due(name):
                return function(*arguments)
            if name in GIVING_BACK:
                function(*arguments)
            codes = self._real.CUresult
            code = codes.CUDA_ERROR_OUT_OF_MEMORY if name in PAIRS else codes.CUDA_ERROR_UNKNOWN
            return (code, None) if name in PAIRS else (code,)

        return called

    def is_due(self, name: str) -> bool:
        """Count a call; whether it is the one to fail."""
        with self._lock:
            self.calls += 1
            due = self.calls == self.nth
            if due:
                self.failed = name
        return due


class FailingQuick:
    def __init__(self, real: Any, failing: FailingDriver) -> None:
        self._real, self._failing = real, failing

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: int) -> int:
            return UNKNOWN if self._failing.is_due(name) else int(getattr(self._real, name)(*arguments))

        return called


@pytest.fixture
def subject() -> Iterator[Subject]:
    with open_subject(str(MODEL), chunk_nbytes=CHUNK, layers=1) as opened:
        yield opened


def load_and_close(failing: FailingDriver, subject: Subject, strategy: str) -> None:
    """One whole life of a device: open, load with proofs, free, close."""
    code = checksum_code(cache_directory() / "kernels")
    device = CudaDevice(Driver(failing, failing.quick), 0, checksum_code=code)
    try:
        asked, _, fill = strategy.partition(" by ")
        options = TransferOptions(
            asked=asked,
            fill=fill or "threads",
            chunk_nbytes=CHUNK,
            workers=2,
            streams=1,
            ring_nbytes=8 * CHUNK,
        )
        transfer = open_transfer(device, options, cores=2)
        try:
            ledger = Ledger(subject.plan)
            weights = asyncio.run(
                load(subject.plan, subject.directory, device, transfer, ledger, verify=True)
            )
            weights.close()
        finally:
            transfer.close()
    finally:
        try:
            device.close()
        finally:
            statistics = device.statistics()
            held = (statistics.allocated_bytes, statistics.pinned_bytes, statistics.live_streams)
            assert held == (0, 0, 0), failing.failed


def outcome_of(failing: FailingDriver, subject: Subject, strategy: str) -> GgufdError | None:
    try:
        load_and_close(failing, subject, strategy)
    except GgufdError as error:
        return error
    return None


@pytest.mark.parametrize("strategy", ["ring", "ring by processes", "window"])
def test_every_driver_call_may_fail(
    open_device: Callable[..., CudaDevice], subject: Subject, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")  # processes make no driver calls: start none
    holder = open_device()  # keeps the primary context, so that opening again is cheap
    failing = FailingDriver(holder.driver.api, holder.driver.quick)
    load_and_close(failing, subject, strategy)
    total = failing.calls
    free = holder.memory_info().free
    outcomes: dict[str, int] = {}
    for nth in range(1, total + 1):
        failing.nth, failing.calls, failing.failed = nth, 0, None
        error = outcome_of(failing, subject, strategy)
        if error is None:  # threads take turns: this run may have made fewer calls
            assert failing.failed is None or failing.failed in HARMLESS, (nth, failing.failed)
        else:
            assert isinstance(error, DeviceError), (nth, failing.failed, error)
            if failing.failed in NAMES_A_WEIGHT:
                assert any(w.name in str(error) for w in subject.plan.weights), (nth, str(error))
        if failing.failed is not None:
            outcomes[failing.failed] = outcomes.get(failing.failed, 0) + 1
        # the driver may keep a little for itself; a leak would grow with every turn
        assert free - holder.memory_info().free <= DRIVERS_OWN_NBYTES, (nth, failing.failed)
    failing.nth, failing.calls = None, 0
    load_and_close(failing, subject, strategy)
    assert {"cuMemAlloc", "cuMemcpyHtoDAsync", "cuEventRecord", "cuStreamCreate"} <= set(outcomes)
    holder.close()
