"""The account as values: what the ledger says at one moment, and its JSON form for routes and bars."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from streamer.errors import GgufdError, readable
from streamer.residency.state import Phase, State


@dataclass(frozen=True)
class LayerResidency:
    """One segment of the plan: a layer, the embedding, the tables or the output."""

    name: str
    layer: int | None
    bytes_resident: int
    bytes_total: int
    tensors_resident: int
    tensors_total: int

    @property
    def is_resident(self) -> bool:
        return self.tensors_resident == self.tensors_total


@dataclass(frozen=True)
class LoadError:
    message: str
    type: str  # "device_memory_error"
    code: int  # the process's exit code


@dataclass(frozen=True)
class Residency:
    """One moment of a load. Bytes are file bytes whose copy's event has completed; times in seconds.

    `fraction` is monotone and 1.0 only once every planned weight is resident.
    """

    model: str
    device: str
    transfer: str
    phase: Phase
    bytes_resident: int
    bytes_total: int
    tensors_resident: int
    tensors_total: int
    layers_resident: int
    layers_total: int
    fraction: float
    elapsed_s: float  # since the ledger was made; stands still once ready or failed
    bytes_per_s: float  # smoothed over the last two seconds while uploading, of the whole upload afterwards
    eta_s: float | None  # of the upload; None while unknown
    last_progress_s: float  # age of the last progress: a stall grows it
    page_cache_bytes: int
    storage_bytes: int
    verified: bool
    error: LoadError | None
    draining: bool
    bytes_by_state: Mapping[State, int]
    phase_seconds: Mapping[Phase, float]  # spent in each phase entered so far
    layers: tuple[LayerResidency, ...]

    @property
    def status(self) -> str:
        if self.error is not None:
            return "failed"
        if self.draining:
            return "draining"
        return "ready" if self.phase is Phase.READY else "loading"


def load_error(error: BaseException) -> LoadError:
    """What may be said of an error in public: our own messages; of anything else only that it happened."""
    if isinstance(error, GgufdError):
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
        return LoadError(message=readable(str(error)), type=kind, code=error.exit_code)
    return LoadError(message="internal error", type="internal_error", code=GgufdError.exit_code)


def to_json(
    residency: Residency, *, h2d_load: int, h2d_serve: int, with_layers: bool = False
) -> dict[str, object]:
    """The residency object of the HTTP routes. `h2d_*`: weight bytes through the one door, by phase."""
    r = residency
    error = r.error
    json: dict[str, object] = {
        "status": r.status,
        "phase": str(r.phase),
        "model": r.model,
        "device": r.device,
        "transfer": r.transfer,
        "bytes_resident": r.bytes_resident,
        "bytes_total": r.bytes_total,
        "tensors_resident": r.tensors_resident,
        "tensors_total": r.tensors_total,
        "layers_resident": r.layers_resident,
        "layers_total": r.layers_total,
        "fraction": r.fraction,
        "elapsed_s": r.elapsed_s,
        "bytes_per_s": r.bytes_per_s,
        "eta_s": r.eta_s,
        "last_progress_s": r.last_progress_s,
        "source": {"page_cache_bytes": r.page_cache_bytes, "storage_bytes": r.storage_bytes},
        "verified": r.verified,
        "weight_h2d_bytes_load": h2d_load,
        "weight_h2d_bytes_serve": h2d_serve,
        "error": None if error is None else asdict(error),
    }
    if with_layers:
        json["layers"] = [_layer_json(layer) for layer in r.layers]
    return json


def _layer_json(layer: LayerResidency) -> dict[str, object]:
    return {
        "name": layer.name,
        "layer": layer.layer,
        "state": "resident" if layer.is_resident else "uploading" if layer.bytes_resident else "planned",
        "bytes_resident": layer.bytes_resident,
        "bytes_total": layer.bytes_total,
        "tensors_resident": layer.tensors_resident,
        "tensors_total": layer.tensors_total,
    }
