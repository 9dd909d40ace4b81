"""Decode and prefill of real shapes on a GPU against the rooflines measured in the same run.

    python benchmarks/decode.py --models DIR --out DIR [KEY ...] [--repeats 3] [--commit REV]

Keys: llama8b_q8_0, llama8b_q4_k, qwen35_27b, qwen3moe_30b (random weights, written with make_gguf.py if DIR
lacks them), smollm2_q4_1 (the real file, which must be in DIR). Shares: bytes a token must read over the
measured read rate; matrix operations over the measured bf16 rate.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kernel_lab import Lab

from streamer.bench.decode import (
    ModelRates,
    bytes_a_token,
    expert_share,
    flops_a_token,
    measure_file,
    print_table,
)
from streamer.bench.record import RESULTS, new_record
from streamer.config import cache_directory
from streamer.device.cuda import open_cuda
from streamer.kernels.checksum import checksum_code
from streamer.kernels.compile import architecture
from streamer.kernels.launch import KernelStore

HERE = Path(__file__).resolve().parent
MAKE: dict[str, tuple[str, ...]] = {  # key -> arguments of make_gguf.py
    "llama8b_q8_0": ("llama8b", "--type", "q8_0"),
    "llama8b_q4_k": ("llama8b", "--type", "q4_k"),
    "qwen35_27b": ("qwen35_27b",),
    "qwen3moe_30b": ("qwen3moe_30b", "--type", "q8_0"),
}
FILES = {"smollm2_q4_1": "SmolLM2-135M-Instruct.Q4_1.gguf"}


def rooflines() -> tuple[float, float, str]:
    """Bytes a second read, bf16 operations a second, the device's name."""
    cache = cache_directory() / "kernels"
    device = open_cuda(0, checksum_code=checksum_code(cache))
    try:
        arch = architecture(device.capabilities.compute_capability)
        lab = Lab(device, KernelStore(device, arch, cache_directory=cache), arch)
        read, operations = lab.read_roofline(), lab.bf16_roofline()
        lab.close()
        return read, operations, device.capabilities.name
    finally:
        device.close()


def model_path(key: str, models: Path) -> Path:
    path = models / FILES.get(key, f"{key}.gguf")
    if not path.exists():
        started = time.perf_counter()
        maker = [sys.executable, str(HERE / "make_gguf.py"), MAKE[key][0], str(path), *MAKE[key][1:]]
        subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)
        print(f"wrote {path.name} in {time.perf_counter() - started:.1f} s", flush=True)
    return path


def add_shares(rates: ModelRates, runtime: Any, read: float, operations: float) -> None:
    """The floors, and how near they were come."""
    plan, metadata = runtime.model.plan, runtime.model.directory.metadata
    share = expert_share(metadata)
    nbytes, flops = bytes_a_token(plan, share), flops_a_token(plan, share)
    m = rates.metrics
    m["bytes_a_token"], m["flops_a_token"] = float(nbytes), flops
    m["tg128_floor_ms"] = 1e3 * nbytes / read
    m["tg128_roofline_share"] = m["tg128_tok_s"] * nbytes / read
    if "pp2048_tok_s" in m:
        m["pp2048_flops_share"] = m["pp2048_tok_s"] * flops / operations


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("keys", nargs="*", default=[*MAKE, *FILES])
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit")
    parser.add_argument("--keep", nargs="*", default=(), help="keys whose files stay")
    options = parser.parse_args()
    read, operations, name = rooflines()
    metrics = {"read_roofline_gbps": read / 1e9, "bf16_tflops": operations / 1e12}
    print(metrics, flush=True)
    all_rates: list[ModelRates] = []
    for key in options.keys:
        path = model_path(key, options.models)
        try:
            rates, runtime = asyncio.run(measure_file(str(path), key, device="cuda", repeats=options.repeats))
            add_shares(rates, runtime, read, operations)
            all_rates.append(rates)
            print_table([rates])
        except Exception as error:  # noqa: BLE001 - one model's failure leaves the others' figures
            print(f"{key}: {type(error).__name__}: {error}", flush=True)
        if key in MAKE and key not in options.keep:
            path.unlink()
    for rates in all_rates:
        metrics |= {f"{rates.key}.{k}": v for k, v in rates.metrics.items()}
    runs = [run for rates in all_rates for run in rates.runs]
    parameters = {"keys": options.keys, "repeats": options.repeats}
    record = new_record(
        "decode", gpu=name, parameters=parameters, metrics=metrics, runs=runs, commit=options.commit
    )
    print(record.write(options.out))
    return 0 if len(all_rates) == len(options.keys) else 1


if __name__ == "__main__":
    sys.exit(main())
