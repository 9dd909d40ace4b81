"""The laboratory of the product kernels: variants against each other and the same run's read roofline.

    python benchmarks/kernels.py [--only decode,types,tokens,shapes,prefill,layers] [--out DIRECTORY]

Weights are random with real shapes. A share is resident bytes over seconds over the measured read rate.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_lab import Lab

from streamer.bench.record import RESULTS, new_record
from streamer.config import cache_directory
from streamer.device.cuda import open_cuda
from streamer.gguf.quants import QuantType
from streamer.kernels.checksum import checksum_code
from streamer.kernels.compile import architecture
from streamer.kernels.cuda_array import Arena, DeviceArray
from streamer.kernels.cuda_matmul import MatmulOptions, matrix_of
from streamer.kernels.launch import KernelStore, ModuleSpec
from streamer.kernels.matmul_arguments import NextRows, Output, QuantizedRows
from streamer.kernels.matmul_launch import ROWS_MODULE, GemvVariant, gemv_name, product_modules
from streamer.kernels.ops import Activation, Linear
from streamer.plan.layouts import resident_nbytes

Q = QuantType


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


LLAMA_8B = Shapes("llama 8B", 32, 4096, 6144, 4096, 14336, 128256)
SMOLLM2 = Shapes("SmolLM2 135M", 30, 576, 960, 576, 1536, 49152)
# every matrix of qwen35 27B: rows of the projections, (n_in, n_out, how often)
QWEN35_27B = (
    (5120, 10240, 48),
    (5120, 6144, 48),
    (6144, 5120, 64),
    (5120, 14336, 16),
    (5120, 34816, 64),
    (17408, 5120, 64),
    (5120, 248320, 1),
)


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


def build(lab: Lab, shapes: Shapes, type: QuantType, *, layers: int | None = None) -> Model:
    s = shapes
    made = [
        {
            "qkv": lab.linear(type, s.n_embd, s.n_qkv),
            "o": lab.linear(type, s.n_heads_out, s.n_embd),
            "gate": lab.linear(type, s.n_embd, s.n_ff),
            "up": lab.linear(type, s.n_embd, s.n_ff),
            "down": lab.linear(type, s.n_ff, s.n_embd),
        }
        for _ in range(layers or s.n_layers)
    ]
    return Model(s, made, lab.linear(type, s.n_embd, s.n_vocab))


class Report:
    """Rows printed as they come, kept for the record."""

    def __init__(self, roofline: float) -> None:
        self.roofline = roofline
        self.runs: list[dict[str, Any]] = []

    def add(self, what: str, seconds: float, nbytes: float = 0.0, **more: float) -> None:
        share = nbytes / seconds / self.roofline
        run = {"what": what, "ms": round(1e3 * seconds, 4), "share": round(share, 3)}
        run |= {k: float(f"{v:.4g}") for k, v in more.items()}
        self.runs.append(run)
        extra = "  ".join(f"{k} {v:g}" for k, v in run.items() if k not in ("what", "ms", "share"))
        print(f"{what:<66} {run['ms']:>9.4f} ms  share {share:5.3f}  {extra}", flush=True)


# ---- decode: all products of an 8B model as one graph -----------------------------------------------------


def products_alone(
    lab: Lab, model: Model, n_tokens: int, nbytes: int, variants: dict[str, GemvVariant]
) -> Callable[[], None]:
    """129 products without what lies between them."""
    s, launcher = model.shapes, lab.matmul.launcher
    is_float = model.head.weight.type in (Q.BF16, Q.F32)
    widths = {s.n_embd, s.n_heads_out, s.n_ff}
    x = {w: lab.normal(n_tokens, w) if is_float else lab.quantized(n_tokens, w, nbytes) for w in widths}
    out = {
        n: DeviceArray(lab.bytes(4 * n * n_tokens), n_tokens, n)
        for n in (s.n_qkv, s.n_embd, s.n_ff, s.n_vocab)
    }

    def one(linears: Sequence[Linear], name: str, activation: Activation | None = None) -> None:
        outputs = [Output(lab.matmul.matrix(w.weight), out[w.n_out]) for w in linears]
        launcher.gemv(
            outputs,
            x[linears[0].n_in],
            n_tokens,
            stream=lab.handle,
            activation=activation,
            variant=variants[name],
        )

    def launch() -> None:
        for layer in model.layers:
            one([layer["qkv"]], "qkv")
            one([layer["o"]], "o")
            one([layer["gate"], layer["up"]], "gate", Activation.SILU)
            one([layer["down"]], "down")
        one([model.head], "head")

    return launch


def same(variant: GemvVariant) -> dict[str, GemvVariant]:
    return dict.fromkeys(("qkv", "o", "gate", "down", "head"), variant)


def decode(lab: Lab, report: Report) -> None:
    """Q8_0, one token: how to cut and build gemv; then whole layers with norms and quantization."""
    model = build(lab, LLAMA_8B, Q.Q8_0)
    grid = [
        GemvVariant(threads=t, blocks=b, ahead=a)
        for t in (0, 128, 256)
        for b in (4, 5, 6)
        for a in (False, True)
    ]
    grid = [v for v in grid if not (v.ahead and v.blocks > 4)]
    grid += [GemvVariant(rows=4, threads=t, blocks=3) for t in (128, 256)]
    grid += [GemvVariant(threads=64, blocks=6), GemvVariant(threads=32, blocks=6)]
    compile_variants(lab.store, Q.Q8_0, grid, (1, 2))
    for nbytes in (2, 1):
        for v in grid if nbytes == 2 else grid[:4]:
            seconds, eager = lab.graph_seconds(products_alone(lab, model, 1, nbytes, same(v)))
            cut = f"rows {v.rows} threads {v.threads} blocks {v.blocks} ahead {v.ahead:d}"
            what = f"8B Q8_0 products, {8 * nbytes} bit, {cut}"
            report.add(what, seconds, model.nbytes, tokens_per_s=1 / seconds, launch_us=1e6 * eager / 129)
    layer_steps(lab, report, model, (1, 2))


def layer_steps(lab: Lab, report: Report, model: Model, tokens: Sequence[int]) -> None:
    """Products with everything between them but attention: what a decode step costs beside attention."""
    for options in (
        MatmulOptions(),
        MatmulOptions(quantize_in_place=False),
        MatmulOptions(activation_bytes=1),
        MatmulOptions(gemv_tokens=0),
    ):
        for n in tokens:
            lab.matmul.options = options
            seconds, eager = lab.graph_seconds(whole_step(lab, model, n))
            kind = f"{8 * options.activation_bytes} bit" if options.gemv_tokens else "mma"
            kind += " in place" if options.quantize_in_place else ""
            what = f"{model.shapes.name} {model.head.weight.type.name} step, {n} tokens, {kind}"
            report.add(what, seconds, model.nbytes, tokens_per_s=n / seconds, eager_ms=1e3 * eager)
    lab.matmul.options = MatmulOptions()
    seconds, _ = lab.graph_seconds(fused_step(lab, model, 1))
    what = f"{model.shapes.name} {model.head.weight.type.name} step, 1 token, 4 launches a layer"
    report.add(what, seconds, model.nbytes, tokens_per_s=1 / seconds)


def fused_step(lab: Lab, model: Model, n_tokens: int) -> Callable[[], None]:
    """Four launches a layer: norms and quantization happen inside the products before and after them."""
    s, launcher, matrix = model.shapes, lab.matmul.launcher, lab.matmul.matrix
    x, out = lab.normal(n_tokens, s.n_embd), lab.normal(n_tokens, max(s.n_qkv, s.n_ff, s.n_vocab))
    normed, attended, hidden = (lab.quantized(n_tokens, n, 2) for n in (s.n_embd, s.n_heads_out, s.n_ff))
    norm, squares = lab.norm(s.n_embd), lab.normal(n_tokens, s.n_embd // 32).address
    to_normed = NextRows(normed, norm.weight.handle.address, squares)
    deferred = squares, norm.epsilon

    def output(linear: Linear, to: DeviceArray, residual: int = 0) -> Output:
        array = DeviceArray(to.address, n_tokens, linear.n_out)
        return Output(matrix(linear.weight), array, residual=residual)

    def launch() -> None:
        def gemv(linears: Sequence[Linear], rows: QuantizedRows, to: DeviceArray, **options: Any) -> None:
            residual = x.address if to is x else 0
            outputs = [output(w, to, residual) for w in linears]
            launcher.gemv(outputs, rows, n_tokens, stream=lab.handle, **options)

        for layer in model.layers:
            pair = [layer["gate"], layer["up"]]
            gemv([layer["qkv"]], normed, out, squares=deferred)
            gemv([layer["o"]], attended, x, next_rows=to_normed)
            gemv(pair, normed, out, squares=deferred, activation=Activation.SILU, next_rows=NextRows(hidden))
            gemv([layer["down"]], hidden, x, next_rows=to_normed)
        gemv([model.head], normed, out, squares=deferred)

    return launch


def whole_step(lab: Lab, model: Model, n_tokens: int) -> Callable[[], None]:
    s, m = model.shapes, lab.matmul
    x, logits = lab.normal(n_tokens, s.n_embd), lab.normal(n_tokens, s.n_vocab)
    a, norm = lab.normal(n_tokens, s.n_heads_out), lab.norm(s.n_embd)
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
        arena.reset()
        m.head(x, norm, model.head, logits)

    return launch


def compile_variants(
    store: KernelStore,
    type: QuantType,
    variants: Sequence[GemvVariant],
    nbytes: Sequence[int],
    tokens: int = 1,
) -> None:
    specs = [
        ModuleSpec("gemv.cu", (gemv_name(type, tokens, b, gated, v),))
        for v in variants
        for b in nbytes
        for gated in (False, True)
    ]
    with ThreadPoolExecutor(16) as threads:
        store.compile(list(dict.fromkeys(specs)), threads)


def types(lab: Lab, report: Report) -> None:
    """One token, other types, products alone: 8 layers and the head (beyond the cache all the same)."""
    for type in (Q.Q4_K, Q.Q6_K, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_K, Q.Q3_K, Q.Q2_K, Q.IQ4_XS, Q.MXFP4, Q.BF16):
        lab.free()
        model = build(lab, LLAMA_8B, type, layers=8)
        builds = [GemvVariant(threads=t, blocks=b) for t in (64, 128) for b in (3, 4)]
        variants = [GemvVariant(), GemvVariant(ahead=True), *builds]
        compile_variants(lab.store, type, variants, (2,))
        for v in variants:
            seconds, _ = lab.graph_seconds(products_alone(lab, model, 1, 2, same(v)))
            what = (
                f"8B {type.name} products (8 layers), threads {v.threads} blocks {v.blocks} ahead {v.ahead:d}"
            )
            report.add(what, seconds, model.nbytes)


# ---- from 1 to 128 tokens ---------------------------------------------------------------------------------


def tokens(lab: Lab, report: Report) -> None:
    """Where gemv should give way to tensor cores, and how far these reach."""
    for type in (Q.Q8_0, Q.Q4_K, Q.BF16):
        lab.free()
        model = build(lab, LLAMA_8B, type, layers=8)
        for n in (1, 2, 4, 8):
            for nbytes in (2, 1) if type is not Q.BF16 else (1,):
                seconds, _ = lab.graph_seconds(products_alone(lab, model, n, nbytes, same(GemvVariant())))
                report.add(f"8B {type.name} gemv {8 * nbytes} bit, {n} tokens", seconds, model.nbytes)
        for n in (1, 2, 4, 8, 16, 32, 64, 128):
            for tiled in (False, True) if n <= 16 else (True,):
                seconds, _ = lab.graph_seconds(mma_alone(lab, model, n, tiled))
                kind = "tiled" if tiled else "direct"
                report.add(f"8B {type.name} mma {kind}, {n} tokens", seconds, model.nbytes)


def mma_alone(lab: Lab, model: Model, n_tokens: int, tiled: bool) -> Callable[[], None]:
    s, launcher = model.shapes, lab.matmul.launcher
    x = {w: lab.bf16(n_tokens, w) for w in {s.n_embd, s.n_heads_out, s.n_ff}}
    out = {
        n: DeviceArray(lab.bytes(4 * n * n_tokens), n_tokens, n)
        for n in (s.n_qkv, s.n_embd, s.n_ff, s.n_vocab)
    }

    def one(linears: Sequence[Linear], activation: Activation | None = None) -> None:
        outputs = [Output(lab.matmul.matrix(w.weight), out[w.n_out]) for w in linears]
        launcher.mma(outputs, x[linears[0].n_in], stream=lab.handle, activation=activation, tiled=tiled)

    def launch() -> None:
        for layer in model.layers:
            one([layer["qkv"]])
            one([layer["o"]])
            one([layer["gate"], layer["up"]], Activation.SILU)
            one([layer["down"]])
        one([model.head])

    return launch


# ---- single shapes ----------------------------------------------------------------------------------------


def shapes(lab: Lab, report: Report) -> None:
    """Q8_0 matrices one shape at a time, copies of it in turn: where a share is lost."""
    eight = ((4096, 6144, 32), (4096, 4096, 32), (4096, 28672, 32), (14336, 4096, 32), (4096, 128256, 1))
    small = (
        (576, 960, 30),
        (576, 576, 30),
        (576, 3072, 30),
        (1536, 576, 30),
        (576, 49152, 1),
        (4096, 1024, 32),
    )
    for n_in, n_out, count in (*eight, *QWEN35_27B, *small):
        lab.free()
        copies = max(2, min(count, (2 << 30) // (n_in * n_out)))
        linears = [lab.linear(Q.Q8_0, n_in, n_out) for _ in range(copies)]
        x, out = lab.quantized(1, n_in, 2), DeviceArray(lab.bytes(4 * n_out), 1, n_out)
        nbytes = copies * resident_nbytes(linears[0].weight.handle.layout, Q.Q8_0, n_in * n_out)

        for threads in (0, 32, 64, 128, 256):
            variant = GemvVariant(threads=threads)

            def launch(
                linears: list[Linear] = linears, x: Any = x, out: Any = out, variant: Any = variant
            ) -> None:
                for w in linears:
                    output = Output(lab.matmul.matrix(w.weight), out)
                    lab.matmul.launcher.gemv([output], x, 1, stream=lab.handle, variant=variant)

            seconds, _ = lab.graph_seconds(launch)
            report.add(f"Q8_0 {n_out}x{n_in}, threads {threads}", seconds, nbytes, us=1e6 * seconds / copies)


def layers(lab: Lab, report: Report) -> None:
    """Small models: nodes are everything."""
    for type in (Q.Q4_1, Q.Q8_0):
        lab.free()
        layer_steps(lab, report, build(lab, SMOLLM2, type), (1, 8))
    for type in (Q.Q4_K,):
        lab.free()
        layer_steps(lab, report, build(lab, LLAMA_8B, type), (1,))


# ---- prefill ----------------------------------------------------------------------------------------------


def prefill(lab: Lab, report: Report) -> None:
    """Dequantize to scratch + cuBLASLt: each alone, together, and a whole chunk without attention."""
    flops_a_token = 2 * 8.03e9 - 2 * LLAMA_8B.n_embd * LLAMA_8B.n_vocab
    for type in (Q.Q8_0, Q.Q4_K):
        lab.free()
        linear = lab.linear(type, 4096, 14336)
        matrix, scratch = matrix_of(linear.weight), lab.bytes(2 * 4096 * 14336)

        def dequantize(matrix: Any = matrix, scratch: int = scratch) -> None:
            lab.matmul.launcher.dequantize(matrix, scratch, 0, 14336, stream=lab.handle)

        seconds = lab.seconds(dequantize)
        moved = resident_nbytes(linear.weight.handle.layout, type, 4096 * 14336) + 2 * 4096 * 14336
        report.add(f"dequantize {type.name} 14336x4096 to bf16", seconds, moved)
    weight = lab.linear(Q.BF16, 4096, 14336)
    for n in (64, 128, 256, 512, 2048):
        x, out = lab.bf16(n, 4096), DeviceArray(lab.bytes(4 * n * 14336), n, 14336)

        def product(x: Any = x, out: Any = out) -> None:
            lab.matmul.begin(Arena(1, 1), stream=lab.handle)
            lab.matmul._multiply_dequantized(Output(matrix_of(weight.weight), out), x)

        seconds = lab.seconds(product)
        report.add(f"cuBLASLt bf16 {n}x4096x14336", seconds, 0, tflops=2e-12 * n * 4096 * 14336 / seconds)
    for type in (Q.Q8_0, Q.BF16):
        lab.free()
        model = build(lab, LLAMA_8B, type, layers=8)
        for n in (128, 256, 512, 2048):
            step = whole_layers(lab, model, n)
            seconds = lab.seconds(step, repeats=3) * LLAMA_8B.n_layers / 8
            rate = 1e-12 * n * flops_a_token / seconds
            report.add(
                f"8B {type.name} chunk of {n} without attention",
                seconds,
                0,
                tokens_per_s=n / seconds,
                tflops=rate,
            )


def whole_layers(lab: Lab, model: Model, n_tokens: int) -> Callable[[], None]:
    """All layers of a chunk, without the head (one row of it)."""
    s, m = model.shapes, lab.matmul
    x, a, norm = lab.normal(n_tokens, s.n_embd), lab.normal(n_tokens, s.n_heads_out), lab.norm(s.n_embd)
    size = 16 * n_tokens * (s.n_ff + s.n_qkv + s.n_embd) + (1 << 20)
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

    return launch


SECTIONS = {f.__name__: f for f in (decode, types, tokens, shapes, layers, prefill)}


def wanted_modules() -> Iterator[ModuleSpec]:
    yield ROWS_MODULE
    for type in (Q.Q8_0, Q.Q4_K, Q.BF16, Q.Q4_1):
        for nbytes in (1, 2):
            yield from product_modules(type, gemv_tokens=8, activation_bytes=nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    cache = cache_directory() / "kernels"
    device = open_cuda(0, checksum_code=checksum_code(cache))
    arch = architecture(device.capabilities.compute_capability)
    store = KernelStore(device, arch, cache_directory=cache)
    with ThreadPoolExecutor(16) as threads:
        store.compile(list(dict.fromkeys(wanted_modules())), threads)
    lab = Lab(device, store, arch)
    report = Report(lab.read_roofline())
    print(f"{device.capabilities.name}: read roofline {report.roofline / 1e12:.3f} TB/s")
    for name in arguments.only.split(","):
        SECTIONS[name](lab, report)
        lab.free()
    metrics = {"read_bytes_per_s": report.roofline}
    record = new_record(
        "kernels",
        gpu=device.capabilities.name,
        parameters=vars(arguments) | {"out": ""},
        metrics=metrics,
        runs=report.runs,
    )
    print(record.write(arguments.out))
    lab.matmul.close()
    device.close()


if __name__ == "__main__":
    main()
