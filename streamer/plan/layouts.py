"""How each quant type lies in device memory, a table a kind of device. Change the tables, not the code.

`make_plan` takes a `Layouts`; the kernels of a device read weights exactly in the layout named here.
"""

from collections.abc import Callable

from streamer.gguf.quants import QuantType
from streamer.plan.plan import Layout, Role

Layouts = Callable[[QuantType, Role], Layout]

PLANE_ALIGNMENT = 16  # bytes: what one vector load of a kernel takes

# Bytes a quant block has in each plane, in the order the planes lie in memory: quants first, scales last.
PLANES: dict[QuantType, tuple[int, ...]] = {
    QuantType.Q8_0: (32, 2),  # int8 quants | f16 scales
    QuantType.Q4_0: (16, 2),
    QuantType.Q4_1: (16, 4),  # nibbles | f16 scale and minimum
    QuantType.Q5_0: (16, 4, 2),  # nibbles | high bits | f16 scales
    QuantType.Q5_1: (16, 4, 4),
    QuantType.IQ4_NL: (16, 2),
    QuantType.MXFP4: (16, 1),  # nibbles | E8M0 scales
    QuantType.Q2_K: (64, 16, 4),  # 2-bit quants | scales and minimums | f16 d, dmin
    QuantType.Q3_K: (64, 32, 12, 2),  # low bits | high bit masks | scales | f16 d
    QuantType.Q4_K: (128, 16),  # nibbles | d, dmin, scales and minimums in pairs of sub-blocks
    QuantType.Q5_K: (128, 32, 16),  # nibbles | fifth bits | as Q4_K
    QuantType.Q6_K: (128, 64, 16, 2),  # low 4 bits | high 2 bits | int8 scales | f16 d
    QuantType.IQ4_XS: (128, 8),  # nibbles | d and scales
}
_CUDA_FILE = frozenset({QuantType.F32, QuantType.F16, QuantType.BF16})  # read as the file has them


def host_layout(type: QuantType, role: Role) -> Layout:
    """The host keeps the file's bytes; its kernels prepare their own arrays."""
    return Layout.FILE


def cuda_layout(type: QuantType, role: Role) -> Layout:
    """Planes or file for types with a native kernel; anything else is dequantized to bf16 at load."""
    if type in _CUDA_FILE:
        return Layout.FILE
    return Layout.PLANES if type in PLANES else Layout.BF16


LAYOUTS: dict[str, Layouts] = {"host": host_layout, "cuda": cuda_layout}  # by Capabilities.kind


def resident_nbytes(layout: Layout, type: QuantType, n_elements: int) -> int:
    """Device bytes of a weight once its layout is applied."""
    n_blocks = n_elements // type.block_elements
    match layout:
        case Layout.FILE:
            return n_blocks * type.block_nbytes
        case Layout.BF16:
            return 2 * n_elements
        case Layout.PLANES:
            return sum(_aligned(n_blocks * nbytes) for nbytes in PLANES[type])


def plane_offsets(type: QuantType, n_elements: int) -> tuple[int, ...]:
    """Where each plane starts in a PLANES weight, in bytes."""
    n_blocks = n_elements // type.block_elements
    offsets = [0]
    for nbytes in PLANES[type][:-1]:
        offsets.append(offsets[-1] + _aligned(n_blocks * nbytes))
    return tuple(offsets)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
