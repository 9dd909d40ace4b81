"""What the load benchmark moves: a model file, its plan with every weight as in the file, one load of it."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from streamer.bench.meters import Cost, measured
from streamer.device.base import Device, DeviceStatistics
from streamer.gguf.directory import Directory
from streamer.gguf.mapping import Mapping
from streamer.gguf.reader import read_directory
from streamer.load.pipeline import load
from streamer.models.registry import describe
from streamer.plan.layouts import host_layout
from streamer.plan.make import make_plan
from streamer.plan.memory import CacheNeeds, PlanOptions
from streamer.plan.plan import Plan
from streamer.residency.ledger import Ledger
from streamer.trace import NULL_TRACER, Tracer
from streamer.transfer.base import Transfer

PAGE_NBYTES = 2 << 20  # the driver gives out device memory in pages: a segment ends inside one
NO_CACHE = CacheNeeds(0, 0, page_size=32, training_context=32)


@dataclass(frozen=True)
class Subject:
    """A model to load again and again. `plan` keeps the file's layout: what is measured is the way there."""

    directory: Directory
    plan: Plan
    mappings: Sequence[Mapping]

    @property
    def nbytes(self) -> int:
        """Bytes a load uploads."""
        return self.plan.nbytes

    @property
    def cached_share(self) -> float:
        """How much of the files is in the page cache."""
        return sum(m.resident_bytes() for m in self.mappings) / sum(m.nbytes for m in self.mappings)


@contextmanager
def open_subject(path: str, *, chunk_nbytes: int, layers: int | None = None) -> Iterator[Subject]:
    """Read the header and plan; `layers` plans the first ones only (a smaller load of the same file)."""
    directory = read_directory(path)
    specs = describe(directory).specs()
    if layers is not None:
        specs = tuple(spec for spec in specs if spec.layer is None or spec.layer < layers)
        names = {spec.name for spec in specs}
        tensors = {name: tensor for name, tensor in directory.tensors.items() if name in names}
        directory = replace(directory, tensors=tensors)
    options = PlanOptions(chunk_nbytes=chunk_nbytes)
    plan = make_plan(directory, specs, layouts=host_layout, cache=NO_CACHE, options=options, free_bytes=None)
    mappings = [Mapping(shard) for shard in directory.shards]
    try:
        yield Subject(directory, plan, mappings)
    finally:
        for mapping in mappings:
            mapping.close()


@dataclass(frozen=True)
class LoadRun:
    """One measured load."""

    cost: Cost
    nbytes: int
    page_cache_nbytes: int
    storage_nbytes: int
    device: DeviceStatistics  # while the weights were still there
    unplanned_nbytes: int | None  # device memory taken beyond the segments' pages, at its most; if watched

    @property
    def gbps(self) -> float:
        return self.cost.gbps(self.nbytes)

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cost.cpu_s_per_gib(self.nbytes)


def run_load(
    device: Device,
    transfer: Transfer,
    subject: Subject,
    *,
    verify: bool = False,
    tracer: Tracer = NULL_TRACER,
    watch_memory: bool = False,
) -> LoadRun:
    """Load the subject once and free it again. The transfer keeps its pinned memory.

    `watch_memory` asks the driver for free memory fifty times a second, which may cost some of the rate.
    """
    ledger = Ledger(subject.plan)
    free_before = device.memory_info().free
    with measured(free_memory=(lambda: device.memory_info().free) if watch_memory else None) as cost:
        weights = asyncio.run(
            load(
                subject.plan,
                subject.directory,
                device,
                transfer,
                ledger,
                tracer=tracer,
                verify=verify,
                sources=subject.mappings,
            )
        )
    statistics = device.statistics()
    planned = sum(-(-segment.nbytes // PAGE_NBYTES) * PAGE_NBYTES for segment in subject.plan.segments)
    weights.close()
    residency = ledger.statistics()
    return LoadRun(
        cost=cost,
        nbytes=subject.nbytes,
        page_cache_nbytes=residency.page_cache_bytes,
        storage_nbytes=residency.storage_bytes,
        device=statistics,
        # small segments share pages: then less is taken than counted
        unplanned_nbytes=max(0, free_before - cost.least_free_nbytes - planned) if watch_memory else None,
    )
