"""Routed experts by layers of the qwen3moe 30B-A3B shape: decode in graphs, prefill eagerly.

    python benchmarks/experts.py [--only decode,prefill] [--type Q8_0,Q4_K] [--layers 8] [--out DIRECTORY]

Weights are random with real shapes (48 layers: 2048 wide, 128 experts of 768, 8 used), enough layers in turn
that none is in the cache. A share is the bytes of the experts that random routing is expected to choose, once
each, over seconds over the read rate measured in the same run.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from streamer.kernels.cuda_experts import CudaExperts, ExpertOptions
from streamer.kernels.launch import KernelStore
from streamer.kernels.matmul_launch import ROWS_MODULE, product_modules
from streamer.kernels.ops import Experts, Linear, Norm, Weight
from streamer.plan.layouts import resident_nbytes

N_EMBD, N_FF, N_EXPERTS, N_USED, N_LAYERS = 2048, 768, 128, 8, 48


@dataclasses.dataclass
class Model:
    type: QuantType
    norm: Norm
    layers: list[Experts]

    def nbytes(self, n_tokens: int) -> float:
        """Expert bytes a layer reads when n_tokens choose at random."""
        layout = self.layers[0].down.handle.layout
        one = 3 * resident_nbytes(layout, self.type, N_EMBD * N_FF * N_EXPERTS) / N_EXPERTS
        return one * N_EXPERTS * (1 - (1 - N_USED / N_EXPERTS) ** n_tokens)


def build(lab: Lab, type: QuantType, n_layers: int) -> Model:
    def stack(n_in: int, n_out: int) -> Weight:
        weight = lab.weight(type, n_in, n_out * N_EXPERTS)
        return dataclasses.replace(weight, shape=(n_in, n_out, N_EXPERTS))

    layers = []
    for _ in range(n_layers):
        router = Linear(lab.weight(QuantType.F32, N_EMBD, N_EXPERTS))
        gate, up, down = stack(N_EMBD, N_FF), stack(N_EMBD, N_FF), stack(N_FF, N_EMBD)
        layers.append(Experts(router, gate, up, None, down, N_USED))
    return Model(type, lab.norm(N_EMBD), layers)


def compile_all(lab: Lab, model: Model) -> None:
    """Every kernel of a layer: what a dry run finds, and the products around it."""
    experts, counted = CudaExperts(lab.store, lab.matmul), Arena(0, None)
    lab.matmul.begin(counted, stream=0)
    experts.begin(counted, stream=0)
    experts.routed_experts(DeviceArray(0, 8, N_EMBD), model.norm, model.layers[0])
    options = lab.matmul.options
    specs = [ROWS_MODULE, *experts.modules]
    for type in (QuantType.F32, model.type):
        specs += product_modules(type, gemv_tokens=8, activation_bytes=options.activation_bytes)
    with ThreadPoolExecutor(16) as threads:
        lab.store.compile(list(dict.fromkeys(specs)), threads)


def layers(
    lab: Lab, model: Model, n_tokens: int, options: ExpertOptions, *, products: bool = True
) -> Callable[[], None]:
    """All layers on the same rows; without `products` only what precedes the experts: norm and router."""
    experts = CudaExperts(lab.store, lab.matmul, options)
    counted = Arena(0, None)
    lab.matmul.begin(counted, stream=0)
    experts.begin(counted, stream=0)
    experts.routed_experts(DeviceArray(0, n_tokens, N_EMBD), model.norm, model.layers[0])
    x, arena = lab.normal(n_tokens, N_EMBD), Arena(lab.bytes(counted.peak), counted.peak)

    def launch() -> None:
        lab.matmul.begin(arena, stream=lab.handle)
        experts.begin(arena, stream=lab.handle)
        for layer in model.layers:
            arena.reset()
            if products:
                experts.routed_experts(x, model.norm, layer)
            else:
                lab.matmul.norm_project(x, model.norm, [layer.router])

    return launch


class Report:
    """Rows printed as they come, kept for the record."""

    def __init__(self, roofline: float) -> None:
        self.roofline = roofline
        self.runs: list[dict[str, Any]] = []

    def add(self, what: str, seconds: float, model: Model, n_tokens: int) -> None:
        """`seconds` of all layers of the model."""
        a_layer = seconds / len(model.layers)
        share = model.nbytes(n_tokens) / a_layer / self.roofline
        flops = 2 * 3 * N_EMBD * N_FF * N_USED * n_tokens
        run = {
            "what": f"{model.type.name} {what}",
            "us_a_layer": round(1e6 * a_layer, 2),
            "share": round(share, 3),
            "tflops": round(1e-12 * flops / a_layer, 1),
            "ms_48_layers": round(1e3 * N_LAYERS * a_layer, 3),
        }
        self.runs.append(run)
        print(
            f"{run['what']:<48} {run['us_a_layer']:>9.2f} us a layer  share {run['share']:5.3f}  "
            f"{run['tflops']:6.1f} TFLOP/s  {run['ms_48_layers']:8.3f} ms for 48 layers",
            flush=True,
        )


def decode(lab: Lab, report: Report, model: Model) -> None:
    """Graphs: pairs one by one against tiles, and how large tiles should be."""
    for n in (1, 2, 4, 8, 16, 32, 64):
        seconds, _ = lab.graph_seconds(layers(lab, model, n, ExpertOptions(), products=False))
        report.add(f"{n} rows, norm and router only", seconds, model, n)
        variants = {"one by one": ExpertOptions(gemv_tokens=n)} if n <= 16 else {}
        variants |= {f"tiles of {t}": ExpertOptions(gemv_tokens=0, tile=t) for t in (16, 32)}
        for name, options in variants.items():
            seconds, _ = lab.graph_seconds(layers(lab, model, n, options))
            report.add(f"{n} rows, {name}", seconds, model, n)


def prefill(lab: Lab, report: Report, model: Model) -> None:
    """Eager launches."""
    largest = (128,) if model.type is not QuantType.BF16 else ()
    for n in (128, 256, 512, 1024, 2048):
        seconds = lab.seconds(layers(lab, model, n, ExpertOptions(), products=False))
        report.add(f"{n} rows, norm and router only", seconds, model, n)
        for tile in (32, 64, *largest):
            seconds = lab.seconds(layers(lab, model, n, ExpertOptions(tile=tile)))
            report.add(f"{n} rows, tiles of {tile}", seconds, model, n)


SECTIONS: dict[str, Callable[[Lab, Report, Model], None]] = {f.__name__: f for f in (decode, prefill)}


def run(lab: Lab, report: Report, types: Sequence[str], n_layers: int, sections: Sequence[str]) -> None:
    for name in types:
        model = build(lab, QuantType[name], n_layers)
        compile_all(lab, model)
        for section in sections:
            SECTIONS[section](lab, report, model)
        lab.free()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--type", default="Q8_0", help="quant types, by comma")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    cache = cache_directory() / "kernels"
    device = open_cuda(0, checksum_code=checksum_code(cache))
    arch = architecture(device.capabilities.compute_capability)
    lab = Lab(device, KernelStore(device, arch, cache_directory=cache), arch)
    report = Report(lab.read_roofline())
    print(f"{device.capabilities.name}: read roofline {report.roofline / 1e12:.3f} TB/s")
    run(lab, report, arguments.type.split(","), arguments.layers, arguments.only.split(","))
    record = new_record(
        "experts",
        gpu=device.capabilities.name,
        parameters=vars(arguments) | {"out": ""},
        metrics={"read_bytes_per_s": report.roofline},
        runs=report.runs,
    )
    print(record.write(arguments.out))
    lab.matmul.close()
    device.close()


if __name__ == "__main__":
    main()
