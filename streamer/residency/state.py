"""What a weight can be, and what it can become. Pure."""

import enum


class State(enum.StrEnum):
    PLANNED = "planned"
    ALLOCATED = "allocated"  # its device memory is there
    UPLOADING = "uploading"  # at least one of its copies has completed
    RESIDENT = "resident"  # the event after its last copy (and its rearrangement) has completed
    VERIFIED = "verified"  # device bytes proved equal to the file's
    FAILED = "failed"
    RELEASED = "released"  # its device memory is gone


TRANSITIONS: dict[State, frozenset[State]] = {
    State.PLANNED: frozenset({State.ALLOCATED, State.FAILED, State.RELEASED}),
    State.ALLOCATED: frozenset({State.UPLOADING, State.FAILED, State.RELEASED}),
    State.UPLOADING: frozenset({State.RESIDENT, State.FAILED, State.RELEASED}),
    State.RESIDENT: frozenset({State.VERIFIED, State.FAILED, State.RELEASED}),
    State.VERIFIED: frozenset({State.FAILED, State.RELEASED}),
    State.FAILED: frozenset({State.RELEASED}),
    State.RELEASED: frozenset(),
}

ON_DEVICE = frozenset({State.RESIDENT, State.VERIFIED})


def advance(state: State, to: State) -> State:
    """`to`, if the table allows it. AssertionError otherwise: an order of calls of ours is wrong."""
    assert to in TRANSITIONS[state], f"a weight cannot go from {state} to {to}"
    return to


class Phase(enum.StrEnum):
    """Phases of a start, in their order; a start only goes forward."""

    OPEN = "open"
    PLAN = "plan"
    UPLOAD = "upload"
    VERIFY = "verify"
    WARM = "warm"
    READY = "ready"


PHASES = tuple(Phase)
