"""A weight's file bytes in pieces of at most a slot. Pure."""

import math

from streamer.gguf.quants import QuantType
from streamer.plan.plan import Chunk, Plan, PlannedWeight

CHECKSUM_ROW_NBYTES = 512  # partial checksums add up where chunks begin at multiples of this
PLANE_BLOCKS = 16  # quant blocks whose share of any plane is a multiple of 16 bytes


def chunk_step(type: QuantType, chunk_nbytes: int) -> int:
    """Chunks of a weight are multiples of this: whole quant blocks; aligned in every plane and for partial
    checksums as far as a chunk is large enough for that. ValueError if not even one quant block fits."""
    block = type.block_nbytes
    for step in (math.lcm(block * PLANE_BLOCKS, CHECKSUM_ROW_NBYTES), block * PLANE_BLOCKS, block):
        if step <= chunk_nbytes:
            return step
    raise ValueError(f"a chunk of {chunk_nbytes} bytes holds no quant block of {type.name} ({block} bytes)")


def chunks_of(weight: PlannedWeight, plan: Plan) -> tuple[Chunk, ...]:
    """The weight's chunks in file order; they cover its bytes exactly once."""
    tensor = weight.tensor
    step = chunk_step(tensor.type, plan.chunk_nbytes)
    size = plan.chunk_nbytes // step * step
    return tuple(
        Chunk(
            weight=weight.index,
            shard=tensor.shard,
            file_offset=tensor.offset + offset,
            nbytes=min(size, tensor.nbytes - offset),
            offset=offset,
        )
        for offset in range(0, tensor.nbytes, size)
    )
