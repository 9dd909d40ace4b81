"""The contract between models, engine and devices: batches in, operators between, sampled ids out.

A model file calls the operators of `Ops` in order; the engine calls `Executor.step` once a step.
Arrays between operators are opaque (`Array`): numpy on the host, workspace addresses on CUDA.
Values and protocols only.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from streamer.gguf.quants import QuantType

Array = Any  # opaque: only the Ops that made it may look inside
Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
UInt32s = npt.NDArray[np.uint32]


# ---- batches -----------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """Consecutive rows of one sequence in a batch. A tuple: one is made for every token."""

    slot: int  # the sequence slot: place of its recurrent state and of its last sampled id
    row_offset: int  # first row in the batch
    n_rows: int  # 1 in decode, a chunk in prefill
    position: int  # of the first row; rows before it are already in the cache
    pages: Int32s  # (ceil((position + n_rows) / page_size),) page ids, logical order


@dataclass(frozen=True)
class Batch:
    """One forward: rows of several sequences. Host arrays; the executor uploads them as tables."""

    token_ids: Int32s  # (n_rows,); -1: the id sampled last for this row's slot (it never left the device)
    positions: Int32s  # (n_rows,)
    spans: tuple[Span, ...]  # in row order, covering all rows
    logit_rows: Int32s  # (n_logit_rows,) rows whose logits (or hidden state) are wanted
    want_hidden: bool = False  # embeddings: the rows' hidden states after the output norm instead of logits

    @property
    def n_rows(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        return all(span.n_rows == 1 for span in self.spans)


@dataclass(frozen=True)
class SamplingBatch:
    """How each logit row becomes an id. Neutral: temperature 0 (greedy), top_k 0, top_p 1, min_p 0."""

    temperature: Float32s  # (n,)
    top_k: Int32s  # (n,)
    top_p: Float32s  # (n,)
    min_p: Float32s  # (n,)
    uniform: Float32s  # (n,) in [0, 1): the draw, a pure function of seed and position (engine/sampler.py)
    slots: Int32s  # (n,) where the sampled id is kept on the device for the next step; -1: nowhere
    target_ids: Int32s  # (n,) an id whose log-probability is wanted too (echo); -1: none
    # sparse adjustments of logits before sampling, by row: logit = (l > 0 ? l / divide : l * divide) + add
    adjust_rows: Int32s  # (m,)
    adjust_ids: Int32s  # (m,)
    adjust_divide: Float32s  # (m,) repetition penalty; 1: none
    adjust_add: Float32s  # (m,) bias - presence - frequency * count
    masks: UInt32s | None = None  # (n_masks, ceil(n_vocab / 32)) bit set: the id is allowed
    mask_rows: Int32s | None = None  # (n_masks,) logit row of each mask
    n_top: int = 0  # most likely ids wanted with log-probabilities (0..20)


@dataclass(frozen=True)
class StepResult:
    """What came back from a step. Log-probabilities are of the unadjusted distribution (temperature 1)."""

    ids: Int32s  # (n_logit_rows,)
    logprobs: Float32s  # (n_logit_rows,) of `ids`
    target_logprobs: Float32s  # (n_logit_rows,) of `target_ids`; 0 where none
    top_ids: Int32s  # (n_logit_rows, n_top)
    top_logprobs: Float32s  # (n_logit_rows, n_top)
    finite: npt.NDArray[np.bool_]  # (n_logit_rows,) False: a NaN or no finite logit; the id is meaningless
    hidden: Float32s | None = None  # (n_logit_rows, n_embd) for want_hidden


class PendingStep(Protocol):
    def result(self) -> StepResult:
        """Block (a device: without the interpreter lock) until the step is done. Raises DeviceError."""


# ---- weights -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """A resident weight as operators take it. `shape` in GGUF order ([n_in, n_out] for a projection)."""

    name: str
    type: QuantType
    shape: tuple[int, ...]
    handle: Any  # the Ops' own: prepared array on the host, address and layout on CUDA


@dataclass(frozen=True)
class Linear:
    """y = W x (+ bias)."""

    weight: Weight
    bias: Weight | None = None
    # biases of consecutive row ranges that together cover all rows, instead of `bias`: a fused q, k, v weight
    # may come with three separate biases; an Ops may join them once
    part_biases: tuple[Weight, ...] = ()

    @property
    def n_in(self) -> int:
        return self.weight.shape[0]

    @property
    def n_out(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True)
class Norm:
    """RMS norm: x * weight / sqrt(mean(x^2) + epsilon)."""

    weight: Weight
    epsilon: float


class Activation(enum.Enum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class RopePairing(enum.Enum):
    NORM = "norm"  # rotates (2i, 2i+1)
    NEOX = "neox"  # rotates (i, i + n_rot/2)


@dataclass(frozen=True)
class Rope:
    """theta_i = position * scale * base^(-2i/n_rot) / factors[i]; dimensions from n_rot on pass through.

    `rope.inverse_frequencies` turns it, yarn included, into one number a pair; both Ops use that.
    """

    pairing: RopePairing
    n_rot: int
    base: float
    scale: float = 1.0  # 1 / linear scaling factor
    factors: Weight | None = None  # (n_rot/2,) Llama-3's
    attention_factor: float = 1.0  # multiplies cos and sin (yarn)
    yarn: "Yarn | None" = None


@dataclass(frozen=True)
class Yarn:
    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    extrapolation_factor: float = 1.0


@dataclass(frozen=True)
class Experts:
    """Routed feed-forward. Expert stacks have shape [n_in, n_out, n_experts]; `gate_up` may be merged."""

    router: Linear  # [n_embd, n_experts]
    gate: Weight | None
    up: Weight | None
    gate_up: Weight | None  # [n_embd, 2 * n_ff, n_experts]: gate rows first
    down: Weight
    n_used: int
    weight_scale: float = 1.0
    shared_router: Weight | None = None  # [n_embd] or [n_embd, 1]: sigmoid gate of the shared expert
    shared_gate: Linear | None = None
    shared_up: Linear | None = None
    shared_down: Linear | None = None


@dataclass(frozen=True)
class GatedDelta:
    """One gated delta net mixer (architectures page 1.4). v-head h uses k-head h % n_k_heads."""

    norm: Norm
    qkv: Linear  # [n_embd, 2 * n_k_heads * k_dim + n_v_heads * v_dim]
    gate: Linear  # z: [n_embd, n_v_heads * v_dim]
    alpha: Linear  # [n_embd, n_v_heads]
    beta: Linear
    conv: Weight  # [conv_width, channels]
    dt_bias: Weight  # [n_v_heads]
    a: Weight  # [n_v_heads], = -exp(A_log)
    out_norm: Norm  # [v_dim]
    out: Linear
    n_k_heads: int
    n_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int = 4


# ---- cache layout (pure) -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class KVLayer:
    layer: int
    n_kv_heads: int
    key_length: int
    value_length: int
    sliding_window: int | None = None


@dataclass(frozen=True)
class RecurrentLayer:
    layer: int
    conv_channels: int
    conv_width: int  # state keeps conv_width - 1 inputs
    n_v_heads: int
    k_dim: int
    v_dim: int

    @property
    def state_nbytes(self) -> int:
        """float32 bytes a sequence: conv inputs and delta state."""
        return 4 * ((self.conv_width - 1) * self.conv_channels + self.n_v_heads * self.k_dim * self.v_dim)


@dataclass(frozen=True)
class CacheLayout:
    kv: tuple[KVLayer, ...]
    recurrent: tuple[RecurrentLayer, ...] = ()
    page_size: int = 32  # tokens

    def kv_nbytes_per_token(self, element_nbytes: int) -> int:
        return sum(x.n_kv_heads * (x.key_length + x.value_length) for x in self.kv) * element_nbytes

    @property
    def state_nbytes_per_sequence(self) -> int:
        return sum(x.state_nbytes for x in self.recurrent)


class CacheStorage(Protocol):
    """Device memory behind a CacheLayout (cache/): what operators read and write."""

    layout: CacheLayout
    n_pages: int
    n_slots: int
    element_type: str  # "f32" | "f16" | "bf16" | "fp8_e4m3" | "int8"

    def keys(self, layer: int) -> Array:
        """(n_pages, n_kv_heads, page_size, key_length): numpy view on the host, address on CUDA."""

    def values(self, layer: int) -> Array: ...
    def conv_state(self, layer: int) -> Array:
        """(n_slots, conv_width - 1, conv_channels) float32, oldest first."""

    def delta_state(self, layer: int) -> Array:
        """(n_slots, n_v_heads, v_dim, k_dim) float32: row j is column j of S, so a v-column is contiguous."""


# ---- operators ---------------------------------------------------------------------------------------------


class Ops(Protocol):
    """The coarse operators a model is made of. The operator that ends a sublayer adds the residual."""

    def embed(self, table: Weight, *, scale: float = 1.0) -> Array:
        """Rows of the batch's ids: (n_rows, n_embd)."""

    def norm_project(self, x: Array, norm: Norm, projections: Sequence[Linear]) -> tuple[Array, ...]:
        """RMS norm, then each projection: ((n_rows, n_out), ...)."""

    def split(self, x: Array, widths: Sequence[int]) -> tuple[Array, ...]:
        """Column views of a fused projection's output."""

    def rope_cache_write(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        layer: int,
        n_heads: int,
        rope: Rope,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        gated_query: bool = False,
    ) -> tuple[Array, Array | None]:
        """Per-head norms, rotation, write k and v into the layer's pages. Returns (q, gate).

        `gated_query`: each head of q is [q head_dim | gate head_dim]; the gate comes back apart.
        """

    def attention(
        self,
        q: Array,
        *,
        layer: int,
        n_heads: int,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        gate: Array | None = None,
    ) -> Array:
        """Causal attention over each row's sequence: (n_rows, n_heads * value_length), times sigmoid(gate).

        Sliding window: key p is masked when q_position - p >= sliding_window.
        """

    def project_add(
        self, a: Array, projection: Linear, residual: Array, *, post_norm: Norm | None = None
    ) -> Array:
        """residual + post_norm(projection(a))."""

    def gated_feed_forward(
        self,
        x: Array,
        norm: Norm,
        gate: Linear,
        up: Linear,
        down: Linear,
        *,
        activation: Activation,
        post_norm: Norm | None = None,
    ) -> Array:
        """x + post_norm(down(act(gate(h)) * up(h))), h = norm(x)."""

    def routed_experts(self, x: Array, norm: Norm, experts: Experts) -> Array:
        """x + sum of the chosen experts' SwiGLU + shared expert (architectures page 1.3)."""

    def gated_delta(self, x: Array, mixer: GatedDelta, *, layer: int) -> Array:
        """x + out(gated delta net of norm(x)); reads and writes the slots' conv and delta state."""

    def head(self, x: Array, norm: Norm, output: Linear, *, softcap: float | None = None) -> Array:
        """Logits of the logit rows (n_logit_rows, n_vocab), or for want_hidden their normed hidden states."""


class Model(Protocol):
    """What the executor needs of a model (models/)."""

    @property
    def n_vocab(self) -> int: ...

    def forward(self, ops: Ops) -> Array:
        """Compute the current batch; returns what `ops.head` returned."""


class Executor(Protocol):
    """Runs a model's forward and samples, on one device. Called by one thread (the engine's)."""

    def warm(self) -> None:
        """Everything a first request would otherwise pay: compile, capture, first calls. Before READY."""

    def prepare_more(self) -> bool:
        """While nothing runs: one short piece of what later steps will want. False: there was none left."""

    def step(self, batch: Batch, sampling: SamplingBatch) -> PendingStep: ...
    def copy_state(self, source_slot: int, target_slot: int) -> None:
        """Copy all recurrent state between slots, ordered with steps. No-op without recurrent layers."""

    def reset_state(self, slot: int) -> None:
        """Zero a slot's recurrent state, ordered with steps."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class ExecutorStatistics:
    steps: int = 0
    workspace_bytes: int = 0
    details: dict[str, int] = field(default_factory=dict)
