"""Builders for the tests of the pipeline's rooms: a file with tensors, its directory and plan, a load of it.

Loaded by these rooms' conftest.py under the name `pipeline_support`.
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from streamer.device.base import CopyKind, CopyPhase
from streamer.gguf.directory import Directory, Shard, TensorInfo
from streamer.gguf.quants import QuantType
from streamer.load.pipeline import load
from streamer.plan.plan import Layout, MemorySum, Plan, PlannedWeight, Role, Segment
from streamer.residency.ledger import Ledger
from streamer.residency.state import Phase
from streamer.transfer.crewed_ring import CrewedRing
from streamer.transfer.pinned_ring import PinnedRing
from streamer.transfer.registered_window import RegisteredWindow
from streamer.transfer.touch_copy import TouchCopy

CHUNK = 16 << 10  # bytes: a slot small enough that every test uses many
STRATEGIES = ("ring", "crewed", "window", "touch")


@dataclass(frozen=True)
class Piece:
    """One tensor to build. `layer` None: a segment of its own, before the layers."""

    nbytes: int
    layer: int | None = 0
    type: QuantType = QuantType.I8
    role: Role = Role.ATTENTION
    layout: Layout = Layout.FILE
    data: bytes | None = None  # None: byte pattern index + 1
    gap: int = 0  # bytes left before it in the file
    shard: int = 0


@dataclass
class Model:
    """A file set with its plan, and what each weight's bytes are."""

    directory: Directory
    plan: Plan
    data: dict[str, bytes] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return Path(self.directory.shards[0].path)


def build(
    folder: Path, pieces: Sequence[Piece | int], *, chunk_nbytes: int = CHUNK, header: int = 96
) -> Model:
    """Write the shards, then describe them. A bare number is a tensor of that many bytes in layer 0."""
    pieces = [piece if isinstance(piece, Piece) else Piece(piece) for piece in pieces]
    ends: dict[int, int] = {}
    tensors: dict[str, TensorInfo] = {}
    data: dict[str, bytes] = {}
    for index, piece in enumerate(pieces):
        name = (
            f"blk.{piece.layer}.w{index}.weight" if piece.layer is not None else f"token_embd{index}.weight"
        )
        offset = -(-(ends.get(piece.shard, header) + piece.gap) // 32) * 32
        ends[piece.shard] = offset + piece.nbytes
        elements = piece.nbytes // piece.type.block_nbytes * piece.type.block_elements
        tensors[name] = TensorInfo(name, (elements,), piece.type, piece.nbytes, piece.shard, offset)
        data[name] = piece.data if piece.data is not None else bytes([index % 255 + 1]) * piece.nbytes
    shards = [
        _write(folder / f"model-{shard}.gguf", tensors, data, shard, end) for shard, end in ends.items()
    ]
    directory = Directory(shards[0].path, 3, 32, {}, tensors, tuple(shards))
    return Model(directory, _plan(pieces, list(tensors.values()), chunk_nbytes), data)


def _write(path: Path, tensors: dict[str, TensorInfo], data: dict[str, bytes], shard: int, end: int) -> Shard:
    with path.open("wb") as file:
        file.truncate(end)  # gaps stay holes
        for name, tensor in tensors.items():
            if tensor.shard == shard:
                file.seek(tensor.offset)
                file.write(data[name])
    status = path.stat()
    return Shard(str(path), status.st_size, status.st_mtime_ns, status.st_ino)


def _plan(pieces: Sequence[Any], tensors: list[TensorInfo], chunk_nbytes: int) -> Plan:
    weights: list[PlannedWeight] = []
    segments: list[Segment] = []
    for index, (piece, tensor) in enumerate(zip(pieces, tensors, strict=True)):
        if segments and piece.layer is not None and segments[-1].layer == piece.layer:
            last = segments.pop()
        else:
            name = "embedding" if piece.layer is None else f"layer {piece.layer}"
            last = Segment(len(segments), name, piece.layer, 0, ())
        begin = -(-last.nbytes // 256) * 256
        weights.append(
            PlannedWeight(
                index,
                tensor.name,
                piece.role,
                piece.layer,
                tensor,
                last.index,
                begin,
                tensor.nbytes,
                piece.layout,
            )
        )
        end = begin + tensor.nbytes
        segments.append(Segment(last.index, last.name, last.layer, end, (*last.weights, index)))
    layers = len({piece.layer for piece in pieces if piece.layer is not None})
    total = sum(segment.nbytes for segment in segments)
    memory = MemorySum(total, 0, 0, 0, 0)
    return Plan(tuple(weights), tuple(segments), layers, chunk_nbytes, (), memory, None, 32, 1, 1, 0, 0)


def make_transfer(
    strategy: str, device: Any, *, chunk_nbytes: int = CHUNK, workers: int = 2, **options: Any
) -> Any:
    """A strategy with a tiny ring, or with windows of two pages."""
    if strategy == "window":
        options = {"window_nbytes": 2 * 4096, "max_windows": 2} | options
        return RegisteredWindow(device, chunk_nbytes=chunk_nbytes, **options)
    if strategy == "crewed":
        slots = options.pop("slots_per_worker", 4) * max(workers, 1)
        options = {
            "ring_nbytes": slots * chunk_nbytes,
            "piece_nbytes": max(4096, chunk_nbytes // 2),
        } | options
        return CrewedRing(device, processes=workers, chunk_nbytes=chunk_nbytes, **options)
    kind = PinnedRing if strategy == "ring" else TouchCopy
    return kind(device, workers=workers, chunk_nbytes=chunk_nbytes, **options)


def run_load(
    model: Model, device: Any, transfer: Any, *, ledger: Ledger | None = None, **options: Any
) -> Any:
    """Load to the end in this thread's own loop; returns (weights, ledger)."""
    ledger = ledger or Ledger(model.plan)
    weights = asyncio.run(load(model.plan, model.directory, device, transfer, ledger, **options))
    return weights, ledger


def device_bytes(device: Any, buffer: Any, offset: int, nbytes: int) -> bytes:
    """What lies in device memory, through the device's own download."""
    stream = device.create_stream("check")
    target = np.empty(nbytes, dtype=np.uint8)
    device.download(buffer, offset, target.ctypes.data, nbytes, stream=stream)
    stream.sync()
    stream.close()
    return target.tobytes()


def assert_exact(model: Model, device: Any, weights: Any) -> None:
    """Every weight's device bytes are its file bytes."""
    for name, expected in model.data.items():
        place = weights[name]
        found = device_bytes(device, place.buffer, place.offset, len(expected))
        assert found == expected, f"{name} differs"


def assert_nothing_held(device: Any) -> None:
    statistics = device.statistics()
    held = (statistics.allocated_bytes, statistics.pinned_bytes, statistics.live_streams)
    assert held == (0, 0, 0), statistics


def uploaded(device: Any, phase: CopyPhase = CopyPhase.LOAD) -> int:
    return device.statistics().uploaded_bytes[phase, CopyKind.WEIGHTS]


def load_threads() -> list[str]:
    """Names of living threads that a load or its streams own."""
    return [t.name for t in threading.enumerate() if t.name.startswith(("load", "stream "))]


def ready(ledger: Ledger) -> None:
    ledger.enter(Phase.READY)
