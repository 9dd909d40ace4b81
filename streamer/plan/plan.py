"""Values of the plan. `make_plan` (make.py) computes them; the pipeline only carries them out."""

import enum
from dataclasses import dataclass

from streamer.gguf.directory import TensorInfo


class Role(enum.StrEnum):
    EMBEDDING = "embedding"
    NORM = "norm"
    ATTENTION = "attention"
    RECURRENT = "recurrent"
    FEED_FORWARD = "feed_forward"
    EXPERTS = "experts"
    OUTPUT = "output"
    TABLE = "table"  # rope factors and the like


class Layout(enum.StrEnum):
    """How a weight lies in device memory once resident."""

    FILE = "file"  # the file's own bytes
    PLANES = (
        "planes"  # quants and scales in separate aligned planes; a device kernel rearranges after the proof
    )
    BF16 = "bf16"  # dequantized on the device: types without a native kernel


@dataclass(frozen=True)
class WeightSpec:
    """What a model asks of the file. Execution order is the order of the specs."""

    name: str
    role: Role
    layer: int | None  # GGUF blk.N; None for embedding, output and global tables
    shape: tuple[int, ...]  # expected, GGUF order
    optional: bool = False


@dataclass(frozen=True)
class Chunk:
    """A contiguous piece of one weight: at most one slot of the ring."""

    weight: int  # index into Plan.weights
    shard: int
    file_offset: int
    nbytes: int
    offset: int  # inside the weight's file bytes


@dataclass(frozen=True)
class PlannedWeight:
    index: int  # execution order
    name: str
    role: Role
    layer: int | None
    tensor: TensorInfo
    segment: int  # index into Plan.segments
    destination_offset: int  # inside the segment, 256-byte aligned
    resident_nbytes: int  # bytes at the destination once the layout is applied
    layout: Layout


@dataclass(frozen=True)
class Segment:
    """One device allocation: weights of a layer, embedding or output. Allocated one ahead of the upload."""

    index: int
    name: str  # "embedding", "layer 3", "output"
    layer: int | None
    nbytes: int
    weights: tuple[int, ...]  # indices into Plan.weights, execution order


@dataclass(frozen=True)
class MemorySum:
    """Everything the device must hold, in bytes; spelled out when it does not fit."""

    weights: int
    kv_cache: int
    recurrent_state: int
    workspace: int  # activations, landing area of layout transforms, dequantization scratch
    reserve: int  # left free for the driver

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.recurrent_state + self.workspace + self.reserve


@dataclass(frozen=True)
class Plan:
    weights: tuple[PlannedWeight, ...]
    segments: tuple[Segment, ...]
    n_layers: int
    chunk_nbytes: int
    skipped: tuple[
        str, ...
    ]  # tensors of the file left out on purpose (MTP blocks), with nothing planned for them
    memory: MemorySum
    free_bytes: int | None  # what the budget was; None when planned without a device
    n_ctx: int  # tokens a sequence
    n_pages: int
    max_sequences: int
    kv_nbytes_per_token: int
    state_nbytes_per_sequence: int

    @property
    def nbytes(self) -> int:
        """File bytes of all planned weights: what is uploaded."""
        return sum(w.tensor.nbytes for w in self.weights)

    @property
    def fits(self) -> bool:
        return self.free_bytes is None or self.memory.total <= self.free_bytes
