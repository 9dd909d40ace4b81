"""From resident weights to an executor, one function a kind of device. Blocking: runs in a thread."""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamer.cache.storage import PagedCache, allocate_cache
from streamer.device.base import Device
from streamer.kernels.host_executor import HostExecutor
from streamer.kernels.host_weights import HostWeights
from streamer.kernels.ops import Executor
from streamer.load.weights import ResidentWeights
from streamer.runtime.planning import PlannedModel

if TYPE_CHECKING:
    from streamer.runtime.cuda import CudaPreparation


class Stopped(Exception):
    """The start was called off."""


@dataclass
class Start:
    """What binding a model needs, and how it is followed: `advanced` after each step, `stop` calls it off."""

    device: Device
    model: PlannedModel
    weights: ResidentWeights
    threads: int  # of the host's matrix products; 0: chosen by measuring
    advanced: Callable[[], None]
    stop: threading.Event
    preparation: "CudaPreparation | None" = None  # what was begun before the upload

    def check(self) -> None:
        if self.stop.is_set():
            raise Stopped
        self.advanced()


@dataclass
class Bound:
    """An executor with everything it stands on, freed in the reverse order."""

    executor: Executor
    closers: list[Callable[[], None]]

    def close(self) -> None:
        while self.closers:
            self.closers.pop()()


def bind_host(start: Start) -> Bound:
    """Dequantize for BLAS, allocate the cache, warm up."""
    model, closers = start.model, list[Callable[[], None]]()
    try:
        prepared = HostWeights(start.device, [w.tensor for w in model.plan.weights])
        closers.append(prepared.close)
        for planned in model.plan.weights:
            start.check()
            prepared.prepare(planned.name, _file_bytes(start.weights, planned.name))
        cache = _cache(start)
        closers.append(cache.close)
        executor = HostExecutor(
            model.architecture.bind(prepared.weights),
            cache,
            n_valid=model.architecture.n_valid_ids,
            threads=start.threads or None,
        )
        closers.append(executor.close)
        start.check()
        executor.warm()
        start.check()
    except BaseException:
        Bound(None, closers).close()  # type: ignore[arg-type]
        raise
    return Bound(executor, closers)


def _file_bytes(weights: ResidentWeights, name: str) -> memoryview:
    """The resident bytes of a weight, without a copy; valid while the weights are."""
    resident = weights[name]
    nbytes = resident.planned.tensor.nbytes
    return memoryview((ctypes.c_uint8 * nbytes).from_address(resident.address)).cast("B")


def _cache(start: Start) -> PagedCache:
    plan, model = start.model.plan, start.model
    n_slots = plan.max_sequences + model.n_snapshots
    return allocate_cache(
        start.device, model.architecture.cache_layout(), plan.n_pages, n_slots, model.kv_type
    )


def bind_cuda(start: Start) -> Bound:
    """Wait for the compiler, allocate cache and workspace, capture graphs, run each once."""
    assert start.preparation is not None
    executor, closers = start.preparation.bind(start.weights, start.check)
    start.preparation.close()
    return Bound(executor, closers)


BINDERS: dict[str, Callable[[Start], Bound]] = {"host": bind_host, "cuda": bind_cuda}


def prepare_cuda(device: Device, model: PlannedModel, cache_directory: Path | None) -> "CudaPreparation":
    """CUDA's half of the house is imported here: a start on the host does without its import time."""
    from streamer.runtime.cuda import CudaPreparation

    return CudaPreparation(device, model, cache_directory)


PREPARATIONS: dict[str, Callable[[Device, PlannedModel, Path | None], "CudaPreparation"]] = {
    "cuda": prepare_cuda
}
