"""POST /v1/embeddings: body to EmbeddingCall, vectors to OpenAI's list."""

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any

from streamer.server.api.body import Field, Table, anything, choice, integer, read_fields, refuse, string
from streamer.server.api.calls import EmbeddingCall
from streamer.server.api.prompts import read_prompts

TABLE = Table(
    fields=(
        Field("input", anything),
        Field("model", string, ""),
        Field("encoding_format", choice("float", "base64"), "float"),
        Field("dimensions", integer(1, 1 << 20)),
        Field("pooling", choice("mean", "last"), "mean"),
    ),
    neutral={},
    refused={},
)


def read_embedding(body: dict[str, Any]) -> EmbeddingCall:
    values = read_fields(body, TABLE)
    if values["input"] is None:
        refuse("input is missing", "input", "missing_required_parameter")
    inputs = read_prompts("input", values["input"])
    if any(not x for x in inputs):
        refuse("input must not hold an empty text", "input")
    base64_wanted = values["encoding_format"] == "base64"
    return EmbeddingCall(inputs, values["pooling"], base64_wanted, values["dimensions"], values["model"])


def normalised(values: Sequence[float]) -> list[float]:
    """The vector at length 1, as OpenAI gives it; a zero vector stays zero."""
    length = math.sqrt(math.fsum(x * x for x in values))
    return [x / length for x in values] if length > 0 else list(values)


def embedding_object(
    call: EmbeddingCall, vectors: Sequence[Sequence[float]], n_tokens: int, model: str
) -> Any:
    data = []
    for index, vector in enumerate(vectors):
        values = normalised(vector)
        packed = (
            base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode() if call.base64 else values
        )
        data.append({"object": "embedding", "index": index, "embedding": packed})
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
