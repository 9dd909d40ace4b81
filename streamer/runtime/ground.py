"""What a model is loaded over: device, strategy, and mappings that stay open when pages stay registered."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from streamer.device.base import Device
from streamer.device.open import open_device
from streamer.gguf.directory import Directory
from streamer.gguf.mapping import Mapping
from streamer.kernels.checksum import checksum_code
from streamer.models.registry import Architecture
from streamer.runtime.options import StartOptions
from streamer.runtime.planning import CHUNK_NBYTES, read_model
from streamer.runtime.threads import in_thread
from streamer.transfer.base import MIB, Source, Transfer
from streamer.transfer.choose import TransferOptions, open_transfer
from streamer.transfer.registered_window import RegisteredWindow

logger = logging.getLogger(__name__)
OnDirectory = Callable[[Directory, Architecture], Awaitable[None]]


@dataclass(frozen=True)
class Ground:
    """Outlives a model when the same file is loaded again: registrations belong to this device and these
    mappings. `sources` is empty where nothing stays registered: a load then opens and closes its own.
    """

    device: Device
    transfer: Transfer
    sources: Sequence[Source] = ()

    def close(self) -> None:
        """Blocking. Idempotent."""
        self.transfer.close()  # first: nothing may stay registered in a mapping that goes
        for source in self.sources:
            source.close()
        self.device.close()


async def read_header(
    options: StartOptions, threads: ThreadPoolExecutor, on_directory: OnDirectory | None
) -> tuple[Directory, Architecture]:
    directory, architecture = await in_thread(threads, lambda: read_model(options.path))
    if on_directory is not None:
        await on_directory(directory, architecture)
    return directory, architecture


async def break_ground(
    options: StartOptions, threads: ThreadPoolExecutor, on_directory: OnDirectory | None
) -> tuple[Ground, Directory, Architecture]:
    """Open the device while the header is read, then what moves bytes. Failed or cancelled, nothing stays
    open.
    """
    remarks: list[str] = []  # said once the file is accepted: a refusal is one line
    opening = asyncio.ensure_future(in_thread(threads, lambda: _open_device(options, remarks)))
    try:
        directory, architecture = await read_header(options, threads, on_directory)
        device = await asyncio.shield(opening)
    except BaseException:
        await _abandon(opening)
        raise
    for remark in remarks:
        logger.info(remark)
    return _lay(device, options, directory), directory, architecture


def _lay(device: Device, options: StartOptions, directory: Directory) -> Ground:
    """Quick, and not in a thread: a cancellation could not undo what that has opened."""
    with contextlib.ExitStack() as undo:
        undo.callback(device.close)
        transfer = open_transfer(device, _transfer_options(options), cores=len(os.sched_getaffinity(0)))
        undo.callback(transfer.close)
        sources: list[Source] = []
        if options.keep_registered and isinstance(transfer, RegisteredWindow):
            for shard in directory.shards:
                sources.append(Mapping(shard))
                undo.callback(sources[-1].close)
        undo.pop_all()
    return Ground(device, transfer, sources)


def _open_device(options: StartOptions, remarks: list[str]) -> Device:
    device, remark = open_device(
        options.device,
        checksum_code=checksum_code(options.cache_directory),
        host_link_bytes_per_s=options.host_link_bytes_per_s,
    )
    if remark is not None:
        remarks.append(remark)
    return device


def _transfer_options(options: StartOptions) -> TransferOptions:
    return TransferOptions(
        asked=options.transfer,
        ring_nbytes=options.ring_mib * MIB or None,
        workers=options.touch_threads or None,
        chunk_nbytes=CHUNK_NBYTES,
        keep_registered=options.keep_registered,
        verify=options.verify,
    )


async def _abandon(opening: "asyncio.Future[Device]") -> None:
    """The start failed while the device was being opened: close it when it comes."""
    try:
        device = await asyncio.shield(opening)
    except Exception:  # noqa: BLE001 - the first failure is the one that is told
        return
    device.close()


def device_name(device: Device) -> str:
    """As the residency object names it: `host`, or `cuda:0 NVIDIA H200`."""
    capabilities = device.capabilities
    if capabilities.kind == "host":
        return "host"
    return f"{capabilities.kind}:{capabilities.ordinal} {capabilities.name}"
