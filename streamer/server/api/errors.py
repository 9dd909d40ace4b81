"""Error bodies: OpenAI's object, llama-server's loading bytes, Anthropic's shape.

Nothing internal ever gets in.
"""

from typing import Any

import msgspec

from streamer.errors import ClientError

LOADING_BODY = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
HEALTHY_BODY = b'{"status":"ok"}'

DEFAULT_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    417: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}

# https://docs.anthropic.com/en/api/errors
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_object(status: int, message: str, **members: Any) -> dict[str, Any]:
    """`members` replace or add to type, param and code."""
    error = {
        "message": message,
        "type": DEFAULT_TYPES.get(status, "server_error"),
        "param": None,
        "code": status,
    }
    return {"error": error | members}


def error_body(error: ClientError) -> bytes:
    if error.type == "loading":
        return LOADING_BODY
    code = error.status if error.code is None else error.code
    kind = DEFAULT_TYPES[error.status] if error.type == "invalid_request_error" else error.type
    return encode(
        error_object(error.status, error.message, type=kind, param=error.param, code=code, **error.extra)
    )


def anthropic_error_body(error: ClientError) -> bytes:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    message = "Loading model" if error.type == "loading" else error.message
    return encode({"type": "error", "error": {"type": kind, "message": message, **error.extra}})


def loading_error() -> ClientError:
    return ClientError(503, "Loading model", type="loading", retry_after_s=1)


def context_error(
    n_prompt: int, n_ctx: int, param: str = "messages", *, is_least: bool = False
) -> ClientError:
    """llama-server's type and members, OpenAI's code: agents look for either. `is_least`: nobody has counted
    to the end.
    """
    needed = f"at least {n_prompt}" if is_least else str(n_prompt)
    return ClientError(
        400,
        f"the request needs {needed} prompt tokens, which exceeds the context size of {n_ctx} tokens",
        type="exceed_context_size_error",
        param=param,
        code="context_length_exceeded",
        extra={"n_prompt_tokens": n_prompt, "n_ctx": n_ctx},
    )


def encode(value: Any) -> bytes:
    """JSON in UTF-8. A number that is not finite becomes null: JSON has none."""
    return msgspec.json.encode(value)
