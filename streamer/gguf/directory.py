"""The values a GGUF file becomes: metadata, tensors, shards. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from streamer.gguf.metadata import Metadata
from streamer.gguf.quants import QuantType


@dataclass(frozen=True)
class Shard:
    """One file of the model, as it was when its header was read."""

    path: str
    nbytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file. `shape` in GGUF order: `shape[0]` is contiguous (inputs of a projection)."""

    name: str
    shape: tuple[int, ...]
    type: QuantType
    nbytes: int
    shard: int  # index into Directory.shards
    offset: int  # absolute, in the shard's file

    @property
    def n_elements(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n


@dataclass(frozen=True)
class Directory:
    """A whole model: its first shard's metadata and every shard's tensors, in file order."""

    path: str
    version: int
    alignment: int
    metadata: Metadata  # scalars, str, numpy arrays, lists of str; arrays are made on first use
    tensors: Mapping[str, TensorInfo]
    shards: tuple[Shard, ...]

    @property
    def architecture(self) -> str:
        return self.metadata.get_str("general.architecture")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())
