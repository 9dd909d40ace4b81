"""What the link gives by itself, measured in the same run as our load: the yardsticks of every ratio."""

import statistics
import time
from dataclasses import dataclass

from streamer.device.base import Buffer, CopyKind, Device, Stream
from streamer.gguf.mapping import Mapping

MIB = 1 << 20
GIB = 1 << 30
PEAK_CHUNK = 64 * MIB
SUBMIT_CHUNK = 4 * MIB


@dataclass(frozen=True)
class LinkRates:
    peak_gbps: float  # pinned 64 MiB chunks, best of the repeats
    submit_us: float  # median time of submitting one pinned 4 MiB copy
    pageable_gbps: float  # the driver's own copy from the mapped file, pages in the cache


def measure_link(device: Device, mapping: Mapping, *, nbytes: int, repeats: int = 3) -> LinkRates:
    """Measure with `nbytes` of traffic a repeat. Takes up to 128 MiB of pinned and of device memory."""
    chunk = min(PEAK_CHUNK, max(SUBMIT_CHUNK, nbytes // 4))
    stream = device.create_stream("bench")
    buffer = device.allocate(2 * chunk, what="link benchmark")
    pinned = [device.allocate_pinned(chunk) for _ in range(2)]
    try:
        addresses = [source.address for source in pinned]
        peak = _peak(device, buffer, addresses, chunk, nbytes, stream, repeats)
        submit = _submit_us(device, buffer, addresses[0], min(SUBMIT_CHUNK, chunk), stream)
        pageable = _pageable(device, buffer, mapping, chunk, min(nbytes, mapping.nbytes), stream)
    finally:
        stream.close()
        for source in pinned:
            source.close()
        buffer.close()
    return LinkRates(peak, submit, pageable)


def measure_allocation(device: Device, *, nbytes: int, count: int) -> float:
    """Median milliseconds of one device allocation of `nbytes`, `count` of them held at once."""
    buffers, times = [], []
    try:
        for _ in range(count):
            started_s = time.perf_counter()
            buffers.append(device.allocate(nbytes, what="allocation benchmark"))
            times.append(time.perf_counter() - started_s)
    finally:
        for buffer in buffers:
            buffer.close()
    return statistics.median(times) * 1e3


def measure_checksum(device: Device, *, nbytes: int, repeats: int = 3) -> float:
    """GB/s of the device's checksum over `nbytes` of its memory, best of the repeats after one to warm up."""
    stream = device.create_stream("bench")
    buffer = device.allocate(nbytes, what="checksum benchmark")
    rates = []
    try:
        device.fill(buffer, 0, nbytes, 0x5A, stream=stream)
        device.checksum(buffer, 0, nbytes, stream=stream).result()
        for _ in range(repeats):
            started_s = time.perf_counter()
            device.checksum(buffer, 0, nbytes, stream=stream).result()
            rates.append(nbytes / (time.perf_counter() - started_s) / 1e9)
    finally:
        stream.close()
        buffer.close()
    return max(rates)


def _peak(
    device: Device, buffer: Buffer, sources: list[int], chunk: int, nbytes: int, stream: Stream, repeats: int
) -> float:
    turns = max(2, nbytes // chunk)
    rates = []
    for _ in range(repeats + 1):  # the first wakes the link up
        stream.sync()
        started_s = time.perf_counter()
        for turn in range(turns):
            side = turn % 2
            device.upload(buffer, side * chunk, sources[side], chunk, stream=stream, kind=CopyKind.TABLES)
        stream.sync()
        rates.append(turns * chunk / (time.perf_counter() - started_s) / 1e9)
    return max(rates[1:])


def _submit_us(device: Device, buffer: Buffer, source: int, chunk: int, stream: Stream) -> float:
    times = []
    for _ in range(128):
        started_s = time.perf_counter()
        device.upload(buffer, 0, source, chunk, stream=stream, kind=CopyKind.TABLES)
        times.append(time.perf_counter() - started_s)
    stream.sync()
    return statistics.median(times) * 1e6


def _pageable(
    device: Device, buffer: Buffer, mapping: Mapping, chunk: int, nbytes: int, stream: Stream
) -> float:
    """The copy straight from the mapping: pages are touched first, so that storage is not measured."""
    mapping.touch(0, nbytes)
    stream.sync()
    started_s = time.perf_counter()
    for offset in range(0, nbytes, chunk):
        part = min(chunk, nbytes - offset)
        device.upload(buffer, 0, mapping.address + offset, part, stream=stream, kind=CopyKind.TABLES)
    stream.sync()
    return nbytes / (time.perf_counter() - started_s) / 1e9
