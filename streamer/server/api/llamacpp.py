"""llama-server's own shapes: /tokenize, /detokenize, /apply-template and the native /completion."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamer.engine.request import FinishEvent
from streamer.server.api.body import Field, Table, anything, boolean, integer, read_fields, refuse, sequence
from streamer.server.api.calls import CompletionCall
from streamer.server.api.prompts import read_prompts
from streamer.server.api.results import Entry, logprob_entry
from streamer.server.api.sampling import MAX_LOGPROBS, NEUTRAL_SAMPLERS, SAMPLING_FIELDS, read_generation

TOKENIZE = Table(
    fields=(
        Field("content", anything),
        Field("add_special", boolean, False),
        Field("parse_special", boolean, True),
        Field("with_pieces", boolean, False),
    ),
    neutral={},
    refused={},
)
COMPLETION = Table(
    fields=(
        *SAMPLING_FIELDS,
        Field("prompt", anything),
        Field("n_predict", integer(-1, 1 << 30)),
        Field("max_tokens", integer(-1, 1 << 30)),
        Field("n_probs", integer(0, MAX_LOGPROBS)),
        Field("return_tokens", boolean, False),
    ),
    neutral=NEUTRAL_SAMPLERS | {"post_sampling_probs": (False,), "image_data": ([],)},
    refused={},
)


def read_tokenize(body: dict[str, Any]) -> tuple[str, bool, bool, bool]:
    """(content, add_special, parse_special, with_pieces)."""
    values = read_fields(body, TOKENIZE)
    content = values["content"]
    if not isinstance(content, str):
        refuse("content must be a string", "content")
    return content, values["add_special"], values["parse_special"], values["with_pieces"]


def read_detokenize(body: dict[str, Any]) -> list[int]:
    tokens = sequence("tokens", body.get("tokens"))
    if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in tokens):
        refuse("tokens must be a list of token ids", "tokens")
    return tokens


def piece_object(token_id: int, raw: bytes) -> dict[str, Any]:
    """The piece as text, or as its bytes when they are no whole characters."""
    try:
        return {"id": token_id, "piece": raw.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(raw)}


class NativeEnd(Protocol):
    """How a sequence ended: sequences.End."""

    @property
    def index(self) -> int: ...
    @property
    def event(self) -> FinishEvent: ...
    @property
    def finish(self) -> str: ...
    @property
    def stop(self) -> str | None: ...


@dataclass(frozen=True)
class NativeCall:
    """`settings`: what the answer says it was made with."""

    completion: CompletionCall
    with_probabilities: bool
    with_tokens: bool
    settings: dict[str, Any]


@dataclass
class NativeAnswer:
    """One prompt's answer as it grows."""

    text: str = ""
    entries: list[Entry] = field(default_factory=list)


def read_native_completion(body: dict[str, Any]) -> NativeCall:
    values = read_fields(body, COMPLETION)
    if values["prompt"] is None:
        refuse("prompt is missing", "prompt", "missing_required_parameter")
    prompts = read_prompts("prompt", values["prompt"])
    if values["n"] != 1:
        refuse("/completion gives one answer a prompt; /v1/completions gives n", "n")
    n_predict = values["n_predict"] if values["n_predict"] is not None else values["max_tokens"]
    n_probs = values["n_probs"] or None
    n_logprobs = 0 if n_probs is None and values["return_tokens"] else n_probs  # entries carry the ids
    generation = read_generation(values, max_tokens=n_predict, n_logprobs=n_logprobs)
    settings = {name: values[name] for name in SETTINGS} | {
        "n_predict": -1 if n_predict is None else n_predict
    }
    call = CompletionCall(generation, prompts)
    return NativeCall(call, n_probs is not None, values["return_tokens"], settings)


STOP_TYPES = {"stop": "eos", "length": "limit"}
SETTINGS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "repeat_last_n"),
    *("presence_penalty", "frequency_penalty", "stop", "ignore_eos", "stream", "n_probs"),
)


def native_piece(call: NativeCall, index: int, text: str, entries: Sequence[Entry]) -> dict[str, Any]:
    """A stream's object before the last."""
    return {"index": index, "content": text, "stop": False, **_token_members(call, entries)}


def _token_members(call: NativeCall, entries: Sequence[Entry]) -> dict[str, Any]:
    members: dict[str, Any] = {"tokens": [e.id for e in entries] if call.with_tokens else []}
    if call.with_probabilities:
        members["completion_probabilities"] = [logprob_entry(e) for e in entries]
    return members


def native_object(
    call: NativeCall, answer: NativeAnswer, end: NativeEnd, model: str, n_ctx: int
) -> dict[str, Any]:
    """The last object of a stream (which has said the text, so its content is empty) or the only one."""
    event, finish, stop = end.event, end.finish, end.stop
    streamed = call.completion.generation.stream
    entries: Sequence[Entry] = () if streamed else answer.entries
    return {
        "index": end.index,
        "content": "" if streamed else answer.text,
        **_token_members(call, entries),
        "model": model,
        "stop": True,
        "stop_type": "word" if stop else STOP_TYPES.get(finish, "none"),
        "stopping_word": stop or "",
        "tokens_predicted": event.n_generated,
        "tokens_evaluated": event.n_prompt,
        "tokens_cached": event.cached_prompt_tokens,
        "truncated": finish == "length" and event.n_prompt + event.n_generated > n_ctx,
        "has_new_line": "\n" in answer.text,
        "generation_settings": call.settings,
        "timings": timings_object(event),
    }


def timings_object(event: FinishEvent) -> dict[str, Any]:
    n_processed = event.n_prompt - event.cached_prompt_tokens
    return {
        "cache_n": event.cached_prompt_tokens,
        "prompt_n": n_processed,
        "prompt_ms": event.prompt_ms,
        "prompt_per_second": 1e3 * n_processed / event.prompt_ms if event.prompt_ms > 0 else 0.0,
        "predicted_n": event.n_generated,
        "predicted_ms": event.decode_ms,
        "predicted_per_second": 1e3 * event.n_generated / event.decode_ms if event.decode_ms > 0 else 0.0,
    }
