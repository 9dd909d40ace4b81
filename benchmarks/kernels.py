"""The laboratory of the product kernels: variants against each other and the same run's read roofline.

    python benchmarks/kernels.py [--only sweep,steps,tokens,prefill] [--out DIRECTORY]

Weights are random with real shapes. A share is resident bytes over seconds over the measured read rate.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_lab import Lab, Report
from kernel_sweep import sweep

from streamer.bench.record import RESULTS, new_record
from streamer.config import cache_directory
from streamer.device.cuda import open_cuda
from streamer.gguf.quants import QuantType
from streamer.kernels.checksum import checksum_code
from streamer.kernels.compile import architecture
from streamer.kernels.cuda_array import Arena, DeviceArray
from streamer.kernels.cuda_matmul import MatmulOptions, matrix_of
from streamer.kernels.launch import KernelStore, ModuleSpec
from streamer.kernels.matmul_arguments import Output
from streamer.kernels.matmul_launch import ROWS_MODULE, product_modules
from streamer.kernels.matmul_ring import RingVariant, ring_variant
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


# ---- decode: a step without attention ----------------------------------------------------------------------


CUTS = (
    RingVariant(4, 1, 8, prefetch=4),
    RingVariant(4, 1, 8, prefetch=16),
    RingVariant(4, 2, 8),
    RingVariant(2, 2, 8),
    RingVariant(2, 2, 8, prefetch=8),
    RingVariant(4, 2, 4),
    RingVariant(4, 1, 4, blocks=2),
    RingVariant(4, 1, 4, blocks=4, shared=54 << 10),
    RingVariant(4, 2, 8, shared=200 << 10),
)


def steps(lab: Lab, report: Report) -> None:
    """Products with everything between them but attention: what a decode step costs beside attention."""
    kinds = {
        "ring": MatmulOptions(),
        "ring, quantized apart": MatmulOptions(source_elements=0),
        "ring, down quantized apart": MatmulOptions(source_elements=8192),
        "ring, 8 bit": MatmulOptions(activation_bytes=1),
        "gemv": MatmulOptions(ring=False),
    }
    for shapes, type in ((LLAMA_8B, Q.Q8_0), (LLAMA_8B, Q.Q4_K), (SMOLLM2, Q.Q4_1)):
        lab.free()
        model = build(lab, shapes, type)
        for kind, options in kinds.items():
            for n in (1, 2) if kind in ("ring", "gemv") else (1,):
                lab.matmul.options = options
                seconds, eager = lab.graph_seconds(whole_step(lab, model, n))
                what = f"{shapes.name} {type.name} step, {n} tokens, {kind}"
                report.add(what, seconds, model.nbytes, tokens_per_s=n / seconds, eager_ms=1e3 * eager)
        lab.matmul.options = MatmulOptions()
        for cut in CUTS if shapes is LLAMA_8B else ():
            lab.matmul.launcher.ring_cut = lambda *_, cut=cut: cut  # type: ignore[misc]
            seconds, _ = lab.graph_seconds(whole_step(lab, model, 1))
            what = f"{shapes.name} {type.name} step, 1 tokens, {cut.name}"
            report.add(what, seconds, model.nbytes, tokens_per_s=1 / seconds)
        lab.matmul.launcher.ring_cut = ring_variant


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


# ---- from 1 to 128 tokens ---------------------------------------------------------------------------------


def tokens(lab: Lab, report: Report) -> None:
    """Where gemv should give way to tensor cores, and how far these reach."""
    for type in (Q.Q8_0, Q.Q4_K, Q.BF16):
        lab.free()
        model = build(lab, LLAMA_8B, type, layers=8)
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


SECTIONS = {f.__name__: f for f in (sweep, steps, tokens, prefill)}


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
