"""Which way to cut the products of one token, a matrix shape and a type at a time: a table's evidence."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kernel_lab import Lab, Report

from streamer.errors import DeviceError
from streamer.gguf.quants import QuantType
from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.launch import ModuleSpec
from streamer.kernels.matmul_arguments import FLOATS, Output, QuantizedRows, SourceRows
from streamer.kernels.matmul_launch import GemvBuild, gemv_name
from streamer.kernels.matmul_ring import RingVariant, ring_name, ring_variant
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

LARGE_NBYTES = 200 << 10  # shared memory of one block that has a multiprocessor to itself
CUTS = (
    RingVariant(4, 2, 8),
    RingVariant(2, 2, 8),
    RingVariant(2, 4, 8),
    RingVariant(4, 2, 8, shared=LARGE_NBYTES),
    RingVariant(4, 2, 16, shared=LARGE_NBYTES),
)
FLOAT_CUTS = (
    RingVariant(2, 2, 8),
    RingVariant(4, 1, 8),
    RingVariant(2, 2, 8, shared=LARGE_NBYTES),
    RingVariant(4, 1, 16, shared=LARGE_NBYTES),
)
BUILDS = (GemvBuild(4, 3, 128), GemvBuild(2, 6, 64), GemvBuild(4, 4, 64), GemvBuild(8, 2, 128))
FLOAT_BUILDS = (GemvBuild(2, 6, 128), GemvBuild(4, 3, 128), GemvBuild(4, 3, 64), GemvBuild(8, 2, 128))
FEW_BUILDS = (GemvBuild(2, 4, 64), GemvBuild(2, 4, 32), GemvBuild(4, 2, 64))
CASES: tuple[tuple[QuantType, tuple[Shape, ...], tuple[RingVariant, ...], tuple[GemvBuild, ...]], ...] = (
    (Q.Q8_0, (*EIGHT, *HYBRID_Q8), CUTS, BUILDS),
    (Q.BF16, HYBRID_BF16, FLOAT_CUTS, FLOAT_BUILDS),
    (Q.Q4_K, (EIGHT[1], EIGHT[2], EIGHT[3]), CUTS, FEW_BUILDS),
    (Q.Q6_K, (EIGHT[3], EIGHT[4]), CUTS, FEW_BUILDS),
    (Q.Q4_1, (EIGHT[2],), CUTS, FEW_BUILDS),
)


def fits(type: QuantType, shape: Shape, variant: RingVariant) -> bool:
    return ring_variant((variant,), type, shape.n_in, 1, 2) is not None


def compile_all(lab: Lab) -> None:
    specs: dict[ModuleSpec, None] = {}
    for type, shapes, rings, builds in CASES:
        for gated in sorted({s.gated for s in shapes}):
            for ring in rings:
                specs[ModuleSpec("gemv_ring.cu", (ring_name(type, 1, 2, gated, ring),))] = None
            for build in builds:
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

        try:
            seconds, _ = self.lab.graph_seconds(every, replays=2)
        except DeviceError as error:  # a cut that this device cannot launch
            self.report.note(f"{self.type.name} {self.shape.name} {name}: {error}")
            return
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

    def gemv(self, build: GemvBuild) -> None:
        launcher, stream, x = self.lab.matmul.launcher, self.lab.handle, self.quantized or self.source
        self.measure(
            f"gemv,r{build.rows}t{build.threads}b{build.blocks}",
            lambda outputs: launcher.gemv(
                outputs, x, 1, stream=stream, activation=self.activation, build=build
            ),
        )

    def run(self, rings: Sequence[RingVariant], builds: Sequence[GemvBuild]) -> None:
        raw = SourceRows(self.source)
        for v in rings:
            self.ring(v, self.quantized or raw, v.name)
        norm = self.lab.norm(self.shape.n_in).weight.handle.address
        self.ring(rings[1], raw, f"{rings[1].name},raw")
        self.ring(rings[1], SourceRows(self.source, norm, 1e-5), f"{rings[1].name},normed")
        for build in builds:
            self.gemv(build)
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
