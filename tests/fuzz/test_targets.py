"""Every seed and every input that fuzzing ever found, and what hypothesis makes of a few seconds."""

import pytest
from fuzz_seeds import seeds
from fuzz_targets import TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("name", list(TARGETS))
def test_seeds_and_finds_are_answered_rightly(name: str) -> None:
    for data in seeds(name):
        TARGETS[name](data)


@pytest.mark.parametrize("name", list(TARGETS))
def test_pieces_of_seeds_are_answered_rightly(name: str) -> None:
    pool = seeds(name)

    @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        first, second = data.draw(st.sampled_from(pool)), data.draw(st.sampled_from(pool))
        at = data.draw(st.integers(0, len(first)))
        noise = data.draw(st.binary(max_size=12))
        TARGETS[name](first[:at] + noise + second[data.draw(st.integers(0, len(second))) :])

    check()
