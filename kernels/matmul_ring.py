"""Geometry of gemv_ring: which widths it takes, how its rings are cut. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamer.gguf.quants import QuantType
from streamer.kernels.launch import ModuleSpec
from streamer.kernels.matmul_arguments import CHUNK, FLOATS, Output
from streamer.plan.layouts import PLANES

MAX_STAGES = 16  # gemv_ring.cu
RING_TOKENS = (1, 2, 4)
LEAST_CAPABILITY = (9, 0)  # bulk copies
# Shared memory of one block: two of them, of successive launches, fit a multiprocessor together.
SHARED_NBYTES = 110 << 10
_SUMS = frozenset(PLANES) - {QuantType.Q8_0, QuantType.IQ4_NL, QuantType.IQ4_XS, QuantType.MXFP4}


@dataclass(frozen=True)
class RingVariant:
    """How gemv_ring is built and cut. benchmarks/kernels.py tries others."""

    rows: int = 2  # a tile: of matrices, so half as many results where gated
    iterations: int = 2  # chunks a lane takes of each row of a piece
    warps: int = 8  # a block
    blocks: int = 1  # a multiprocessor
    shared: int = SHARED_NBYTES

    @property
    def name(self) -> str:
        return f"r{self.rows}i{self.iterations}w{self.warps}b{self.blocks}s{self.shared >> 10}"


_WIDE, _NARROW = RingVariant(rows=4), RingVariant(rows=2)
_LARGE = frozenset({QuantType.Q2_K, QuantType.Q3_K, QuantType.Q6_K})  # no registers or no room for 4 rows
# How types go through gemv_ring, best first: the next where a width leaves no room. Others are left to gemv:
# on an H200, Q8_0 is faster there (0.82 of the read rate against 0.78) and Q4_K is not (0.43 against 0.56).
RINGS: Mapping[QuantType, tuple[RingVariant, ...]] = {
    t: (_NARROW,) if t in _LARGE else (_WIDE, _NARROW) for t in PLANES if t is not QuantType.Q8_0
}


def _row_nbytes(type: QuantType, n_elements: int) -> tuple[int, ...]:
    """Bytes of so many elements in each plane."""
    if type in FLOATS:
        return (n_elements * type.block_nbytes,)
    return tuple(nbytes * n_elements // type.block_elements for nbytes in PLANES[type])


def ring_fits(type: QuantType, n_in: int) -> bool:
    """Whether rows of this width can be copied in bulk: 16-byte pieces of every plane."""
    if type is QuantType.F32 or n_in % max(256, type.block_elements):
        return False
    return all(nbytes % 16 == 0 for nbytes in _row_nbytes(type, n_in))


@dataclass(frozen=True)
class RingShape:
    name: str  # of the instance
    tokens: int  # it takes at once
    rows: int  # results a tile
    threads: int  # a block
    blocks: int
    stages: int
    shared: int


def stage_nbytes(type: QuantType, variant: RingVariant) -> int:
    """Bytes of a piece."""
    return variant.rows * sum(_row_nbytes(type, 32 * variant.iterations * CHUNK[type]))


def rows_nbytes(type: QuantType, n_in: int, activation_bytes: int) -> int:
    """Shared memory of one token's activations."""
    if type in FLOATS:
        return 4 * n_in
    return activation_bytes * n_in + n_in // (2 if type in _SUMS else 4)


def ring_tokens(
    type: QuantType, n_in: int, n_tokens: int, activation_bytes: int, variant: RingVariant
) -> int:
    """Tokens an instance takes at once; 0: not even one leaves room for a ring of two stages."""
    room = variant.shared - 2 * variant.warps * stage_nbytes(type, variant)
    most = room // rows_nbytes(type, n_in, activation_bytes)
    wanted = next((m for m in RING_TOKENS if m >= n_tokens), RING_TOKENS[-1])
    return max((m for m in RING_TOKENS if m <= min(wanted, most)), default=0)


def ring_variant(
    variants: Sequence[RingVariant], type: QuantType, n_in: int, n_tokens: int, activation_bytes: int
) -> RingVariant | None:
    """The first that takes so many tokens of this width at once."""
    if not ring_fits(type, n_in):
        return None
    return next(
        (v for v in variants if ring_tokens(type, n_in, n_tokens, activation_bytes, v) >= n_tokens), None
    )


def ring_name(
    type: QuantType, n_tokens: int, activation_bytes: int, gated: bool, variant: RingVariant
) -> str:
    nbytes, gate = 1 if type in FLOATS else activation_bytes, str(gated).lower()
    cut = f"{variant.rows}, {variant.iterations}, {variant.warps}"
    return f"gemv_ring<{type.name}, {n_tokens}, {cut}, {nbytes}, {gate}>"


def ring_shape(
    outputs: Sequence[Output],
    n_tokens: int,
    activation_bytes: int,
    variant: RingVariant,
    *,
    gated: bool,
    multiprocessors: int = 132,
) -> RingShape:
    """As many blocks as multiprocessors hold, as many stages as fit beside the activations."""
    matrix = outputs[0].matrix
    rows = variant.rows // 2 if gated else variant.rows
    tiles = sum(-(-o.matrix.n_out // rows) for o in (outputs[:1] if gated else outputs))
    tokens = ring_tokens(matrix.type, matrix.n_in, n_tokens, activation_bytes, variant)
    room = variant.shared - tokens * rows_nbytes(matrix.type, matrix.n_in, activation_bytes)
    stages = room // (variant.warps * stage_nbytes(matrix.type, variant))
    name = ring_name(matrix.type, tokens, activation_bytes, gated, variant)
    blocks = min(variant.blocks * multiprocessors, tiles)
    return RingShape(
        name,
        tokens,
        rows,
        32 * variant.warps,
        blocks,
        min(stages, MAX_STAGES),
        variant.shared,
    )


def ring_modules(
    type: QuantType, gemv_tokens: int, activation_bytes: int, variants: Sequence[RingVariant]
) -> list[ModuleSpec]:
    """One compilation a gate and variant: they take longest."""
    tokens = [m for m in RING_TOKENS if m == 1 or m // 2 < gemv_tokens]
    return [
        ModuleSpec(
            "gemv_ring.cu",
            tuple(ring_name(type, m, activation_bytes, gated, variant) for m in tokens),
        )
        for gated in (False, True)
        for variant in variants
    ]
