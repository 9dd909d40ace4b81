"""A request's body: strict JSON into a dict, fields read through tables.

Whatever is wrong is a ClientError 400.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Never

import msgspec

from streamer.errors import ClientError

Check = Callable[[str, Any], Any]  # (name, value) -> value as we use it, or ClientError


def refuse(message: str, param: str | None = None, code: str | None = None) -> Never:
    raise ClientError(400, message, param=param, code=code)


def decode_object(data: bytes) -> dict[str, Any]:
    """Strict JSON: no NaN, no Infinity, no invalid UTF-8, no endless nesting; the top is an object."""
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        refuse("the body is nested too deeply", code="invalid_json")
    except (msgspec.MsgspecError, ValueError) as error:
        refuse(f"the body is not valid JSON: {error}", code="invalid_json")
    if not isinstance(value, dict):
        refuse("the body must be a JSON object", code="invalid_json")
    return value


@dataclass(frozen=True)
class Field:
    """One row of a table: how the member `name` is checked, and what its absence (or null) means."""

    name: str
    check: Check
    default: Any = None


@dataclass(frozen=True)
class Table:
    """All members an API knows. `neutral`: taken only at a value that changes nothing. Others are ignored."""

    fields: tuple[Field, ...]
    neutral: Mapping[str, tuple[Any, ...]]
    refused: Mapping[str, str]  # name -> why


def read_fields(body: dict[str, Any], table: Table) -> dict[str, Any]:
    """Every field of the table with its value or default."""
    for name, reason in table.refused.items():
        if body.get(name) is not None:
            refuse(f"{name} is not supported: {reason}", name, "unsupported_parameter")
    for name, values in table.neutral.items():
        value = body.get(name)
        if value is not None and not any(
            value == v and isinstance(value, bool) == isinstance(v, bool) for v in values
        ):
            refuse(
                f"{name} is only accepted as {' or '.join(map(repr, values))}", name, "unsupported_parameter"
            )
    values_read = {}
    for field in table.fields:
        value = body.get(field.name)
        values_read[field.name] = field.default if value is None else field.check(field.name, value)
    return values_read


# ---- checks ------------------------------------------------------------------------------------------------


def integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # 1e2 is a whole number in JSON
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            refuse(f"{name} must be an integer from {low} to {high}", name)
        return value

    return check


def number(low: float, high: float, *, above: bool = False) -> Check:
    def check(name: str, value: Any) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
        if not good or not low <= value <= high or (above and value == low):
            refuse(f"{name} must be a number from {low:g} to {high:g}", name)
        return float(value)

    return check


def _is_finite(value: float) -> bool:
    """False too for an integer with hundreds of digits, which no float can be."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        refuse(f"{name} must be true or false", name)
    return value


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        refuse(f"{name} must be a string", name)
    return value


def choice(*names: str) -> Check:
    def check(name: str, value: Any) -> str:
        if value not in names:
            refuse(f"{name} must be one of {', '.join(names)}", name)
        return str(value)

    return check


def mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(f"{name} must be an object", name)
    return value


def sequence(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        refuse(f"{name} must be a list", name)
    return value


def anything(name: str, value: Any) -> Any:
    return value


MAX_STOPS, MAX_STOP_CHARACTERS = 4, 1024


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > MAX_STOPS or not all(isinstance(x, str) for x in items):
        refuse(f"{name} must be a string or a list of at most {MAX_STOPS} strings", name)
    if any(not 1 <= len(x) <= MAX_STOP_CHARACTERS for x in items):
        refuse(f"{name}: a stop string has 1 to {MAX_STOP_CHARACTERS} characters", name)
    return tuple(items)


def logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """{"id": bias} or llama-server's [[id, bias]]; ids are checked later, by whoever knows the vocabulary."""
    pairs = []
    check_bias = number(-100, 100)
    for key, bias in value if _is_pairs(value) else mapping(name, value).items():
        text = str(key)
        if isinstance(key, bool) or not text.isascii() or not text.isdigit() or len(text) > 9:
            refuse(f"{name}: {text[:20]!r} is not a token id", name)
        pairs.append((int(text), check_bias(name, bias)))
    if len(pairs) > 1024:
        refuse(f"{name} may have at most 1024 entries", name)
    return tuple(sorted(pairs))


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, list) and len(x) == 2 for x in value)
