"""From a path to a running engine: told by a ledger, cancellable at every point, undone on failure."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from streamer.cache.pages import PagePool
from streamer.cache.snapshots import SnapshotTable
from streamer.device.base import CopyKind, CopyPhase, Device
from streamer.engine.engine import Engine
from streamer.engine.steps import EngineOptions
from streamer.gguf.directory import Directory
from streamer.load.pipeline import load
from streamer.load.weights import ResidentWeights
from streamer.models.registry import Architecture
from streamer.residency.ledger import Ledger
from streamer.residency.state import Phase
from streamer.runtime.executors import BINDERS, PREPARATIONS, Bound, Start
from streamer.runtime.ground import Ground, OnDirectory, break_ground, device_name, read_header
from streamer.runtime.options import StartOptions
from streamer.runtime.planning import CHUNK_NBYTES, PlannedModel, plan_model
from streamer.runtime.threads import in_thread, stoppable, uncancelled
from streamer.trace import NULL_TRACER, RecordingTracer, Tracer

logger = logging.getLogger(__name__)


@dataclass
class Runtime:
    """A running engine and all it stands on. `close` ends and frees everything, in a thread."""

    ground: Ground
    model: PlannedModel
    weights: ResidentWeights
    bound: Bound
    engine: Engine

    @property
    def device(self) -> Device:
        return self.ground.device

    def plan_instead(self, options: StartOptions, directory: Directory, architecture: Architecture) -> None:
        """Raises what planning another load would, were this model's memory free. Blocking."""
        freed = self.device.statistics().allocated_bytes
        _plan(options, self.ground, directory, architecture, freed_bytes=freed)

    def close(self) -> None:
        """Blocking. Idempotent."""
        if self.leave_ground():
            self.ground.close()

    def leave_ground(self) -> bool:
        """Free all but the ground, for another load over it. Blocking. False: the device hangs."""
        if not self.engine.stop():
            logger.warning("the engine did not stop in time; its memory ends with the process")
            return False
        self.bound.close()
        self.weights.close()
        return True


async def start_runtime(
    options: StartOptions,
    ledger: Ledger,
    *,
    ground: Ground | None = None,
    on_directory: OnDirectory | None = None,
    on_failure: Callable[[Exception], None] | None = None,
    on_step: Callable[[str, float], None] | None = None,
    advanced: Callable[[], None] = lambda: None,
) -> Runtime:
    """Open -> plan -> upload (-> verify) -> warm, phases told to `ledger`; READY is the caller's to say.

    `ground` is what an earlier load of the same file left (`Runtime.leave_ground`); it is owned from here on.
    `on_directory` runs as soon as the header is read, beside the opening of the device: further checks of the
    file, which end before anything is allocated, and the beginning of what else is built from the header.
    `advanced` is called from threads whenever warming has come a step further. Cancelled or failed,
    everything opened is closed before this returns.
    """
    undo = ExitStack()  # what has been opened so far
    stop = threading.Event()
    threads = ThreadPoolExecutor(4, thread_name_prefix="start")
    try:
        return await _start(
            options, ledger, ground, undo, stop, threads, on_directory, on_failure, on_step, advanced
        )
    except BaseException as error:
        stop.set()
        ledger.fail(error)
        await uncancelled(threads, undo.close)
        raise
    finally:
        threads.shutdown(wait=False)


async def _start(
    options: StartOptions,
    ledger: Ledger,
    ground: Ground | None,
    undo: ExitStack,
    stop: threading.Event,
    threads: ThreadPoolExecutor,
    on_directory: OnDirectory | None,
    on_failure: Callable[[Exception], None] | None,
    on_step: Callable[[str, float], None] | None,
    advanced: Callable[[], None],
) -> Runtime:
    tracer: Tracer = RecordingTracer() if options.trace else NULL_TRACER
    if ground is not None:
        undo.callback(ground.close)
        ground.device.enter_loading()
        directory, architecture = await read_header(options, threads, on_directory)
    else:
        ground, directory, architecture = await break_ground(options, threads, on_directory)
        undo.callback(ground.close)
    device, transfer = ground.device, ground.transfer
    capabilities = device.capabilities
    ledger.describe(device=device_name(device))
    ledger.describe(transfer="host" if capabilities.kind == "host" else transfer.name)
    ledger.enter(Phase.PLAN)
    pinning = threads.submit(transfer.prepare)  # beside planning and compiling
    undo.callback(lambda: _ended(pinning))
    model = await in_thread(threads, lambda: _plan(options, ground, directory, architecture))
    for note in model.notes:
        logger.info(note)
    ledger.adopt(model.plan)
    preparation = None
    if prepare := PREPARATIONS.get(capabilities.kind):
        preparation = await in_thread(threads, lambda: prepare(device, model, options.cache_directory))
        undo.callback(preparation.close)
    await asyncio.wrap_future(pinning)
    weights = await load(
        model.plan,
        directory,
        device,
        transfer,
        ledger,
        tracer=tracer,
        verify=options.verify,
        finisher=preparation.finisher if preparation is not None else None,
        sources=ground.sources or None,
    )
    undo.callback(weights.close)
    ledger.enter(Phase.WARM)
    starting = Start(device, model, weights, options.blas_threads, advanced, stop, preparation)
    bound = await stoppable(threads, stop, lambda: BINDERS[capabilities.kind](starting))
    undo.callback(bound.close)
    if isinstance(tracer, RecordingTracer):
        await in_thread(threads, lambda: _write_trace(tracer, options.trace))
    device.enter_serving()
    engine = _engine(options, device, model, bound, on_failure, on_step)
    engine.start()
    return Runtime(ground, model, weights, bound, engine)


def _write_trace(tracer: RecordingTracer, path: str) -> None:
    """The model is resident: a full disk costs the trace, not the daemon."""
    try:
        tracer.write(Path(path))
    except OSError as error:
        logger.warning("the trace cannot be written: %s: %s", path, error.strerror)


def _plan(
    options: StartOptions,
    ground: Ground,
    directory: Directory,
    architecture: Architecture,
    *,
    freed_bytes: int = 0,
) -> PlannedModel:
    device = ground.device
    return plan_model(
        directory,
        architecture,
        options.runtime,
        kind=device.capabilities.kind,
        free_bytes=device.memory_info().free + freed_bytes,
        chunk_nbytes=min(CHUNK_NBYTES, ground.transfer.chunk_nbytes),
    )


def _engine(
    options: StartOptions,
    device: Device,
    model: PlannedModel,
    bound: Bound,
    on_failure: Callable[[Exception], None] | None,
    on_step: Callable[[str, float], None] | None,
) -> Engine:
    plan, layout = model.plan, model.architecture.cache_layout()
    snapshots = None
    if layout.recurrent:
        snapshots = SnapshotTable(range(plan.max_sequences, plan.max_sequences + model.n_snapshots))
    engine_options = EngineOptions(
        max_sequences=plan.max_sequences,
        n_ctx=plan.n_ctx,
        max_rows=model.max_rows,
        max_logit_rows=max(128, plan.max_sequences),
        overlap=model.profile.overlap,
        queue_limit=options.queue_limit,
        max_queue_s=options.queue_timeout_s,
        slow_reader_s=options.slow_reader_s,
    )
    return Engine(
        bound.executor,
        PagePool(plan.n_pages, layout.page_size),
        engine_options,
        snapshots=snapshots,
        weight_h2d_bytes=lambda: weight_bytes(device, CopyPhase.SERVE),
        on_failure=on_failure,
        on_step=on_step,
    )


def weight_bytes(device: Device, phase: CopyPhase) -> int:
    """Weight bytes through the device's one door."""
    return device.statistics().uploaded_bytes.get((phase, CopyKind.WEIGHTS), 0)


def has_changed(directory: Directory) -> bool:
    """True when a shard's file is another one, or was written to, since its header was read."""
    for shard in directory.shards:
        try:
            status = os.stat(shard.path)
        except OSError:
            return False  # nothing to load instead: what is resident serves on
        if (status.st_size, status.st_mtime_ns, status.st_ino) != (shard.nbytes, shard.mtime_ns, shard.inode):
            return True
    return False


def _ended(future: "Future[None]") -> None:
    """Wait until a thread's work is over, however it ended."""
    wait([future])
