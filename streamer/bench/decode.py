"""`ggufd bench decode`: prompt and generation rates of one model through the engine, without HTTP.

    ggufd bench decode MODEL [--device auto] [--key NAME] [--repeats 3] [--out DIR]

Each figure is the median of `--repeats` requests, one at a time, random prompts, no prefix reuse:
tg128: 128 tokens after the first, greedy; ppN: prompt tokens a second for N tokens and one generated;
ttft16: milliseconds to the first token of a 16-token prompt; first16: the same for the first request of all.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from streamer.bench.arguments import count
from streamer.bench.record import RESULTS, new_record, prepare_directory
from streamer.config import cache_directory, load_config
from streamer.engine.engine import Engine
from streamer.engine.request import FinishEvent, FinishReason, Request, SamplingParameters, TokenEvent
from streamer.plan.plan import Plan, Role
from streamer.residency.ledger import Ledger
from streamer.runtime.options import StartOptions
from streamer.runtime.planning import RuntimeOptions
from streamer.runtime.start import Runtime, start_runtime

GENERATED = 128
PROMPTS = (512, 2048)
CONTEXT = 4096


@dataclass(frozen=True)
class Outcome:
    """One request: times in seconds."""

    ttft_s: float
    prompt_s: float
    decode_tokens_per_s: float  # after the first token; 0 for one token
    weight_h2d_bytes: int


@dataclass
class ModelRates:
    """What one model gave. Rates in tokens a second, medians."""

    key: str
    metrics: dict[str, float] = field(default_factory=dict)
    runs: list[dict[str, object]] = field(default_factory=list)


async def run_request(engine: Engine, prompt_ids: Sequence[int], max_tokens: int, name: str) -> Outcome:
    """One greedy request to its end. RuntimeError if it does not end by its length."""
    request = Request(
        id=name,
        prompt_ids=prompt_ids,
        sampling=SamplingParameters(temperature=0.0),
        max_tokens=max_tokens,
        use_prefix_cache=False,
    )
    started, times = time.perf_counter(), []
    handle = engine.submit_nowait(request)
    async for event in handle.events():
        if isinstance(event, TokenEvent):
            times.append(time.perf_counter())
        if isinstance(event, FinishEvent):
            finish = event
    if finish.reason is not FinishReason.LENGTH:
        raise RuntimeError(f"{name} ended with {finish.reason}: {finish.error}")
    decoded = len(times) - 1
    rate = decoded / (times[-1] - times[0]) if decoded > 0 else 0.0
    return Outcome(times[0] - started, finish.prompt_ms / 1e3, rate, finish.weight_h2d_bytes)


async def measure(runtime: Runtime, key: str, repeats: int) -> ModelRates:
    """Every figure of one running model."""
    rng = np.random.default_rng(0)
    n_ids = runtime.model.architecture.n_valid_ids
    rates = ModelRates(key)

    def prompt(n: int) -> list[int]:
        return [int(i) for i in rng.integers(0, n_ids, n)]

    async def repeated(name: str, n: int, max_tokens: int, times: int) -> list[Outcome]:
        outcomes = [
            await run_request(runtime.engine, prompt(n), max_tokens, f"{name}-{i}") for i in range(times)
        ]
        rates.runs += [{"model": key, "case": name, **vars(o)} for o in outcomes]
        return outcomes

    (first,) = await repeated("first16", 16, 1, 1)
    rates.metrics["first16_ms"] = 1e3 * first.ttft_s
    decodes = await repeated("tg128", 16, GENERATED + 1, repeats)
    rates.metrics["tg128_tok_s"] = statistics.median(o.decode_tokens_per_s for o in decodes)
    for n in PROMPTS:
        if n + 1 <= runtime.model.plan.n_ctx:
            prefills = await repeated(f"pp{n}", n, 1, repeats)
            rates.metrics[f"pp{n}_tok_s"] = n / statistics.median(o.prompt_s for o in prefills)
    short = await repeated("ttft16", 16, 1, max(repeats, 5))
    rates.metrics["ttft16_ms"] = 1e3 * statistics.median(o.ttft_s for o in short)
    return rates


def bytes_a_token(plan: Plan, expert_share: float = 1.0) -> int:
    """Weight bytes one sequence's decode step must read: no embedding rows, the chosen share of experts."""
    total = 0.0
    tied = not any(w.role is Role.OUTPUT and len(w.tensor.shape) > 1 for w in plan.weights)
    for weight in plan.weights:
        if weight.role is Role.EMBEDDING and not tied:
            continue
        stack = weight.role is Role.EXPERTS and len(weight.tensor.shape) == 3
        total += weight.resident_nbytes * (expert_share if stack else 1.0)
    return int(total)


def flops_a_token(plan: Plan, expert_share: float = 1.0) -> float:
    """Multiply-adds times two of all matrices a prompt token passes; not the head, which is once a prompt."""
    total = 0.0
    for weight in plan.weights:
        if len(weight.tensor.shape) < 2 or weight.role in (Role.EMBEDDING, Role.OUTPUT):
            continue
        stack = weight.role is Role.EXPERTS and len(weight.tensor.shape) == 3
        total += 2.0 * weight.tensor.n_elements * (expert_share if stack else 1.0)
    return total


def expert_share(metadata: Mapping[str, object]) -> float:
    """Experts used over experts there."""
    name = metadata.get("general.architecture")
    count, used = (metadata.get(f"{name}.{key}") for key in ("expert_count", "expert_used_count"))
    return float(used) / float(count) if isinstance(count, int) and isinstance(used, int) and count else 1.0


async def measure_file(
    path: str, key: str, *, device: str, repeats: int, sequences: int = 4, kv_type: str = "auto"
) -> tuple[ModelRates, Runtime]:
    """Start the model, measure, stop. The runtime comes back closed: its plan and device name are of use."""
    options = StartOptions(
        path=path,
        device=device,
        runtime=RuntimeOptions(n_ctx=CONTEXT, max_sequences=sequences, kv_type=kv_type),
        cache_directory=cache_directory() / "kernels",
    )
    started = time.perf_counter()
    runtime = await start_runtime(options, Ledger(model=path))
    try:
        start_s = time.perf_counter() - started
        rates = await measure(runtime, key, repeats)
        rates.metrics["start_s"] = start_s
    finally:
        await asyncio.to_thread(runtime.close)
    return rates, runtime


def print_table(all_rates: Sequence[ModelRates]) -> None:
    table = Table("model", "figure", "value")
    for rates in all_rates:
        for name, value in rates.metrics.items():
            table.add_row(rates.key, name, f"{value:,.2f}")
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ggufd bench decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--key", help="name of the model in the record [the file's stem]")
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    load_config({"device": options.device}, environ={})
    prepare_directory(options.out)
    key = options.key or Path(options.model).stem
    rates, runtime = asyncio.run(
        measure_file(options.model, key, device=options.device, repeats=options.repeats)
    )
    print_table([rates])
    capabilities = runtime.device.capabilities
    record = new_record(
        "decode",
        gpu=capabilities.name if capabilities.kind == "cuda" else None,
        parameters={"model": Path(options.model).name, "repeats": options.repeats, "context": CONTEXT},
        metrics={f"{key}.{name}": value for name, value in rates.metrics.items()},
        runs=rates.runs,
    )
    print(record.write(options.out))
    return 0
