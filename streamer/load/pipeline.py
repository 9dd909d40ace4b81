"""The pipeline: carries a plan out. asyncio only supervises: threads move the bytes, one TaskGroup owns them.

Cancelled or failed at any point it stops the workers, drains the streams, unregisters and unpins, frees, in
that order, and leaves the process able to load again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from streamer.device.base import Buffer, Device, Hurrying, Stream
from streamer.errors import DeviceError, FileChangedError, GgufdError, PlanError, ResidencyError
from streamer.gguf.directory import Directory, Shard
from streamer.gguf.mapping import Mapping
from streamer.load.channel import Aborted
from streamer.load.checks import check_norms
from streamer.load.guard import MappingGuard
from streamer.load.halt import Halt
from streamer.load.landing import Finisher, Landing
from streamer.load.stages import Allocator, Settler
from streamer.load.weights import ResidentWeights
from streamer.plan.plan import Layout, Plan
from streamer.residency.ledger import Ledger
from streamer.residency.state import Phase
from streamer.trace import NULL_TRACER, Tracer
from streamer.transfer.base import Run, Source, Transfer

log = logging.getLogger("ggufd.load")

TICK_S = 0.05  # the loop's turn while threads work: signal handlers run then (guard.py)
FEW_THREADS = 3  # beside the workers: allocating, settling, opening and closing


@dataclass
class _Load:
    """One load's parts, in the order they come into being."""

    plan: Plan
    directory: Directory
    device: Device
    transfer: Transfer
    ledger: Ledger
    tracer: Tracer
    verify: bool
    finisher: Finisher | None
    weights: ResidentWeights
    sources: list[Source]
    owns_sources: bool
    halt: Halt = field(default_factory=Halt)
    guard: MappingGuard = field(default_factory=MappingGuard)
    uploads: list[Stream] = field(default_factory=list)
    settling: list[Stream] = field(default_factory=list)
    landing_buffer: Buffer | None = None
    landing: Landing | None = None
    settler: Settler | None = None
    working: int = 0

    # ---- steps, each in a thread

    def open(self, open_source: Callable[[Shard], Source]) -> None:
        """Sources, checks of numbers, streams, landing area."""
        if self.plan.chunk_nbytes > self.transfer.chunk_nbytes:
            raise PlanError(
                f"chunks of {self.plan.chunk_nbytes} bytes are larger than the {self.transfer.name} "
                f"strategy's {self.transfer.chunk_nbytes}"
            )
        if self.owns_sources:
            for shard in self.directory.shards:
                self.sources.append(open_source(shard))
        if self.verify:
            check_norms(self.plan, self.sources, self.paths)
        for i in range(self.transfer.n_streams):
            self.uploads.append(self.device.create_stream(f"upload {i}"))
        self.settling.append(self.device.create_stream("settle"))
        if any(weight.layout is not Layout.FILE for weight in self.plan.weights):
            if self.finisher is None:
                raise PlanError("the plan rearranges weights, but nothing here can")
            nbytes = self.finisher.landing_nbytes
            self.landing_buffer = self.device.allocate(nbytes, what="landing area of layout changes")
            self.landing = Landing(self.landing_buffer, self.uploads)

    def start(self, mapping_is_safe: bool) -> list[Callable[[], None]]:
        """Wire the stages together; returns the bodies of the threads."""
        allocator = Allocator(
            self.plan,
            self.device,
            self.weights,
            self.ledger,
            self.tracer,
            self.landing,
            workers=self.transfer.n_workers,
            batch=self.transfer.batch,
        )
        settler = Settler(
            self.plan,
            self.paths,
            self.device,
            self.weights,
            self.ledger,
            self.tracer,
            self.uploads,
            self.settling[0],
            landing=self.landing,
            finisher=self.finisher,
            verify=self.verify,
        )
        self.settler = settler
        for waker in (allocator.batches.abort, settler.queued.abort):
            self.halt.on_request(waker)
        if self.landing is not None:
            self.halt.on_request(self.landing.abort)
        if isinstance(self.device, Hurrying):
            self.halt.on_request(self.device.hurry)
        run = Run(
            device=self.device,
            sources=self.sources,
            streams=self.uploads,
            feed=allocator.batches,
            hooks=settler,
            stop=self.halt.stop,
            tracer=self.tracer,
            checksum=self.verify,
            mapping_is_safe=mapping_is_safe,
        )
        self.working = self.transfer.n_workers
        workers = [self._worker(i, run, settler) for i in range(self.transfer.n_workers)]
        return [allocator.run, settler.run, *workers]

    def _worker(self, index: int, run: Run, settler: Settler) -> Callable[[], None]:
        def work() -> None:
            self.transfer.work(index, run)
            with settler.lock:
                self.working -= 1
                is_last = not self.working
            if is_last and not self.halt.is_requested:
                if self.verify:
                    self.ledger.enter(Phase.VERIFY)
                settler.queued.close()

        return work

    def finish(self) -> None:
        """After the last thread: is the file still what was planned, is everything there?"""
        for source in self.sources:
            source.check_unchanged()
        assert self.settler is not None
        self.settler.timings.export()
        snapshot = self.ledger.statistics()
        if snapshot.tensors_resident != snapshot.tensors_total:
            missing = snapshot.tensors_total - snapshot.tensors_resident
            raise ResidencyError(f"{self.directory.path}: {missing} weights did not become resident")
        self.close(failed=False)

    def close(self, *, failed: bool) -> None:
        """Drain, let go, free. Every step is tried; the first error is raised, or logged after a failure."""
        steps: list[Callable[[], None]] = [stream.close for stream in (*self.uploads, *self.settling)]
        steps.append(self.transfer.close if failed else self._detach)
        if self.landing_buffer is not None:
            steps.append(self.landing_buffer.close)
        if failed:
            steps.append(self.weights.close)
        steps.append(self.guard.forget)  # the streams are drained: nothing reads the mappings now
        if self.owns_sources:
            steps += [source.close for source in self.sources]
            self.sources = []  # a failure of this very closing is undone without them
        errors = []
        for step in steps:
            try:
                step()
            except GgufdError as error:
                errors.append(error)
                log.warning("event=close_failed error=%s", error)
        if errors and not failed:
            raise errors[0]

    def undo(self, cause: BaseException) -> BaseException:
        """Free everything. Returns the cause, or what the file did if it changed: that explains the rest."""
        try:
            if isinstance(cause, (DeviceError, ResidencyError)):
                for source in self.sources:
                    source.check_unchanged()
        except FileChangedError as changed:
            cause = changed
        self.close(failed=True)
        return cause

    def _detach(self) -> None:
        if self.owns_sources:
            self.transfer.detach()  # the mappings go: nothing may stay registered in them

    @property
    def paths(self) -> list[str]:
        return [shard.path for shard in self.directory.shards]


async def load(
    plan: Plan,
    directory: Directory,
    device: Device,
    transfer: Transfer,
    ledger: Ledger,
    *,
    tracer: Tracer = NULL_TRACER,
    verify: bool = False,
    finisher: Finisher | None = None,
    into: ResidentWeights | None = None,
    sources: Sequence[Source] | None = None,
    open_source: Callable[[Shard], Source] = Mapping,
) -> ResidentWeights:
    """Make every planned weight resident. The ledger, with this plan adopted, tells how far it is.

    `into` is filled segment by segment, for compute that follows the upload. `sources`, one a shard, stay the
    caller's and open (kept registrations refer to them); without them the shards are opened and closed here.
    The transfer stays the caller's: its pinned memory is kept on success, given back on failure. Peak memory:
    the plan's segments, the landing area, the transfer's pinned bytes. GGUFError and FileChangedError blame
    the file, DeviceError the device, ResidencyError a proof that failed; each names the weight.
    """
    job = _Load(
        plan=plan,
        directory=directory,
        device=device,
        transfer=transfer,
        ledger=ledger,
        tracer=tracer,
        verify=verify,
        finisher=finisher,
        weights=into if into is not None else ResidentWeights(plan),
        sources=list(sources) if sources is not None else [],
        owns_sources=sources is None,
    )
    with ThreadPoolExecutor(transfer.n_workers + FEW_THREADS, thread_name_prefix="load") as executor:
        try:
            ledger.enter(Phase.UPLOAD)
            await _in_thread(executor, job.halt, lambda: job.open(open_source))
            await _carry_out(job, executor)
            await _in_thread(executor, job.halt, job.finish)
        except BaseException as error:
            cause = _cause(error, job.halt)
            job.halt.request(cause)
            loop = asyncio.get_running_loop()
            undone = loop.run_in_executor(executor, lambda: job.undo(cause))
            await _settled(undone)
            cause = undone.result()
            ledger.fail(cause)
            ledger.release()
            if cause is error:
                raise
            raise cause from None
        finally:
            job.guard.close()
    return job.weights


async def _carry_out(job: _Load, executor: ThreadPoolExecutor) -> None:
    """Run the threads to their end, all inside one TaskGroup."""
    bodies = job.start(job.guard.watch(job.sources))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_in_thread(executor, job.halt, body)) for body in bodies]
        while not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=TICK_S)


async def _in_thread(executor: ThreadPoolExecutor, halt: Halt, body: Callable[[], None]) -> None:
    """Run `body` in a thread. Cancellation stops the whole load first, and returns only after the thread."""

    def guarded() -> None:
        try:
            body()
        except Aborted:
            return  # a consequence of the halt, whose cause is told by whoever requested it
        except BaseException as error:
            halt.request(error)
            raise

    future = asyncio.get_running_loop().run_in_executor(executor, guarded)
    try:
        await asyncio.shield(future)
    except BaseException:
        halt.request()
        await _settled(future)
        raise


async def _settled(future: asyncio.Future[Any]) -> None:
    """Wait for a thread's end, through any cancellation: it holds memory that others are about to free."""
    while not future.done():
        try:
            await asyncio.wait([future], timeout=TICK_S)
        except asyncio.CancelledError:
            continue  # told already: the caller raises once this is over
    if not future.cancelled():
        future.exception()  # retrieved: whoever must know has it from the halt


def _cause(error: BaseException, halt: Halt) -> BaseException:
    """What to raise: a cancellation from outside, else the first failure of a thread, else the error."""
    if isinstance(error, asyncio.CancelledError):
        return error
    if halt.cause is not None:
        return halt.cause
    if isinstance(error, BaseExceptionGroup):
        return _cause(error.exceptions[0], halt)
    return error
