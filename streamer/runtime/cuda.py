"""CUDA's part of a start: kernels compile while weights move; layouts finish behind the upload; binding."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamer.cache.storage import allocate_cache
from streamer.device.base import Buffer, CopyKind, Device, Stream
from streamer.kernels.compile import architecture as compile_target
from streamer.kernels.cuda_build import RopeKey, Survey, build_executor, rope_key
from streamer.kernels.cuda_limits import Limits
from streamer.kernels.cuda_matmul import ResidentWeight
from streamer.kernels.launch import KernelStore
from streamer.kernels.ops import Rope, Weight
from streamer.kernels.planes import WeightLayouter, module_of
from streamer.kernels.rope import inverse_frequencies
from streamer.load.weights import ResidentWeights
from streamer.plan.plan import Layout, Plan, PlannedWeight
from streamer.runtime.cuda_plan import MATMUL, survey_model
from streamer.runtime.planning import PlannedModel

COMPILE_THREADS = 8


@dataclass
class Finisher:
    """load's Finisher: planes or bf16 from the landing area, on the device."""

    layouter: WeightLayouter
    landing_nbytes: int

    def finish(
        self,
        weight: PlannedWeight,
        source: Buffer,
        source_offset: int,
        target: Buffer,
        target_offset: int,
        *,
        stream: Stream,
    ) -> None:
        tensor = weight.tensor
        self.layouter.apply(
            weight.layout,
            tensor.type,
            source.handle + source_offset,
            target.handle + target_offset,
            tensor.n_elements,
            stream=stream,
        )


class CudaPreparation:
    """Made before the upload: compiles in threads; its finisher serves the load; `bind` ends it."""

    def __init__(self, device: Any, model: PlannedModel, cache_directory: Path | None) -> None:
        self._device, self._model = device, model
        plan, capabilities = model.plan, device.capabilities
        pages = -(-plan.n_ctx // model.architecture.cache_layout().page_size)
        self._limits = Limits(model.max_rows, plan.max_sequences, pages)
        self._n_slots = plan.max_sequences + model.n_snapshots
        self._store = KernelStore(
            device, compile_target(capabilities.compute_capability), cache_directory=cache_directory
        )
        self._threads = ThreadPoolExecutor(min(COMPILE_THREADS, os.cpu_count() or 1) + 1, "compile")
        self._layouter = WeightLayouter(device, self._store)
        self._compile_layouts(plan)
        self.finisher = Finisher(self._layouter, landing_nbytes(plan))
        self._surveyed: Future[Survey] = self._threads.submit(self._compile_all)

    def _compile_layouts(self, plan: Plan) -> None:
        """The few kernels the upload waits for."""
        wanted = {module_of(w.tensor.type, w.layout) for w in plan.weights}
        self._store.compile([spec for spec in wanted if spec is not None], self._threads)

    def _compile_all(self) -> Survey:
        found = survey_model(
            self._model.architecture,
            self._limits,
            self._model.kv_type,
            n_slots=self._n_slots,
            multiprocessors=self._device.capabilities.multiprocessors,
        )
        self._store.compile(found.modules, self._threads)
        return found

    def bind(
        self, weights: ResidentWeights, check: Callable[[], None]
    ) -> tuple[Any, list[Callable[[], None]]]:
        """(a warmed executor, closers in order of making)."""
        model, architecture = self._model, self._model.architecture
        found = self._surveyed.result()
        check()
        bound = architecture.bind(resident_weights(weights, model.plan))
        closers: list[Callable[[], None]] = []
        try:
            cache = allocate_cache(
                self._device, architecture.cache_layout(), model.plan.n_pages, self._n_slots, model.kv_type
            )
            closers.append(cache.close)
            tables, frequencies = upload_frequencies(self._device, found.ropes, weights)
            closers.append(tables.close)
            executor = build_executor(
                self._device,
                self._store,
                bound,
                cache,
                found,
                self._limits,
                frequencies,
                n_embd=architecture.n_embd,
                n_valid=architecture.n_valid_ids,
                options=MATMUL,
            )
            closers.append(executor.close)
            check()
            executor.warm()
            check()
        except BaseException:
            while closers:
                closers.pop()()
            raise
        return executor, closers

    def close(self) -> None:
        """The load is over (or failed): stop compiling, free codebooks. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._layouter.close()


def landing_nbytes(plan: Plan) -> int:
    """Room for two of the largest weights that are rearranged: one lands while the other is moved."""
    largest = max((w.tensor.nbytes for w in plan.weights if w.layout is not Layout.FILE), default=0)
    return 2 * (largest + 256)


def resident_weights(weights: ResidentWeights, plan: Plan) -> dict[str, Weight]:
    """Weights as operators take them, by name."""
    return {
        planned.name: Weight(
            planned.name,
            planned.tensor.type,
            planned.tensor.shape,
            ResidentWeight(weights[planned.name].address, planned.layout),
        )
        for planned in plan.weights
    }


def upload_frequencies(
    device: Device, ropes: Sequence[Rope], weights: ResidentWeights
) -> tuple[Buffer, dict[RopeKey, int]]:
    """Rotation tables (float32, computed in float64) in one buffer, and where each lies by `rope_key`."""
    stream = device.create_stream("tables")
    try:
        arrays = [
            np.ascontiguousarray(inverse_frequencies(r, _factors(device, r, weights, stream)), np.float32)
            for r in ropes
        ]
        offsets = np.cumsum([0, *(-(-a.nbytes // 256) * 256 for a in arrays)])
        buffer = device.allocate(max(256, int(offsets[-1])), what="rotation tables")
        for array, offset in zip(arrays, offsets[:-1], strict=True):
            device.upload(
                buffer, int(offset), array.ctypes.data, array.nbytes, stream=stream, kind=CopyKind.TABLES
            )
        stream.sync()
    finally:
        stream.close()
    places = {rope_key(r): buffer.handle + int(o) for r, o in zip(ropes, offsets[:-1], strict=True)}
    return buffer, places


def _factors(
    device: Device, rope: Rope, weights: ResidentWeights, stream: Stream
) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    if rope.factors is None:
        return None
    resident = weights[rope.factors.name]
    values = np.empty(resident.planned.tensor.n_elements, np.float32)
    device.download(resident.buffer, resident.offset, values.ctypes.data, values.nbytes, stream=stream)
    stream.sync()
    return values
