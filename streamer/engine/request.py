"""What the engine is asked, and what it answers. Values only."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end token, or the consumer found a stop string
    LENGTH = "length"
    CANCELLED = "cancelled"  # the client left
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParameters:
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    n_logprobs: int | None = None  # None: none wanted; 0: only the sampled id's


class Constraint(Protocol):
    """Restricts the next id (llguidance behind it, in text/). Used by one request, one thread at a time."""

    def mask(self) -> bytes | None:
        """Packed little-endian uint32 bits over the vocabulary, or None when everything is allowed."""

    def accept(self, token_id: int) -> None: ...
    @property
    def is_finished(self) -> bool: ...
    def close(self) -> None:
        """What it holds is given back; a call under way may fail. From any thread, without waiting."""


@dataclass(frozen=True)
class Request:
    """One sequence to generate. `n` > 1 becomes several requests with equal `prompt_ids`, sharing pages."""

    id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParameters
    max_tokens: int  # >= 0; 0 with prompt_logprobs is a pure scoring request
    end_ids: frozenset[int] = frozenset()  # generation stops at these; empty for ignore_eos
    prompt_logprobs: bool = False  # echo: log-probabilities of the prompt's ids too
    constraint: Constraint | None = None
    embed: str | None = None  # "mean" | "last": pool hidden states instead of generating
    priority: int = 0  # lower runs first; ties by arrival
    deadline_s: float | None = None  # on the engine's clock
    use_prefix_cache: bool = True


@dataclass(frozen=True)
class TokenLogprobs:
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # most likely ids, best first


@dataclass(frozen=True)
class PromptEvent:
    """The prompt is processed. Sent once, before the first token."""

    cached_tokens: int
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # one a prompt id when prompt_logprobs; the first is None


@dataclass(frozen=True)
class PrefillEvent:
    """Progress of a long prompt (keep-alive comments are made of it)."""

    processed: int
    total: int


class TokenEvent(NamedTuple):
    """A tuple: one is made for every token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class EmbeddingEvent:
    values: tuple[float, ...]


@dataclass(frozen=True)
class FinishEvent:
    """The last event of every request: exactly one."""

    reason: FinishReason
    queue_ms: float
    prompt_ms: float
    decode_ms: float
    ttft_ms: float
    n_prompt: int
    n_generated: int
    cached_prompt_tokens: int
    weight_h2d_bytes: int  # weight bytes that moved while this request lived: 0
    error: str | None = None


Event = PromptEvent | PrefillEvent | TokenEvent | EmbeddingEvent | FinishEvent


@dataclass(frozen=True)
class EngineStatistics:
    waiting: int = 0
    running: int = 0
    prefilling: int = 0
    pages: dict[str, int] = field(default_factory=dict)  # free | used | cached
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_prompt_tokens: int = 0
    steps: int = 0
    last_step_age_s: float = 0.0  # 0 while idle
    failed: str | None = None  # the device error that ended the engine
