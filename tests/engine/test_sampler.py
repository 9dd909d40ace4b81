import numpy as np
import pytest

from streamer.engine.penalties import Penalties
from streamer.engine.request import SamplingParameters
from streamer.engine.sampler import mix64, seed_state, uniform_draws


def splitmix64(state: int, n: int) -> list[int]:
    """The generator as published, in plain integers."""
    mask = 2**64 - 1
    outputs = []
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    return outputs


def draws(seed: int, positions: range) -> np.ndarray:
    states = np.full(len(positions), seed_state(seed), np.uint64)
    return uniform_draws(states, np.array(positions, np.uint64))


def test_splitmix64_gives_its_published_first_outputs():
    assert splitmix64(0, 3) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1, -1, 2**70 + 3])
def test_draws_are_the_documented_generator(seed):
    expected = [(z >> 40) / 2**24 for z in splitmix64(seed_state(seed), 50)]
    assert draws(seed, range(50)).tolist() == expected


def test_a_draw_depends_on_seed_and_position_only():
    together = uniform_draws(
        np.array([seed_state(s) for s in (1, 2, 3)], np.uint64), np.array([5, 6, 7], np.uint64)
    )
    for i, (seed, position) in enumerate([(1, 5), (2, 6), (3, 7)]):
        assert together[i] == draws(seed, range(position, position + 1))[0]


def test_draws_are_in_the_half_open_interval_and_uniform():
    values = np.concatenate([draws(seed, range(1000)) for seed in range(50)])
    assert values.dtype == np.float32
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts, _ = np.histogram(values, 20, (0, 1))
    assert np.all(np.abs(counts - 2500) < 6 * np.sqrt(2500))  # six sigma


def test_neighbouring_seeds_and_positions_are_uncorrelated():
    grid = np.stack([draws(seed, range(400)) for seed in range(40)])
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.04
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.04


def test_mixing_is_a_bijection_on_a_sample():
    assert len(np.unique(mix64(np.arange(10_000, dtype=np.uint64)))) == 10_000


def adjustments(penalties: Penalties) -> dict[int, tuple[float, float]]:
    ids, divide, add = penalties.adjustments()
    return {int(i): (float(d), float(a)) for i, d, a in zip(ids, divide, add, strict=True)}


def test_penalties_count_the_last_n_ids():
    parameters = SamplingParameters(
        repeat_penalty=1.25, repeat_last_n=3, presence_penalty=0.5, frequency_penalty=0.25
    )
    penalties = Penalties(parameters, [1, 2, 2])
    assert adjustments(penalties) == {1: (1.25, -0.75), 2: (1.25, -1.0)}
    penalties.push(2)
    assert adjustments(penalties) == {2: (1.25, -1.25)}
    penalties.push(5)
    assert adjustments(penalties) == {2: (1.25, -1.0), 5: (1.25, -0.75)}


def test_a_window_of_minus_one_is_the_whole_sequence():
    penalties = Penalties(SamplingParameters(frequency_penalty=1.0, repeat_last_n=-1), range(200))
    assert len(adjustments(penalties)) == 200


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        (SamplingParameters(), False),
        (SamplingParameters(repeat_penalty=1.1), True),
        (SamplingParameters(repeat_penalty=1.1, repeat_last_n=0), False),
        (SamplingParameters(presence_penalty=-0.1), True),
        (SamplingParameters(frequency_penalty=0.1), True),
        (SamplingParameters(logit_bias=((1, 2.0),)), False),
    ],
)
def test_penalties_are_kept_only_when_they_do_something(parameters, wanted):
    assert Penalties.wanted(parameters) is wanted
