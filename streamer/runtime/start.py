"""From a path to a running engine: told by a ledger, cancellable at every point, undone on failure."""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from streamer.cache.pages import PagePool
from streamer.cache.snapshots import SnapshotTable
from streamer.device.base import CopyKind, CopyPhase, Device
from streamer.device.open import open_device
from streamer.engine.engine import Engine
from streamer.engine.steps import EngineOptions
from streamer.gguf.directory import Directory
from streamer.kernels.checksum import checksum_code
from streamer.load.pipeline import load
from streamer.load.weights import ResidentWeights
from streamer.models.registry import Architecture
from streamer.residency.ledger import Ledger
from streamer.residency.state import Phase
from streamer.runtime.executors import BINDERS, PREPARATIONS, Bound, Start, Stopped
from streamer.runtime.options import StartOptions
from streamer.runtime.planning import CHUNK_NBYTES, PlannedModel, plan_model, read_model
from streamer.trace import NULL_TRACER, RecordingTracer, Tracer
from streamer.transfer.base import MIB, Transfer
from streamer.transfer.choose import TransferOptions, open_transfer

logger = logging.getLogger(__name__)
T = TypeVar("T")
OnDirectory = Callable[[Directory, Architecture], Awaitable[None]]


@dataclass
class Runtime:
    """A running engine and all it stands on. `close` ends and frees everything, in a thread."""

    device: Device
    model: PlannedModel
    weights: ResidentWeights
    transfer: Transfer
    bound: Bound
    engine: Engine

    def close(self) -> None:
        """Blocking. Idempotent."""
        stopped = self.engine.stop()
        if not stopped:
            logger.warning("the engine did not stop in time; its memory ends with the process")
            return
        self.bound.close()
        self.weights.close()
        self.transfer.close()
        self.device.close()


@dataclass
class _Undo:
    """What has been opened so far, to be closed in reverse when the start does not come to its end."""

    closers: list[Callable[[], None]] = field(default_factory=list)

    def run(self) -> None:
        while self.closers:
            self.closers.pop()()


async def start_runtime(
    options: StartOptions,
    ledger: Ledger,
    *,
    on_directory: OnDirectory | None = None,
    on_failure: Callable[[Exception], None] | None = None,
    on_step: Callable[[str, float], None] | None = None,
    advanced: Callable[[], None] = lambda: None,
) -> Runtime:
    """Open -> plan -> upload (-> verify) -> warm, phases told to `ledger`; READY is the caller's to say.

    `on_directory` runs as soon as the header is read, beside the opening of the device: further checks of the
    file, which end before anything is allocated, and the beginning of what else is built from the header.
    `advanced` is called from threads whenever warming has come a step further. Cancelled or failed,
    everything opened is closed before this returns.
    """
    undo = _Undo()
    stop = threading.Event()
    threads = ThreadPoolExecutor(4, thread_name_prefix="start")
    try:
        return await _start(options, ledger, undo, stop, threads, on_directory, on_failure, on_step, advanced)
    except BaseException as error:
        stop.set()
        ledger.fail(error)
        await _uncancelled(threads, undo.run)
        raise
    finally:
        threads.shutdown(wait=False)


async def _start(
    options: StartOptions,
    ledger: Ledger,
    undo: _Undo,
    stop: threading.Event,
    threads: ThreadPoolExecutor,
    on_directory: OnDirectory | None,
    on_failure: Callable[[Exception], None] | None,
    on_step: Callable[[str, float], None] | None,
    advanced: Callable[[], None],
) -> Runtime:
    tracer: Tracer = RecordingTracer() if options.trace else NULL_TRACER
    remarks: list[str] = []  # said once the file is accepted: a refusal is one line
    opening = asyncio.ensure_future(_in(threads, lambda: _open_device(options, remarks)))
    try:
        directory, architecture = await _in(threads, lambda: read_model(options.path))
        if on_directory is not None:
            await on_directory(directory, architecture)
        device = await asyncio.shield(opening)
    except BaseException:
        await _abandon(opening)
        raise
    undo.closers.append(device.close)
    for remark in remarks:
        logger.info(remark)
    capabilities = device.capabilities
    ledger.describe(device=device_name(device))
    transfer = open_transfer(device, _transfer_options(options), cores=len(os.sched_getaffinity(0)))
    undo.closers.append(transfer.close)
    ledger.describe(transfer="host" if capabilities.kind == "host" else transfer.name)
    ledger.enter(Phase.PLAN)
    pinning = threads.submit(transfer.prepare)  # beside planning and compiling
    undo.closers.append(lambda: _ended(pinning))
    model = await _in(threads, lambda: _plan(options, device, directory, architecture, transfer))
    ledger.adopt(model.plan)
    preparation = None
    if prepare := PREPARATIONS.get(capabilities.kind):
        preparation = await _in(threads, lambda: prepare(device, model, options.cache_directory))
        undo.closers.append(preparation.close)
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
    )
    undo.closers.append(weights.close)
    ledger.enter(Phase.WARM)
    starting = Start(device, model, weights, options.blas_threads, advanced, stop, preparation)
    bound = await _stoppable(threads, stop, lambda: BINDERS[capabilities.kind](starting))
    undo.closers.append(bound.close)
    if isinstance(tracer, RecordingTracer):
        await _in(threads, lambda: tracer.write(Path(options.trace)))
    device.enter_serving()
    engine = _engine(options, device, model, bound, on_failure, on_step)
    engine.start()
    return Runtime(device, model, weights, transfer, bound, engine)


def _open_device(options: StartOptions, remarks: list[str]) -> Device:
    device, remark = open_device(
        options.device,
        checksum_code=checksum_code(options.cache_directory),
        host_link_bytes_per_s=options.host_link_bytes_per_s,
    )
    if remark is not None:
        remarks.append(remark)
    return device


def _plan(
    options: StartOptions,
    device: Device,
    directory: Directory,
    architecture: Architecture,
    transfer: Transfer,
) -> PlannedModel:
    return plan_model(
        directory,
        architecture,
        options.runtime,
        kind=device.capabilities.kind,
        free_bytes=device.memory_info().free,
        chunk_nbytes=min(CHUNK_NBYTES, transfer.chunk_nbytes),
    )


def _transfer_options(options: StartOptions) -> TransferOptions:
    return TransferOptions(
        asked=options.transfer,
        ring_nbytes=options.ring_mib * MIB or None,
        workers=options.touch_threads or None,
        chunk_nbytes=CHUNK_NBYTES,
        keep_registered=options.keep_registered,
        verify=options.verify,
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


def device_name(device: Device) -> str:
    """As the residency object names it: `host`, or `cuda:0 NVIDIA H200`."""
    capabilities = device.capabilities
    if capabilities.kind == "host":
        return "host"
    return f"{capabilities.kind}:{capabilities.ordinal} {capabilities.name}"


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


# ---- threads under cancellation ----------------------------------------------------------------------------


async def _in(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


async def _stoppable(threads: ThreadPoolExecutor, stop: threading.Event, work: Callable[[], T]) -> T:
    """Cancellation sets `stop` and waits for the thread, which frees what it has made."""
    future = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([future])
        if not future.cancelled() and future.exception() is None:
            finished = future.result()
            if isinstance(finished, Bound):
                finished.close()
        raise
    except Stopped:
        raise asyncio.CancelledError from None


async def _abandon(opening: "asyncio.Future[Device]") -> None:
    """The start failed while the device was being opened: close it when it comes."""
    try:
        device = await asyncio.shield(opening)
    except Exception:  # noqa: BLE001 - the first failure is the one that is told
        return
    device.close()


async def _uncancelled(threads: ThreadPoolExecutor, work: Callable[[], None]) -> None:
    """Run to the end whatever comes: memory is given back before anybody goes on."""
    future = asyncio.get_running_loop().run_in_executor(threads, work)
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    future.result()
