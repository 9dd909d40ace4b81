"""What the kernels of routed experts are given, which instance fits which weights, how work is cut. Pure."""

import ctypes
from dataclasses import dataclass

from streamer.gguf.quants import QuantType
from streamer.kernels.launch import ModuleSpec
from streamer.kernels.matmul_arguments import FLOATS, DeviceMatrix, QuantizedArgument
from streamer.kernels.ops import Experts

MAX_EXPERTS = 1024  # experts_route.cu: a thread each
MAX_USED = 32  # a lane each
MAX_FUSED_EXPERTS = 256  # experts that it has registers for
GATE_ROWS = 32  # rows of a pair that a block of expert_gate_up takes
TILE_ROWS = 128  # rows of weights that a block of expert_tiles takes
TILES = (16, 32, 64, 128)  # pairs a tile


class RouteParams(ctypes.Structure):
    """experts_route.cu"""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("logits", "ids", "weights", "order", "tiles")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("n_tokens", "n_experts", "n_used", "n_tiles", "log_tile")),
    )


class CombineParams(ctypes.Structure):
    """experts_route.cu"""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "y", "weights", "shared", "shared_gate")),
        *((name, ctypes.c_int32) for name in ("n_used", "columns")),
    )


_SIZES = ("K", "rows", "rows_an_expert", "up_offset", "n_used", "pad")


class ExpertParams(ctypes.Structure):
    """experts_gemv.cu"""

    _fields_ = (
        ("gate", ctypes.c_uint64 * 4),
        ("up", ctypes.c_uint64 * 4),
        ("x", QuantizedArgument),
        *((name, ctypes.c_uint64) for name in ("x_float", "ids", "weights")),
        ("next", QuantizedArgument),
        *((name, ctypes.c_uint64) for name in ("out", "shared", "shared_gate")),
        *((name, ctypes.c_int32) for name in _SIZES),
    )


class TileParams(ctypes.Structure):
    """experts_tiles.cu"""

    _fields_ = (
        ("gate", ctypes.c_uint64 * 4),
        ("up", ctypes.c_uint64 * 4),
        *((name, ctypes.c_uint64) for name in ("x", "order", "tiles", "out")),
        *((name, ctypes.c_int32) for name in _SIZES),
    )


@dataclass(frozen=True)
class Stacks:
    """The expert matrices of a layer as the kernels read them: an expert after the other, row after row."""

    gate: DeviceMatrix
    up: DeviceMatrix  # the same matrix as `gate` where the file has them in one
    down: DeviceMatrix
    gate_rows: int  # rows an expert has in the stack of gates
    up_offset: int  # rows of an expert before up's
    n_embd: int
    n_ff: int
    n_experts: int
    n_used: int

    @property
    def products_only(self) -> bool:
        """F32 weights are not for tensor cores."""
        return QuantType.F32 in (self.gate.type, self.up.type, self.down.type)


# ---- choices: pure -------------------------------------------------------------------------------


def refusal(experts: Experts) -> str | None:
    """Why the kernels cannot run these experts, or None."""
    n_ff, n_embd, n_experts = experts.down.shape
    if n_experts > MAX_EXPERTS:
        return f"{n_experts} experts are more than {MAX_EXPERTS}"
    if experts.n_used > MAX_USED:
        return f"{experts.n_used} experts a token are more than {MAX_USED}"
    if n_ff % 16 or n_embd % 16:
        return f"expert matrices of {n_embd} x {n_ff} are not multiples of 16"
    return None


def tile_of(n_rows: int, n_used: int, n_experts: int, types: frozenset[QuantType]) -> int:
    """Pairs a tile: about as many as an expert has on average; float types lack registers for the largest."""
    mean = n_rows * n_used / n_experts
    if mean > 160 and not types & FLOATS:
        return 128
    return 16 if mean <= 8 else 32 if mean <= 24 else 64


def most_tiles(n_pairs: int, n_experts: int, tile: int) -> int:
    """Tiles of one expert's pairs there can be, whatever the routing."""
    return n_pairs // tile + min(n_experts, n_pairs)


def experts_a_lane(n_experts: int) -> int:
    return 1 << (-(-n_experts // 32) - 1).bit_length()


def down_rows(type: QuantType) -> int:
    """Rows a block of expert_down takes."""
    return 4 if type is QuantType.Q8_0 else 2


def gate_up_name(gate: QuantType, up: QuantType, activation_bytes: int) -> tuple[str, int]:
    """(instance, threads a block)"""
    split = gate is up is QuantType.Q8_0
    nbytes = 1 if {gate, up} <= FLOATS else activation_bytes
    name = f"expert_gate_up<{gate.name}, {up.name}, {str(split).lower()}, {nbytes}>"
    return name, 512 if split else 256


def down_name(type: QuantType, activation_bytes: int) -> str:
    return f"expert_down<{type.name}, {down_rows(type)}, {1 if type in FLOATS else activation_bytes}>"


def tiles_name(first: QuantType, second: QuantType, tile: int, *, gated: bool) -> str:
    return f"expert_tiles<{first.name}, {second.name}, {tile}, {str(gated).lower()}>"


def tiles_shared(tile: int) -> int:
    """Bytes of shared memory: a stage of weights, two of activations, rows of x."""
    return 2 * TILE_ROWS * (TILE_ROWS + 2 * tile) + 4 * tile


def expert_modules(stacks: Stacks, activation_bytes: int) -> list[ModuleSpec]:
    """Every compilation that these experts may ask for, whatever the number of rows."""
    per, types = experts_a_lane(stacks.n_experts), (stacks.gate.type, stacks.up.type)
    routes = [f"route<{per}, false>", "group<1024>", "combine<false>", "combine<true>"]
    if stacks.n_experts <= MAX_FUSED_EXPERTS:
        routes.append(f"route<{per}, true>")
    down = stacks.down.type
    specs = [
        ModuleSpec("experts_route.cu", tuple(routes)),
        ModuleSpec("experts_gemv.cu", (gate_up_name(*types, activation_bytes)[0],)),
        ModuleSpec("experts_gemv.cu", (down_name(down, activation_bytes),)),
    ]
    if not stacks.products_only:
        most = TILES[:-1] if {*types, down} & FLOATS else TILES
        specs += [ModuleSpec("experts_tiles.cu", (tiles_name(*types, t, gated=True),)) for t in most]
        specs += [ModuleSpec("experts_tiles.cu", (tiles_name(down, down, t, gated=False),)) for t in most]
    return specs
