import pytest

from streamer.engine.pacing import CROWD, Pacer


def taught(base_s: float = 0.01, row_s: float = 0.0001) -> Pacer:
    pacer = Pacer(slack=2.0, min_rows=16, max_rows=512)
    for _ in range(50):
        pacer.observe(4, 0, base_s)
        pacer.observe(4, 64, base_s + 64 * row_s)
    return pacer


def test_prefill_alone_takes_whole_steps():
    assert taught().prefill_rows(0, 1) == 512


def test_beside_streams_a_step_lasts_at_most_slack_times_longer():
    assert taught().prefill_rows(4, 1) == pytest.approx(100, abs=1)
    assert taught(base_s=0.002, row_s=0.00004).prefill_rows(4, 1) == pytest.approx(50, abs=1)


def test_before_anything_is_known_little_is_risked():
    assert Pacer(slack=2.0, min_rows=16, max_rows=512).prefill_rows(1, 1) == 16


def test_prefill_always_advances():
    assert taught(base_s=0.001, row_s=1.0).prefill_rows(64, 1) == 16


def test_a_crowd_of_short_prompts_may_stretch_steps_up_to_a_bound():
    pacer = taught(row_s=0.0002)
    assert pacer.prefill_rows(4, 3) == pytest.approx(150, abs=1)
    assert pacer.prefill_rows(4, 100) == pacer.prefill_rows(4, CROWD) == pytest.approx(400, abs=1)


def test_one_slow_step_changes_little():
    pacer = taught()
    pacer.observe(4, 0, 10.0)
    assert pacer.base_s < 0.02


def test_prefill_steps_of_their_own_teach_the_row_cost_too():
    pacer = Pacer(slack=2.0, min_rows=16, max_rows=512)
    pacer.observe(4, 0, 0.01)
    pacer.observe(0, 500, 0.06)
    assert pacer.prefill_rows(4, 1) == pytest.approx(100, abs=1)


def test_steps_that_are_always_mixed_teach_it_as_well():
    pacer = Pacer(slack=2.0, min_rows=16, max_rows=512)
    for _ in range(20):
        n_prefill = pacer.prefill_rows(4, 1)
        pacer.observe(4, n_prefill, 0.01 + n_prefill * 0.0001)
    assert pacer.prefill_rows(4, 1) > 80
