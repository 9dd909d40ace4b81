"""The transition table: what a weight can become."""

import pytest

from streamer.residency.state import ON_DEVICE, TRANSITIONS, State, advance

PATH = [State.PLANNED, State.ALLOCATED, State.UPLOADING, State.RESIDENT, State.VERIFIED, State.RELEASED]


def test_the_way_of_a_weight() -> None:
    state = PATH[0]
    for to in PATH[1:]:
        state = advance(state, to)
    assert state is State.RELEASED


def test_every_state_is_in_the_table_and_no_way_leads_back() -> None:
    assert set(TRANSITIONS) == set(State)
    order = {state: i for i, state in enumerate([*PATH[:-1], State.FAILED, State.RELEASED])}
    assert all(order[to] > order[state] for state, tos in TRANSITIONS.items() for to in tos)


@pytest.mark.parametrize("state", [s for s in State if s is not State.RELEASED])
def test_everything_can_be_released(state: State) -> None:
    assert State.RELEASED in TRANSITIONS[state]


@pytest.mark.parametrize("to", sorted(ON_DEVICE))
def test_nothing_becomes_resident_without_uploading(to: State) -> None:
    for state in (State.PLANNED, State.ALLOCATED, State.FAILED, State.RELEASED):
        with pytest.raises(AssertionError, match=f"from {state} to {to}"):
            advance(state, to)
