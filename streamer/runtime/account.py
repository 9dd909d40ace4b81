"""What a start and a running engine say of themselves.

The residency object, a status line, numbers for /metrics.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from streamer.device.base import CopyPhase
from streamer.residency.ledger import Ledger
from streamer.residency.snapshot import Residency, to_json
from streamer.residency.state import Phase
from streamer.runtime.start import Runtime, weight_bytes
from streamer.runtime.step_times import StepTimes


@dataclass(frozen=True)
class Snapshot:
    """Everything `/metrics` shows that is not counted by the HTTP side. Bytes, seconds, tokens."""

    residency_bytes: Mapping[str, int] = field(default_factory=dict)  # by state
    residency_ratio: float = 0.0
    load_seconds: float = 0.0
    load_phase_seconds: Mapping[str, float] = field(default_factory=dict)
    h2d_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (phase, kind)
    queue: int = 0
    sequences: Mapping[str, int] = field(default_factory=dict)  # by state
    kv_pages: Mapping[str, int] = field(default_factory=dict)  # by state
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_prompt_tokens: int = 0
    step_seconds: Mapping[str, tuple[Mapping[float, int], float]] = field(default_factory=dict)
    device_bytes: Mapping[str, int] = field(default_factory=dict)  # by use
    pinned_bytes: int = 0


def residency_object(ledger: Ledger, runtime: Runtime | None, *, with_layers: bool) -> dict[str, object]:
    """INTERFACE's object. Until the device is ours to ask, what has completed is what was sent."""
    residency = ledger.statistics()
    h2d_load, h2d_serve = residency.bytes_resident, 0
    if runtime is not None:
        h2d_load = weight_bytes(runtime.device, CopyPhase.LOAD)
        h2d_serve = weight_bytes(runtime.device, CopyPhase.SERVE)
    phases = {str(phase): seconds for phase, seconds in residency.phase_seconds.items()}
    known = to_json(residency, h2d_load=h2d_load, h2d_serve=h2d_serve, with_layers=with_layers)
    return {**known, "phase_seconds": phases}


def status_line(r: Residency) -> str:
    """For the service manager."""
    if r.phase is Phase.READY:
        return f"serving {r.model} on {r.device}: {r.bytes_total} bytes resident in {r.elapsed_s:.2f} s"
    eta = "" if r.eta_s is None else f", {r.eta_s:.1f} s left"
    done = f"{r.bytes_resident} of {r.bytes_total} bytes ({100 * r.fraction:.0f} %)"
    return f"loading ({r.phase}): {done}, {r.bytes_per_s / 1e6:.0f} MB/s{eta}"


def snapshot(
    ledger: Ledger, runtime: Runtime | None, steps: StepTimes, own_tokens: tuple[int, int]
) -> Snapshot:
    """`own_tokens`: prompt and generated tokens that no request asked for."""
    r = ledger.statistics()
    found = Snapshot(
        residency_bytes={str(state): n for state, n in r.bytes_by_state.items()},
        residency_ratio=r.fraction,
        load_seconds=r.elapsed_s,
        load_phase_seconds={str(phase): s for phase, s in r.phase_seconds.items()},
        step_seconds=steps.statistics(),
    )
    return found if runtime is None else _with_engine(found, runtime, own_tokens)


def _with_engine(found: Snapshot, runtime: Runtime, own_tokens: tuple[int, int]) -> Snapshot:
    engine, device, memory = (
        runtime.engine.statistics(),
        runtime.device.statistics(),
        runtime.model.plan.memory,
    )
    return replace(
        found,
        h2d_bytes={(str(p), str(k)): n for (p, k), n in device.uploaded_bytes.items()},
        queue=engine.waiting,
        sequences={
            "waiting": engine.waiting,
            "prefilling": engine.prefilling,
            "decoding": engine.running - engine.prefilling,
        },
        kv_pages=engine.pages,
        prompt_tokens=engine.prompt_tokens - own_tokens[0],
        generated_tokens=engine.generated_tokens - own_tokens[1],
        cached_prompt_tokens=engine.cached_prompt_tokens,
        device_bytes={
            "allocated": device.allocated_bytes,
            "weights": memory.weights,
            "kv_cache": memory.kv_cache,
            "recurrent_state": memory.recurrent_state,
            "workspace": memory.workspace,
        },
        pinned_bytes=device.pinned_bytes,
    )
