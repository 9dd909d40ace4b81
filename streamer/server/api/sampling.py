"""The fields all generating APIs share, and how they become SamplingParameters."""

from typing import Any

from streamer.engine.request import SamplingParameters
from streamer.server.api.body import (
    Field,
    boolean,
    choice,
    integer,
    logit_bias,
    mapping,
    number,
    refuse,
    stop_strings,
    string,
)
from streamer.server.api.calls import Generation, OutputFormat

MAX_CHOICES, MAX_LOGPROBS = 128, 20

SAMPLING_FIELDS: tuple[Field, ...] = (
    Field("temperature", number(0, 2), 1.0),
    Field("top_p", number(0, 1), 1.0),
    Field("top_k", integer(-1, 1 << 30), 0),
    Field("min_p", number(0, 1), 0.0),
    Field("seed", integer(-(1 << 63), (1 << 64) - 1)),
    Field("repeat_penalty", number(0, 10, above=True), 1.0),
    Field("repeat_last_n", integer(-1, 1 << 24), 64),
    Field("presence_penalty", number(-2, 2), 0.0),
    Field("frequency_penalty", number(-2, 2), 0.0),
    Field("logit_bias", logit_bias, ()),
    Field("stop", stop_strings, ()),
    Field("n", integer(1, MAX_CHOICES), 1),
    Field("ignore_eos", boolean, False),
    Field("stream", boolean, False),
    Field("stream_options", mapping),
    Field("response_format", mapping),
    Field("grammar", string),
    Field("json_schema", mapping),
    Field("timeout", number(0, 86400, above=True)),
    Field("priority", integer(-1000, 1000), 0),
    Field("cache_prompt", boolean, True),
    Field("model", string, ""),
)

# llama-server's further samplers: accepted where they would change nothing.
NEUTRAL_SAMPLERS: dict[str, tuple[Any, ...]] = {
    "typical_p": (1, 1.0),
    "mirostat": (0,),
    "xtc_probability": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "top_n_sigma": (-1, -1.0, 0),
    "n_keep": (0, -1),
    "n_discard": (0,),
    "repetition_penalty": (1, 1.0),
}
_CHECK_FORMAT = choice("text", "json_object", "json_schema")


def read_generation(values: dict[str, Any], *, max_tokens: int | None, n_logprobs: int | None) -> Generation:
    """From the values of SAMPLING_FIELDS. `max_tokens` -1 and None both mean: as far as the context goes."""
    seed = values["seed"]
    seeded = seed is not None and seed != -1
    sampling = SamplingParameters(
        temperature=values["temperature"],
        top_k=max(values["top_k"], 0),
        top_p=values["top_p"],
        min_p=values["min_p"],
        seed=seed % (1 << 64) if seeded else 0,
        repeat_penalty=values["repeat_penalty"],
        repeat_last_n=values["repeat_last_n"],
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        logit_bias=values["logit_bias"],
        n_logprobs=n_logprobs,
    )
    return Generation(
        sampling=sampling,
        seeded=seeded,
        max_tokens=None if max_tokens in (None, -1) else max_tokens,
        stop=values["stop"],
        n=values["n"],
        ignore_eos=values["ignore_eos"],
        stream=values["stream"],
        include_usage=_include_usage(values),
        format=_output_format(values),
        timeout_s=values["timeout"],
        priority=values["priority"],
        use_prefix_cache=values["cache_prompt"],
    )


def _include_usage(values: dict[str, Any]) -> bool:
    options = values["stream_options"]
    if options is None:
        return False
    if not values["stream"]:
        refuse("stream_options is only allowed with stream", "stream_options")
    wanted = options.get("include_usage")
    return boolean("stream_options.include_usage", wanted) if wanted is not None else False


def _output_format(values: dict[str, Any]) -> OutputFormat | None:
    """response_format, grammar or json_schema: at most one that constrains."""
    found = [x for x in (_response_format(values["response_format"]), _llama_format(values)) if x is not None]
    if len(found) > 1:
        refuse("give one of response_format, grammar and json_schema", "response_format")
    return found[0] if found else None


def _llama_format(values: dict[str, Any]) -> OutputFormat | None:
    if values["grammar"] and values["json_schema"] is not None:
        refuse("give one of grammar and json_schema", "grammar")
    if values["grammar"]:
        return OutputFormat(grammar=values["grammar"])
    return None if values["json_schema"] is None else OutputFormat(json_schema=values["json_schema"])


def _response_format(asked: dict[str, Any] | None) -> OutputFormat | None:
    if asked is None:
        return None
    kind = _CHECK_FORMAT("response_format.type", asked.get("type"))
    if kind == "text":
        return None
    holder = asked.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else asked.get("schema")
    if kind == "json_object" and schema is None:
        return OutputFormat(json_object=True)
    if not isinstance(schema, dict):
        refuse(f"response_format: the schema of {kind} must be an object", "response_format")
    return OutputFormat(json_schema=schema)
