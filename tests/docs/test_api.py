"""docs/api.md names every route, and every field that is read, refused or taken only where it is neutral."""

import re
from pathlib import Path

import pytest

from streamer.server.api import anthropic, chat, completions, embeddings, llamacpp, responses
from streamer.server.api.sampling import SAMPLING_FIELDS
from streamer.server.app import ROUTES

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
NAMES = set(re.findall(r"`(?:(?:GET|POST) )?([^`\s]+)`", PAGE))
TABLES = {
    "chat": chat.TABLE,
    "completions": completions.TABLE,
    "responses": responses.TABLE,
    "messages": anthropic.TABLE,
    "native": llamacpp.COMPLETION,
    "embeddings": embeddings.TABLE,
}


def test_every_route_is_named_and_nothing_else() -> None:
    served = {re.sub(r"\{model:.*\}", "{model}", path) for _, path, _ in ROUTES}
    assert {n for n in NAMES if n.startswith("/")} == served


@pytest.mark.parametrize("name", TABLES)
def test_fields_that_are_not_taken_are_named(name: str) -> None:
    table = TABLES[name]
    assert (set(table.refused) | set(table.neutral)) <= NAMES


@pytest.mark.parametrize("name", TABLES)
def test_fields_that_are_read_are_named(name: str) -> None:
    assert {field.name for field in TABLES[name].fields} <= NAMES | {"stream_options"}
    assert {field.name for field in SAMPLING_FIELDS} <= NAMES | {"stream_options"}
