"""llama-server's own shapes: /tokenize, /detokenize, /apply-template and the native /completion."""

from typing import Any

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
    ),
    neutral=NEUTRAL_SAMPLERS,
    refused={"image_data": "the models served here take text"},
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


def read_native_completion(body: dict[str, Any]) -> CompletionCall:
    values = read_fields(body, COMPLETION)
    if values["prompt"] is None:
        refuse("prompt is missing", "prompt", "missing_required_parameter")
    prompts = read_prompts("prompt", values["prompt"])
    if len(prompts) != 1 or values["n"] != 1:
        refuse("/completion takes one prompt; /v1/completions takes several", "prompt")
    n_predict = values["n_predict"] if values["n_predict"] is not None else values["max_tokens"]
    generation = read_generation(values, max_tokens=n_predict, n_logprobs=values["n_probs"] or None)
    return CompletionCall(generation, prompts)


STOP_TYPES = {"stop": "eos", "length": "limit"}


def native_object(
    text: str, entries: list[Entry] | None, event: FinishEvent, finish: str, stop: str | None, model: str
) -> dict[str, Any]:
    """The last (or only) object of a native completion."""
    answer: dict[str, Any] = {
        "index": 0,
        "content": text,
        "model": model,
        "stop": True,
        "stop_type": "word" if stop else STOP_TYPES.get(finish, "none"),
        "stopping_word": stop or "",
        "tokens_predicted": event.n_generated,
        "tokens_evaluated": event.n_prompt,
        "tokens_cached": event.cached_prompt_tokens,
        "truncated": False,
        "timings": timings_object(event),
    }
    if entries is not None:
        answer["completion_probabilities"] = [logprob_entry(e) for e in entries]
    return answer


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
