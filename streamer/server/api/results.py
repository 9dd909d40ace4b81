"""What generation gives back to every API: text with its tokens, usage, the `ggufd` object."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamer.engine.request import FinishEvent, FinishReason


@dataclass(frozen=True)
class Ranked:
    """One of the most likely tokens at a place."""

    id: int
    text: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True)
class Entry:
    """A token with its log-probability; None for the first of an echoed prompt."""

    id: int
    text: str
    bytes: bytes
    logprob: float | None
    top: tuple[Ranked, ...] = ()
    offset: int = 0  # characters of the choice's text before the token's own


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


def logprob_entry(entry: Entry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "token": entry.text,
        "logprob": entry.logprob,
        "bytes": list(entry.bytes),
        "top_logprobs": [
            {"id": t.id, "token": t.text, "logprob": t.logprob, "bytes": list(t.bytes)} for t in entry.top
        ],
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


FINISH_NAMES: dict[FinishReason, str] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.DEADLINE: "length",
    FinishReason.CANCELLED: "stop",
    FinishReason.ERROR: "error",
}


def details_object(finishes: Sequence[tuple[FinishEvent, str]]) -> dict[str, Any]:
    """The `ggufd` member: times of the slowest sequence of the request, weight bytes of all (always 0).

    Each finish comes with its reason as we state it (a stop string found by the server ends as `stop`). The
    APIs have no name for an answer that its time has cut, this object has.
    """
    events = [event for event, _ in finishes]
    return {
        "ttft_ms": round(max(e.ttft_ms for e in events), 3),
        "prompt_ms": round(max(e.prompt_ms for e in events), 3),
        "decode_ms": round(max(e.decode_ms for e in events), 3),
        "queue_ms": round(max(e.queue_ms for e in events), 3),
        "weight_h2d_bytes": max(e.weight_h2d_bytes for e in events),
        "cached_prompt_tokens": sum(e.cached_prompt_tokens for e in events),
        "finish": "timeout" if events[0].reason is FinishReason.DEADLINE else finishes[0][1],
    }


def usage_of(finishes: Sequence[FinishEvent], n: int) -> Usage:
    """`n` sequences share each prompt, which counts once; the finishes come prompt by prompt."""
    heads = finishes[::n]
    return Usage(
        prompt_tokens=sum(e.n_prompt for e in heads),
        completion_tokens=sum(e.n_generated for e in finishes),
        cached_tokens=sum(e.cached_prompt_tokens for e in heads),
    )
