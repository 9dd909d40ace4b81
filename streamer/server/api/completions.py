"""POST /v1/completions: body to CompletionCall, results to OpenAI's text completion objects."""

from typing import Any

from streamer.server.api.body import Field, Table, anything, boolean, integer, read_fields, refuse
from streamer.server.api.calls import CompletionCall
from streamer.server.api.prompts import read_prompts
from streamer.server.api.results import Entry, logprob_entry, usage_object
from streamer.server.api.sampling import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    NEUTRAL_SAMPLERS,
    SAMPLING_FIELDS,
    read_generation,
)

TABLE = Table(
    fields=(
        *SAMPLING_FIELDS,
        Field("prompt", anything),
        Field("max_tokens", integer(-1, 1 << 30), 16),
        Field("max_completion_tokens", integer(-1, 1 << 30)),
        Field("logprobs", integer(0, MAX_LOGPROBS)),
        Field("echo", boolean, False),
        Field("best_of", integer(1, MAX_CHOICES)),
    ),
    neutral=NEUTRAL_SAMPLERS | {"suffix": ("",)},  # the models served here do not fill in the middle
    refused={},
)


def read_completion(body: dict[str, Any]) -> CompletionCall:
    values = read_fields(body, TABLE)
    if values["prompt"] is None:
        refuse("prompt is missing", "prompt", "missing_required_parameter")
    prompts = read_prompts("prompt", values["prompt"])
    if values["best_of"] is not None and values["best_of"] != values["n"]:
        refuse("best_of is only accepted when it equals n", "best_of", "unsupported_parameter")
    if len(prompts) * values["n"] > MAX_CHOICES:
        refuse(f"prompts times n may be at most {MAX_CHOICES}", "n")
    max_tokens = (
        values["max_tokens"] if values["max_completion_tokens"] is None else values["max_completion_tokens"]
    )
    generation = read_generation(values, max_tokens=max_tokens, n_logprobs=values["logprobs"])
    return CompletionCall(generation, prompts, values["echo"], values["model"])


def completion_choice(index: int, text: str, entries: list[Entry] | None, finish: str | None) -> Any:
    logprobs = None if entries is None else legacy_logprobs(entries)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def legacy_logprobs(entries: list[Entry]) -> dict[str, Any]:
    """OpenAI's parallel lists, plus `content` with one object (and its `id`) a token, as llama-server has
    it.
    """
    return {
        "tokens": [e.text for e in entries],
        "token_logprobs": [e.logprob for e in entries],
        "top_logprobs": [None if e.logprob is None else {t.text: t.logprob for t in e.top} for e in entries],
        "text_offset": [e.offset for e in entries],
        "ids": [e.id for e in entries],
        "content": [logprob_entry(e) for e in entries],
    }


def completion_object(head: dict[str, Any], choices: list[Any], usage: Any, details: Any) -> dict[str, Any]:
    return {
        **head,
        "object": "text_completion",
        "choices": choices,
        "usage": usage_object(usage),
        "ggufd": details,
    }
