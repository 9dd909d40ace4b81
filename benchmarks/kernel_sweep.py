"""Which way to cut the products of one token, a matrix shape and a type at a time: a table's evidence."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kernel_lab import Lab, Report

from streamer.gguf.quants import QuantType
from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.launch import ModuleSpec
from streamer.kernels.matmul_arguments import FLOATS, Output, QuantizedRows, SourceRows, device_matrix
from streamer.kernels.matmul_launch import GemvBuild, gemv_name
from streamer.kernels.matmul_ring import (
    RingVariant,
    ring_fits,
    ring_name,
    ring_shape,
    ring_tokens,
    ring_variant,
)
from streamer.kernels.ops import Activation
from streamer.plan.layouts import resident_nbytes
from streamer.plan.plan import Layout

Q = QuantType
AT_LEAST = 400 << 20  # bytes of weights a measurement goes through: many times the L2 cache


@dataclass(frozen=True)
class Shape:
    """A product of a decode step: rows of the gate where gated."""

    name: str
    n_in: int
    n_out: int
    gated: bool = False


EIGHT = (
    Shape("8B qkv", 4096, 6144),
    Shape("8B o", 4096, 4096),
    Shape("8B gate+up", 4096, 14336, True),
    Shape("8B down", 14336, 4096),
    Shape("8B head", 4096, 128256),
)
HYBRID_BF16 = (
    Shape("27B qkv", 5120, 10240),
    Shape("27B z", 5120, 6144),
    Shape("27B out", 6144, 5120),
    Shape("27B q,k,v", 5120, 14336),
)
HYBRID_Q8 = (Shape("27B gate+up", 5120, 17408, True), Shape("27B down", 17408, 5120))

RINGS = (
    RingVariant(4, 1, 8),
    RingVariant(4, 2, 8),
    RingVariant(2, 2, 8),
    RingVariant(2, 4, 8),
    RingVariant(4, 2, 4),
    RingVariant(8, 1, 4),
    RingVariant(4, 1, 16),
    RingVariant(4, 1, 4, blocks=2),
    RingVariant(4, 2, 8, shared=200 << 10),
    RingVariant(4, 1, 4, blocks=4, shared=54 << 10),
)
FEW_RINGS = tuple(RINGS[i] for i in (0, 2, 4, 7, 9))
FLOAT_RINGS = (
    RingVariant(2, 1, 8),
    RingVariant(2, 2, 8),
    RingVariant(4, 1, 8),
    RingVariant(2, 2, 4),
    RingVariant(2, 2, 8, shared=200 << 10),
    RingVariant(2, 1, 4, blocks=2),
)
BUILDS = ((GemvBuild(4, 3), 128), (GemvBuild(2, 6), 64), (GemvBuild(4, 4), 64), (GemvBuild(4, 3), 32))
FEW_BUILDS = ((GemvBuild(2, 4), 64), (GemvBuild(2, 4), 32), (GemvBuild(4, 2), 64))
CASES: tuple[
    tuple[QuantType, tuple[Shape, ...], tuple[RingVariant, ...], tuple[tuple[GemvBuild, int], ...]], ...
] = (
    (Q.Q8_0, (*EIGHT, *HYBRID_Q8), RINGS, BUILDS),
    (
        Q.BF16,
        HYBRID_BF16,
        FLOAT_RINGS,
        ((GemvBuild(2, 6), 128), (GemvBuild(4, 3), 128), (GemvBuild(4, 3), 64)),
    ),
    (Q.Q4_K, (EIGHT[1], EIGHT[2], EIGHT[3]), FEW_RINGS, FEW_BUILDS),
    (
        Q.Q6_K,
        (EIGHT[3], EIGHT[4]),
        (RingVariant(2, 2, 8), RingVariant(2, 2, 4), RingVariant(4, 2, 4)),
        FEW_BUILDS,
    ),
    (Q.Q4_1, (EIGHT[2],), FEW_RINGS, FEW_BUILDS),
)


def example(type: QuantType, shape: Shape) -> list[Output]:
    """The outputs of a launch, without memory."""
    one = Output(device_matrix(type, 0, shape.n_in, shape.n_out), DeviceArray(0, 1, shape.n_out))
    return [one] * (1 + shape.gated)


def fits(type: QuantType, shape: Shape, variant: RingVariant) -> bool:
    if not ring_fits(type, shape.n_in) or not ring_tokens(type, shape.n_in, 1, 2, variant):
        return False
    return ring_shape(example(type, shape), 1, 2, variant, gated=shape.gated).stages >= 2


def compile_all(lab: Lab) -> None:
    specs: dict[ModuleSpec, None] = {}
    for type, shapes, rings, builds in CASES:
        for gated in sorted({s.gated for s in shapes}):
            for ring in (*rings, ring_variant(type, gated)):
                specs[ModuleSpec("gemv_ring.cu", (ring_name(type, 1, 2, gated, ring),))] = None
            for build, _ in builds:
                specs[ModuleSpec("gemv.cu", (gemv_name(type, 1, 2, gated, build),))] = None
    with ThreadPoolExecutor(16) as threads:
        lab.store.compile(list(specs), threads)


class Case:
    """One matrix shape of one type, with enough copies that the L2 cache cannot hold them."""

    def __init__(self, lab: Lab, report: Report, type: QuantType, shape: Shape) -> None:
        self.lab, self.report, self.type, self.shape = lab, report, type, shape
        layout = Layout.FILE if type in FLOATS else Layout.PLANES
        one = (1 + shape.gated) * resident_nbytes(layout, type, shape.n_in * shape.n_out)
        copies = max(2, AT_LEAST // one)
        self.nbytes = copies * one
        self.outputs = [self._outputs() for _ in range(copies)]
        self.activation = Activation.SILU if shape.gated else None
        self.source = lab.normal(1, shape.n_in)
        self.quantized = None if type in FLOATS else lab.quantized(1, shape.n_in, 2)
        self.found: list[tuple[float, str]] = []

    def _outputs(self) -> list[Output]:
        out = DeviceArray(self.lab.bytes(4 * self.shape.n_out), 1, self.shape.n_out)
        linears = [
            self.lab.linear(self.type, self.shape.n_in, self.shape.n_out) for _ in range(1 + self.shape.gated)
        ]
        return [Output(self.lab.matmul.matrix(w.weight), out) for w in linears]

    def measure(self, name: str, launch: Callable[[Sequence[Output]], None]) -> None:
        def every() -> None:
            for outputs in self.outputs:
                launch(outputs)

        seconds, _ = self.lab.graph_seconds(every, replays=2)
        self.found.append((self.nbytes / seconds / self.report.roofline, name))

    def ring(self, variant: RingVariant, x: QuantizedRows | SourceRows, name: str) -> None:
        if not fits(self.type, self.shape, variant):
            return
        launcher, stream = self.lab.matmul.launcher, self.lab.handle
        self.measure(
            name,
            lambda outputs: launcher.gemv_ring(
                outputs, x, 1, stream=stream, activation=self.activation, variant=variant
            ),
        )

    def gemv(self, build: GemvBuild, threads: int) -> None:
        launcher, stream, x = self.lab.matmul.launcher, self.lab.handle, self.quantized or self.source
        self.measure(
            f"gemv,r{build.rows}t{threads}b{build.blocks}",
            lambda outputs: launcher.gemv(
                outputs, x, 1, stream=stream, activation=self.activation, build=build, threads=threads
            ),
        )

    def run(self, rings: Sequence[RingVariant], builds: Sequence[tuple[GemvBuild, int]]) -> None:
        raw = SourceRows(self.source)
        for v in rings:
            self.ring(v, self.quantized or raw, v.name)
        default = ring_variant(self.type, self.shape.gated)
        self.ring(default, raw, "default,raw")
        norm = self.lab.norm(self.shape.n_in).weight.handle.address
        self.ring(default, SourceRows(self.source, norm, 1e-5), "default,normed")
        for build, threads in builds:
            self.gemv(build, threads)
        line = "  ".join(f"{share:.3f} {name}" for share, name in sorted(self.found, reverse=True))
        s = self.shape
        self.report.note(f"{self.type.name} {s.name} {s.n_out}x{s.n_in}: {line}")


def sweep(lab: Lab, report: Report) -> None:
    """One token, every way to cut a shape: shares of the read roofline, best first, a line a shape."""
    compile_all(lab)
    for type, shapes, rings, builds in CASES:
        for shape in shapes:
            lab.free()
            Case(lab, report, type, shape).run(rings, builds)
