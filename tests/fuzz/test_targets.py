"""Every seed and every input that fuzzing ever found, and what hypothesis makes of a few seconds."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fuzz_seeds import REQUESTS, seeds
from fuzz_targets import TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("name", list(TARGETS))
def test_seeds_and_finds_are_answered_rightly(name: str) -> None:
    for data in seeds(name):
        TARGETS[name](data)


ODD = (
    {}, [], None, True, 0, -1, 1.5, "x", "", "\ud800", {"a": {}}, [[]], [{}], [None], 10**30, 1e300,
    -(10**400), {"type": {}}, {"type": []}, {"type": "function"}, {"type": "text"}, {"role": "user"},
)  # fmt: skip


def places(value: Any, so_far: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield so_far
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*so_far, key))


def with_value(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    changed = copy.copy(value)
    changed[place[0]] = with_value(value[place[0]], place[1:], new)
    return changed


@pytest.mark.parametrize("index", range(len(REQUESTS)))
def test_any_json_in_any_place_of_a_request_is_a_call_or_400(index: int) -> None:
    request = REQUESTS[index]
    for place in places(request):
        for odd in ODD:
            TARGETS["request"](json.dumps(with_value(request, place, odd)).encode())


@pytest.mark.parametrize("name", list(TARGETS))
def test_pieces_of_seeds_are_answered_rightly(name: str) -> None:
    pool = seeds(name)

    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        first, second = data.draw(st.sampled_from(pool)), data.draw(st.sampled_from(pool))
        at = data.draw(st.integers(0, len(first)))
        noise = data.draw(st.binary(max_size=12))
        TARGETS[name](first[:at] + noise + second[data.draw(st.integers(0, len(second))) :])

    check()
