"""The laboratory of the product kernels: variants against each other and the same run's read roofline.

    python benchmarks/kernels.py [--only ab,prefill,sweep] [--out DIRECTORY]

Weights are random with real shapes. A share is resident bytes over seconds over the measured read rate.
"""

import argparse
from pathlib import Path
from typing import Any

from kernel_lab import Lab, Report
from kernel_steps import LLAMA_8B, build, steps, whole_step
from kernel_sweep import sweep

from streamer.bench.record import RESULTS, new_record
from streamer.config import cache_directory
from streamer.device.cuda import open_cuda
from streamer.gguf.quants import QuantType
from streamer.kernels.checksum import checksum_code
from streamer.kernels.compile import architecture
from streamer.kernels.cuda_array import Arena, DeviceArray
from streamer.kernels.cuda_matmul import matrix_of
from streamer.kernels.launch import KernelStore
from streamer.kernels.matmul_arguments import Output
from streamer.plan.layouts import resident_nbytes

Q = QuantType


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
            step = whole_step(lab, model, n, head=False)
            seconds = lab.seconds(step, repeats=3) * LLAMA_8B.n_layers / 8
            rate = 1e-12 * n * flops_a_token / seconds
            report.add(
                f"8B {type.name} chunk of {n} without attention",
                seconds,
                0,
                tokens_per_s=n / seconds,
                tflops=rate,
            )


SECTIONS = {"ab": steps, "prefill": prefill, "sweep": sweep}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    cache = cache_directory() / "kernels"
    device = open_cuda(0, checksum_code=checksum_code(cache))
    arch = architecture(device.capabilities.compute_capability)
    store = KernelStore(device, arch, cache_directory=cache)
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
