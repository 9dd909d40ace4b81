"""Loading to CUDA: every strategy brings the file's bytes, proofs find planted faults, lack is told."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipeline_support import Piece, build, make_transfer
from pipeline_support import run_load as load_model

from streamer.bench.subject import Subject, open_subject, run_load
from streamer.device.base import CopyKind, CopyPhase, Device
from streamer.device.cuda import CudaDevice
from streamer.errors import DeviceMemoryError, ResidencyError
from streamer.load.pipeline import load
from streamer.residency.ledger import Ledger
from streamer.transfer.choose import TransferOptions, open_transfer

pytestmark = pytest.mark.cuda
MODEL = Path(__file__).parents[1] / "data" / "tiny-llama.gguf"
KIB = 1 << 10
CHUNK = 16 * KIB  # so that a tiny model takes many slots' turns


@pytest.fixture
def subject() -> Iterator[Subject]:
    with open_subject(str(MODEL), chunk_nbytes=CHUNK) as opened:
        yield opened


def options(**changes: Any) -> TransferOptions:
    return TransferOptions(
        **{
            "asked": "ring",
            "chunk_nbytes": CHUNK,
            "workers": 2,
            "streams": 2,
            "ring_nbytes": 8 * CHUNK,
            **changes,
        }
    )


def load_once(device: Device, transfer, subject: Subject, **more: Any):
    ledger = Ledger(subject.plan)
    weights = asyncio.run(
        load(subject.plan, subject.directory, device, transfer, ledger, sources=subject.mappings, **more)
    )
    return weights, ledger


def assert_device_bytes_are_the_files(device: Device, weights, subject: Subject) -> None:
    stream = device.create_stream("check")
    for weight in subject.plan.weights:
        place = weights[weight.name]
        target = np.empty(weight.tensor.nbytes, dtype=np.uint8)
        device.download(place.buffer, place.offset, target.ctypes.data, target.nbytes, stream=stream)
        stream.sync()
        source = subject.mappings[weight.tensor.shard].view(weight.tensor.offset, weight.tensor.nbytes)
        assert target.tobytes() == bytes(source), weight.name
        source.release()
    stream.close()


@pytest.mark.parametrize(
    ("strategy", "fill"), [("ring", "threads"), ("ring", "processes"), ("window", "auto"), ("touch", "auto")]
)
@pytest.mark.parametrize("verify", [False, True])
def test_device_bytes_are_the_files(
    device: CudaDevice, subject: Subject, strategy: str, fill: str, verify: bool
) -> None:
    transfer = open_transfer(device, options(asked=strategy, fill=fill), cores=4)
    weights, ledger = load_once(device, transfer, subject, verify=verify)
    assert_device_bytes_are_the_files(device, weights, subject)
    residency = ledger.statistics()
    assert residency.bytes_resident == residency.bytes_total == subject.nbytes
    counted = device.statistics().uploaded_bytes
    assert counted[CopyPhase.LOAD, CopyKind.WEIGHTS] == subject.nbytes
    weights.close()
    transfer.close()


def test_kept_registration_serves_a_second_load(device: CudaDevice, subject: Subject) -> None:
    transfer = open_transfer(device, options(asked="window", keep_registered=True), cores=4)
    for _ in range(2):
        weights, _ = load_once(device, transfer, subject)
        assert_device_bytes_are_the_files(device, weights, subject)
        weights.close()
    assert transfer.statistics().pinned_bytes >= subject.nbytes
    transfer.close()
    assert device.statistics().pinned_bytes == 0


def test_no_device_memory_beyond_the_plan(device: CudaDevice, subject: Subject) -> None:
    transfer = open_transfer(device, options(), cores=4)
    run = run_load(device, transfer, subject)
    assert run.device.peak_allocated_bytes == sum(segment.nbytes for segment in subject.plan.segments)
    transfer.close()


class Tampering:
    """A device whose nth upload sends a slot with one byte flipped: what a fault after the checksum does."""

    def __init__(self, inner: CudaDevice, nth: int) -> None:
        self._inner, self._left = inner, nth

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def upload(self, buffer, offset: int, source: int, nbytes: int, *, stream, kind: CopyKind) -> None:
        import ctypes

        self._left -= 1
        byte = ctypes.c_ubyte.from_address(source + nbytes // 2)
        if self._left == 0:
            byte.value ^= 0x10
        self._inner.upload(buffer, offset, source, nbytes, stream=stream, kind=kind)


@pytest.mark.parametrize("nth", [1, 7, 20])
def test_byte_flipped_in_a_slot_after_the_checksum_is_found_and_named(
    device: CudaDevice, subject: Subject, nth: int
) -> None:
    tampering = Tampering(device, nth)
    transfer = open_transfer(tampering, options(), cores=4)  # type: ignore[arg-type]
    with pytest.raises(ResidencyError) as caught:
        load_once(tampering, transfer, subject, verify=True)  # type: ignore[arg-type]
    assert any(weight.name in str(caught.value) for weight in subject.plan.weights)
    transfer.close()
    assert device.statistics().allocated_bytes == 0


class DoneTooEarly:
    """An event that says done while its copy still waits."""

    is_done = True

    def sync(self) -> None:
        return None


class HastyStream:
    """A stream whose events lie to those who reuse slots; the work itself is ordered as ever."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def record(self) -> DoneTooEarly:
        return DoneTooEarly()


class Hasty:
    """A device with slow copies (each waits behind a fill) and lying events on its upload streams."""

    def __init__(self, inner: CudaDevice, delay_nbytes: int) -> None:
        self._inner = inner
        self._delay = inner.allocate(delay_nbytes, what="delay")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_stream(self, name: str):
        stream = self._inner.create_stream(name)
        return HastyStream(stream) if name.startswith("upload") else stream

    def upload(self, buffer, offset: int, source: int, nbytes: int, *, stream, kind: CopyKind) -> None:
        self._inner.fill(self._delay, 0, self._delay.nbytes, 0, stream=stream.inner)
        self._inner.upload(buffer, offset, source, nbytes, stream=stream.inner, kind=kind)


class OrderedSettling(Hasty):
    """The settling stream must see the copies done: its waits become waits for everything queued."""

    def create_stream(self, name: str):
        stream = super().create_stream(name)
        if name.startswith("upload"):
            self.uploads = [*getattr(self, "uploads", []), stream.inner]
            return stream
        return WaitingForAll(stream, self)


class WaitingForAll:
    def __init__(self, inner, device: OrderedSettling) -> None:
        self.inner, self._device = inner, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def wait(self, event: Any) -> None:
        for upload in self._device.uploads:
            self.inner.wait(upload.record())


def slow_fill_nbytes(device: CudaDevice, seconds: float = 0.002) -> int:
    """How much memory takes this long to fill."""
    import time

    nbytes = 1 << 20
    stream = device.create_stream("calibrate")
    while True:
        buffer = device.allocate(nbytes)
        device.fill(buffer, 0, nbytes, 0, stream=stream)
        stream.sync()
        started_s = time.perf_counter()
        device.fill(buffer, 0, nbytes, 0, stream=stream)
        stream.sync()
        elapsed_s = time.perf_counter() - started_s
        buffer.close()
        if elapsed_s >= seconds:
            stream.close()
            return nbytes
        nbytes *= 2


def test_slot_reused_before_its_copy_is_found_and_named(device: CudaDevice, tmp_path: Path) -> None:
    """One slot of 1 MiB (a small copy may be done while it is submitted), every copy behind a slow fill."""
    model = build(tmp_path, [Piece(1 << 20, layer=i) for i in range(6)], chunk_nbytes=1 << 20)
    hasty = OrderedSettling(device, slow_fill_nbytes(device))
    transfer = make_transfer("ring", hasty, chunk_nbytes=1 << 20, workers=1, slots_per_worker=1)
    with pytest.raises(ResidencyError, match="differ from the file's") as caught:
        load_model(model, hasty, transfer, verify=True)
    assert any(name in str(caught.value) for name in model.data)
    transfer.close()
    hasty._delay.close()


class Crowded:
    """A device on which the third segment does not fit any more: the driver is asked for too much."""

    def __init__(self, inner: CudaDevice) -> None:
        self._inner, self._left = inner, 3
        self.total = inner.memory_info().total

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def allocate(self, nbytes: int, *, what: str = ""):
        self._left -= 1
        return self._inner.allocate(nbytes if self._left else nbytes + self.total, what=what)


def test_lack_of_memory_in_mid_load_says_asked_and_free_and_leaves_nothing(
    device: CudaDevice, subject: Subject
) -> None:
    crowded = Crowded(device)
    transfer = open_transfer(device, options(), cores=4)
    with pytest.raises(DeviceMemoryError) as caught:
        load_once(crowded, transfer, subject)  # type: ignore[arg-type]
    assert caught.value.asked == subject.plan.segments[2].nbytes + crowded.total
    assert 0 < caught.value.free < crowded.total
    assert f"asked {caught.value.asked} bytes, {caught.value.free} bytes free" in str(caught.value)
    assert device.statistics().allocated_bytes == device.statistics().pinned_bytes == 0
    weights, _ = load_once(device, transfer, subject)
    assert_device_bytes_are_the_files(device, weights, subject)
    weights.close()
    transfer.close()


def test_ledger_events_are_done_when_the_load_is(device: CudaDevice, subject: Subject) -> None:
    transfer = open_transfer(device, options(), cores=4)
    weights, ledger = load_once(device, transfer, subject)
    assert ledger.statistics().fraction == 1.0
    weights.close()
    transfer.close()
