"""From a path and options to a plan. Blocking, reads headers only; what `serve` and `inspect` share."""

from collections.abc import Callable
from dataclasses import dataclass

from streamer.cache.storage import ELEMENT_NBYTES
from streamer.errors import ConfigError
from streamer.gguf.directory import Directory
from streamer.gguf.reader import read_directory
from streamer.kernels.host_weights import prepared_nbytes
from streamer.models.registry import Architecture, describe
from streamer.plan.layouts import LAYOUTS
from streamer.plan.make import make_plan
from streamer.plan.memory import CacheNeeds, PlanOptions
from streamer.plan.plan import Plan

CHUNK_NBYTES = 4 << 20


@dataclass(frozen=True)
class RuntimeOptions:
    """What the configuration asks for; 0 and "auto" leave it to the device's profile."""

    n_ctx: int = 0
    max_sequences: int = 0
    batch_tokens: int = 0
    kv_type: str = "auto"
    prefix_cache: bool = True


@dataclass(frozen=True)
class Profile:
    """What suits a kind of device."""

    kv_types: tuple[str, ...]  # the first is the default
    max_sequences: int
    max_rows: int  # of a step
    overlap: bool  # launch step n+1 before step n is read
    state_snapshots: int
    reserve_nbytes: int


PROFILES: dict[str, Profile] = {
    "host": Profile(("f32",), 8, 256, overlap=False, state_snapshots=4, reserve_nbytes=256 << 20),
    "cuda": Profile(
        ("f16", "bf16"),
        64,
        2048,
        overlap=True,
        state_snapshots=16,
        reserve_nbytes=512 << 20,
    ),
}

# Bytes an executor takes beside weights and cache: (directory, architecture, rows of a step, sequences) ->
# bytes.
Workspace = Callable[[Directory, Architecture, int, int], int]


def _host_workspace(directory: Directory, architecture: Architecture, rows: int, sequences: int) -> int:
    wanted = {spec.name for spec in architecture.specs()}
    return prepared_nbytes([tensor for tensor in directory.tensors.values() if tensor.name in wanted])


def _cuda_workspace(directory: Directory, architecture: Architecture, rows: int, sequences: int) -> int:
    from streamer.runtime.cuda_plan import cuda_workspace  # import time that only CUDA pays

    return cuda_workspace(directory, architecture, rows, sequences)


WORKSPACES: dict[str, Workspace] = {"host": _host_workspace, "cuda": _cuda_workspace}


@dataclass(frozen=True)
class PlannedModel:
    """A model file with everything decided, nothing read but its header."""

    directory: Directory
    architecture: Architecture
    plan: Plan
    profile: Profile
    kv_type: str
    max_rows: int
    n_snapshots: int  # slots of recurrent state beyond the sequences'
    notes: tuple[str, ...]  # what was asked for and is not so, one line each, for the log


def read_model(path: str) -> tuple[Directory, Architecture]:
    """The header, checked, and what its architecture needs. GGUFError."""
    directory = read_directory(path)
    return directory, describe(directory)


def plan_model(
    directory: Directory,
    architecture: Architecture,
    options: RuntimeOptions,
    *,
    kind: str,
    free_bytes: int | None,
    chunk_nbytes: int = CHUNK_NBYTES,
) -> PlannedModel:
    """`kind` is the device's; `free_bytes` None plans without one.

    GGUFError, ConfigError, PlanError with the sum.
    """
    profile = PROFILES[kind]
    kv_type = profile.kv_types[0] if options.kv_type == "auto" else options.kv_type
    if kv_type not in profile.kv_types:
        raise ConfigError(f"kv_type: {kv_type} is not supported on {kind}; {', '.join(profile.kv_types)} are")
    layout = architecture.cache_layout()
    max_sequences = options.max_sequences or profile.max_sequences
    max_rows = max(options.batch_tokens or profile.max_rows, max_sequences)
    n_snapshots = profile.state_snapshots if layout.recurrent and options.prefix_cache else 0
    workspace = WORKSPACES[kind](directory, architecture, max_rows, max_sequences)
    plan = make_plan(
        directory,
        architecture.specs(),
        layouts=LAYOUTS[kind],
        cache=CacheNeeds(
            kv_nbytes_per_token=layout.kv_nbytes_per_token(ELEMENT_NBYTES[kv_type]),
            state_nbytes_per_sequence=layout.state_nbytes_per_sequence,
            page_size=layout.page_size,
            training_context=architecture.n_ctx_train,
        ),
        options=PlanOptions(
            n_ctx=options.n_ctx or None,
            max_sequences=max_sequences,
            state_snapshots=n_snapshots,
            chunk_nbytes=chunk_nbytes,
            workspace_nbytes=workspace,
            reserve_nbytes=profile.reserve_nbytes,
        ),
        free_bytes=free_bytes,
    )
    notes: tuple[str, ...] = ()
    if options.n_ctx > plan.n_ctx:
        notes = (f"ctx={options.n_ctx} reduced=true n_ctx={plan.n_ctx} reason=training-context",)
    return PlannedModel(directory, architecture, plan, profile, kv_type, max_rows, n_snapshots, notes)
