"""Prompts that are no conversation: a text, token ids (with texts between them), or a list of such."""

from typing import Any

from streamer.server.api.body import refuse

MAX_PROMPTS = 128
Prompt = str | tuple[int | str, ...]


def read_prompts(name: str, value: Any) -> tuple[Prompt, ...]:
    """ "text" | [ids] | ["text", ...] | [[ids], ...]; a list of ids may have texts between them, as
    llama-server takes it. Empty lists are refused.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        refuse(f"{name} must be a string, a list of token ids, or a list of those", name)
    if any(map(_is_id, value)):
        return (_ids(name, value),)
    if len(value) > MAX_PROMPTS:
        refuse(f"{name} may have at most {MAX_PROMPTS} entries", name)
    return tuple(_one(name, item) for item in value)


def _one(name: str, item: Any) -> Prompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and item:
        return _ids(name, item)
    refuse(f"{name}: an entry must be a string or a list of token ids", name)


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _ids(name: str, items: list[Any]) -> tuple[int | str, ...]:
    if not all(isinstance(x, str) or (_is_id(x) and 0 <= x < 1 << 31) for x in items):
        refuse(f"{name} must hold token ids, and texts between them", name)
    return tuple(items)
