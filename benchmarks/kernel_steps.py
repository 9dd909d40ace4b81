"""Whole steps without attention, the defaults against alternatives: what the tables in kernels/ rest on."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kernel_lab import Lab, Report

from streamer.errors import DeviceError
from streamer.gguf.quants import QuantType
from streamer.kernels.cuda_array import Arena
from streamer.kernels.cuda_graph import Graph
from streamer.kernels.cuda_matmul import MatmulOptions, needed_modules
from streamer.kernels.launch import ModuleSpec
from streamer.kernels.matmul_arguments import FLOATS
from streamer.kernels.matmul_launch import GemvBuild, gemv_build, gemv_name
from streamer.kernels.matmul_ring import SHARED_NBYTES, RingVariant
from streamer.kernels.ops import Activation, Linear
from streamer.plan.layouts import resident_nbytes

Q = QuantType
LARGE_NBYTES = 200 << 10  # shared memory of one block that has a multiprocessor to itself


@dataclass(frozen=True)
class Shapes:
    """A dense model's matrices."""

    name: str
    n_layers: int
    n_embd: int
    n_qkv: int  # rows of q, k, v together
    n_heads_out: int  # inputs of the output projection
    n_ff: int
    n_vocab: int


LLAMA_8B = Shapes("8B", 32, 4096, 6144, 4096, 14336, 128256)
HYBRID = Shapes("27B, 16 layers", 16, 5120, 16384, 6144, 17408, 32768)
SMOLLM2 = Shapes("SmolLM2", 30, 576, 960, 576, 1536, 49152)


@dataclass
class Model:
    """Weights of a `Shapes` on the device, fused as decode fuses them."""

    shapes: Shapes
    layers: list[dict[str, Linear]]
    head: Linear

    @property
    def nbytes(self) -> int:
        every = [*(w for layer in self.layers for w in layer.values()), self.head]
        return sum(resident_nbytes(w.weight.handle.layout, w.weight.type, w.n_in * w.n_out) for w in every)


def build(
    lab: Lab, shapes: Shapes, type: QuantType, *, attention: QuantType | None = None, layers: int = 0
) -> Model:
    """`attention`: the type of the projections around attention, else `type`."""
    s, around = shapes, attention or type
    made = [
        {
            "qkv": lab.linear(around, s.n_embd, s.n_qkv),
            "o": lab.linear(around, s.n_heads_out, s.n_embd),
            "gate": lab.linear(type, s.n_embd, s.n_ff),
            "up": lab.linear(type, s.n_embd, s.n_ff),
            "down": lab.linear(type, s.n_ff, s.n_embd),
        }
        for _ in range(layers or s.n_layers)
    ]
    return Model(s, made, lab.linear(type, s.n_embd, s.n_vocab))


def whole_step(lab: Lab, model: Model, n_tokens: int, *, head: bool = True) -> Callable[[], None]:
    """Products with everything between them but attention; without `head`, layers only."""
    s, m = model.shapes, lab.matmul
    x, a, norm = lab.normal(n_tokens, s.n_embd), lab.normal(n_tokens, s.n_heads_out), lab.norm(s.n_embd)
    logits = lab.normal(n_tokens, s.n_vocab) if head else None
    size = 64 * n_tokens * (s.n_ff + s.n_qkv + s.n_embd) + (1 << 20)
    arena = Arena(lab.bytes(size), size)

    def launch() -> None:
        m.begin(arena, stream=lab.handle)
        for layer in model.layers:
            arena.reset()
            m.norm_project(x, norm, [layer["qkv"]])
            m.project_add(a, layer["o"], x, post_norm=None)
            arena.reset()
            m.gated_feed_forward(
                x, norm, layer["gate"], layer["up"], layer["down"], activation=Activation.SILU, post_norm=None
            )
        if logits is not None:
            arena.reset()
            m.head(x, norm, model.head, logits)

    return launch


# ---- ways to compute a step --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """Options and builds of gemv in place of the defaults."""

    name: str = "defaults"
    options: MatmulOptions = field(default_factory=MatmulOptions)
    builds: Mapping[QuantType, GemvBuild] = field(default_factory=dict)


def gemv(type: QuantType, rows: int, blocks: int, threads: int = 0, tokens: int = 2) -> Way:
    name = f"{type.name} by gemv r{rows}b{blocks}" + (f"t{threads}" if threads else "")
    options = MatmulOptions(gemv_tokens=tokens, rings={})
    return Way(name, options, {type: GemvBuild(rows, blocks, threads)})


def ring(
    type: QuantType, rows: int, iterations: int = 2, warps: int = 8, *, shared: int = SHARED_NBYTES
) -> Way:
    variant = RingVariant(rows, iterations, warps, shared=shared)
    return Way(f"{type.name} by {variant.name}", MatmulOptions(rings={type: (variant, RingVariant())}))


DIRECT = Way("tensor cores", MatmulOptions(gemv_tokens=0))
FOUR = Way("as few tokens", MatmulOptions(gemv_tokens=4))
REGISTERS = Way("through registers", MatmulOptions(tiled_tokens=128, tiled_tokens_bf16=128))
LIBRARY = Way("cuBLASLt", MatmulOptions(tiled_tokens=0, tiled_tokens_bf16=0))
BF16_LIBRARY = Way("BF16 by cuBLASLt", MatmulOptions(tiled_tokens=128, tiled_tokens_bf16=0))

# Of a model (shapes, type, type around attention): by tokens, what is tried beside the defaults.
FEW: dict[tuple[Shapes, QuantType, QuantType], dict[int, tuple[Way, ...]]] = {
    (LLAMA_8B, Q.Q8_0, Q.Q8_0): {
        1: (
            gemv(Q.Q8_0, 4, 3, 64),
            gemv(Q.Q8_0, 4, 4),
            gemv(Q.Q8_0, 8, 2),
            ring(Q.Q8_0, 4),
            ring(Q.Q8_0, 4, 2, 16, shared=LARGE_NBYTES),
        ),
        2: (gemv(Q.Q8_0, 4, 2), gemv(Q.Q8_0, 4, 3), ring(Q.Q8_0, 4), DIRECT),
        4: (FOUR, gemv(Q.Q8_0, 4, 2, tokens=4)),
    },
    (LLAMA_8B, Q.Q4_K, Q.Q4_K): {
        1: (
            Way("quantized in every launch", MatmulOptions(source_elements=32768)),
            ring(Q.Q4_K, 4, 2, 16, shared=LARGE_NBYTES),
            gemv(Q.Q4_K, 4, 2),
        ),
        2: (ring(Q.Q4_K, 4, 2, 16, shared=LARGE_NBYTES), DIRECT),
        4: (FOUR,),
    },
    (HYBRID, Q.Q8_0, Q.BF16): {
        1: (
            gemv(Q.BF16, 2, 6),
            gemv(Q.BF16, 8, 2),
            ring(Q.BF16, 4, 1),
            ring(Q.BF16, 2, 2, shared=LARGE_NBYTES),
            ring(Q.BF16, 4, 1, 16, shared=LARGE_NBYTES),
        ),
        2: (gemv(Q.BF16, 2, 2), DIRECT),
        4: (FOUR,),
    },
    (SMOLLM2, Q.Q4_1, Q.Q4_1): {1: (gemv(Q.Q4_1, 2, 4),)},
}
MANY = (16, 32, 64, 128)  # tokens


def ways(n_tokens: int, type: QuantType, around: QuantType) -> tuple[Way, ...]:
    if n_tokens < MANY[0]:
        return (Way(), *FEW[_shapes_of(type, around), type, around].get(n_tokens, ()))
    return (REGISTERS, LIBRARY, *((BF16_LIBRARY,) if around is not type else ()))


def _shapes_of(type: QuantType, around: QuantType) -> Shapes:
    return next(shapes for shapes, *types in FEW if types == [type, around])


def steps(lab: Lab, report: Report) -> None:
    """A line a way; the defaults are first among those of few tokens."""
    _compile(lab)
    for (shapes, type, around), few in FEW.items():
        lab.free()
        model = build(lab, shapes, type, attention=around)
        for n in (*few, *(MANY if shapes != SMOLLM2 else ())):
            launch = whole_step(lab, model, n)
            for way in ways(n, type, around):
                types = type.name if around is type else f"{type.name}+{around.name}"
                _measure(lab, report, f"{shapes.name} {types} {n} tokens, {way.name}", launch, way, model, n)
        if shapes == LLAMA_8B and type is Q.Q8_0:
            _capture_unknown(lab, report, model)
    lab.free()


def _measure(
    lab: Lab, report: Report, what: str, launch: Callable[[], None], way: Way, model: Model, n: int
) -> None:
    lab.matmul.options = way.options
    lab.matmul.launcher.build = lambda type, tokens: way.builds.get(type) or gemv_build(type, tokens)
    try:
        seconds, _ = lab.graph_seconds(launch, replays=5 if n < MANY[0] else 2)
        report.add(what, seconds, model.nbytes, tokens_per_s=n / seconds)
    except DeviceError as error:
        report.note(f"{what}: {error}")
    finally:
        lab.matmul.options, lab.matmul.launcher.build = MatmulOptions(), gemv_build


def _capture_unknown(lab: Lab, report: Report, model: Model) -> None:
    """Whether shapes that cuBLASLt has not met may come first in a capture, as a daemon's graphs do."""
    try:
        graph = Graph(lab.device, lab.stream.raw, whole_step(lab, model, 100))
        graph.replay(stream=lab.handle)
        lab.sync()
        report.note(f"captured 100 tokens, never run before: {graph.n_nodes} nodes, replayed")
        graph.close()
    except DeviceError as error:
        report.note(f"captured 100 tokens, never run before: {error}")


def _compile(lab: Lab) -> None:
    with ThreadPoolExecutor(16) as threads:
        lab.store.compile(list(dict.fromkeys(_modules())), threads)


def _modules() -> Iterator[ModuleSpec]:
    for (_, type, around), few in FEW.items():
        for n, others in few.items():
            for way in (Way(), *others):
                yield from needed_modules({type, around}, way.options)
                for built, how in way.builds.items():
                    nbytes = 1 if built in FLOATS else way.options.activation_bytes
                    names = tuple(gemv_name(built, n, nbytes, gated, how) for gated in (False, True))
                    yield ModuleSpec("gemv.cu", names)
