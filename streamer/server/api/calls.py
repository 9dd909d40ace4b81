"""What every API's body becomes before tokens exist: values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamer.engine.request import SamplingParameters


@dataclass(frozen=True)
class OutputFormat:
    """A bound on what may be generated. At most one member is set."""

    json_object: bool = False
    json_schema: Any = None  # a JSON schema (object or boolean)
    grammar: str | None = None


@dataclass(frozen=True)
class Generation:
    """How to continue, whatever the prompt was. `sampling.seed` counts only when `seeded`."""

    sampling: SamplingParameters
    seeded: bool
    max_tokens: int | None  # None: as far as the context goes
    stop: tuple[str, ...] = ()
    n: int = 1
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    format: OutputFormat | None = None
    timeout_s: float | None = None
    priority: int = 0
    use_prefix_cache: bool = True


@dataclass(frozen=True)
class ChatCall:
    """A conversation to continue. Messages have OpenAI's shape with string contents."""

    generation: Generation
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()  # OpenAI's {"type": "function", "function": {...}}
    tool_choice: str = "auto"  # none | auto | required | the name of a function, as "function:NAME"
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    repeated: Mapping[str, Any] = field(default_factory=dict)  # what the answer says of the request again


@dataclass(frozen=True)
class CompletionCall:
    """Raw prompts to continue: each a text, or token ids with texts between them."""

    generation: Generation
    prompts: tuple[str | tuple[int | str, ...], ...]
    echo: bool = False
    model: str = ""


@dataclass(frozen=True)
class EmbeddingCall:
    inputs: tuple[str | tuple[int | str, ...], ...]
    pooling: str = "mean"
    base64: bool = False
    dimensions: int | None = None
    model: str = ""
