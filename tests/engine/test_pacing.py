import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.engine.pacing import CROWD, Pacer


def pacer_of():
    return Pacer(slack=2.0, min_rows=16, max_rows=512)


def live(pacer, n_steps=100, *, base_s=0.01, fixed_s=None, row_s=0.0001, n_short=1, noise=()):
    """Steps as the pacer asks for them, a decode step now and then; the rows granted."""
    granted = []
    fixed_s = base_s if fixed_s is None else fixed_s
    for i in range(n_steps):
        rows = pacer.prefill_rows(4, n_short)
        granted.append(rows)
        seconds = fixed_s + rows * row_s
        pacer.observe(4, rows, seconds * (1 + noise[i % len(noise)] if noise else 1))
        if i % 10 == 0:
            pacer.observe(4, 0, base_s)
    return granted


def test_prefill_alone_takes_whole_steps():
    assert pacer_of().prefill_rows(0, 1) == 512


def test_before_anything_is_known_little_is_risked():
    assert pacer_of().prefill_rows(1, 1) == 16


@pytest.mark.parametrize(("base_s", "row_s", "rows"), [(0.01, 0.0001, 100), (0.002, 0.00004, 50)])
def test_beside_streams_a_step_lasts_at_most_slack_times_longer(base_s, row_s, rows):
    granted = live(pacer_of(), base_s=base_s, row_s=row_s)
    assert max(granted) <= rows + 1
    assert sorted(granted[20:])[len(granted) // 2] == pytest.approx(rows, abs=2)


def test_noise_does_not_lead_astray():
    granted = live(pacer_of(), 400, noise=(0.03, -0.05, 0.0, 0.04, -0.02, 0.01, -0.03))
    assert all(60 <= n <= 140 for n in granted[100:] if n > granted[-1] * 0.6)
    assert max(granted) < 160


def test_prefill_always_advances():
    pacer = pacer_of()
    live(pacer, row_s=1.0)
    assert pacer.prefill_rows(64, 1) >= 8


def test_a_crowd_of_short_prompts_may_stretch_steps_up_to_a_bound():
    pacer = pacer_of()
    live(pacer, row_s=0.0002)
    pacer.observe(4, 200, 0.05)  # spread, so that no smaller step is asked for
    assert pacer.prefill_rows(4, 3) == pytest.approx(150, abs=2)
    assert pacer.prefill_rows(4, 100) == pacer.prefill_rows(4, CROWD) == pytest.approx(400, abs=4)


def test_where_the_fixed_cost_alone_breaks_the_promise_prefill_does_not_crawl():
    """A graph decodes in 2 ms; a step with prefill is launched kernel by kernel: 5 ms before any row."""
    granted = live(pacer_of(), 400, base_s=0.002, fixed_s=0.005, row_s=0.00003)
    assert 50 <= sum(granted[100:]) / 300 <= 110


def test_one_slow_step_changes_little():
    pacer = pacer_of()
    live(pacer)
    before = pacer.prefill_rows(4, 1)
    pacer.observe(4, 0, 10.0)
    pacer.observe(4, 50, 10.0)
    assert pacer.base_s < 0.02
    assert pacer.prefill_rows(4, 1) < 4 * before


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 512), st.floats(0, 1e3)), max_size=30))
def test_whatever_was_measured_the_grant_is_within_its_bounds(steps):
    pacer = pacer_of()
    for n_decode, n_prefill, seconds in steps:
        if n_decode + n_prefill:
            pacer.observe(n_decode, n_prefill, seconds)
            assert 8 <= pacer.prefill_rows(1, 1) <= 512
