"""What the load generator asks for: a function of the seed and the request's number alone."""

import itertools
import statistics
from pathlib import Path

import numpy as np
import pytest

from streamer.bench.serve_shapes import (
    Fixed,
    LogNormal,
    Uniform,
    Workload,
    arrival_times,
    parse_lengths,
    read_lines,
)


def draws(lengths, n=2000):
    rng = np.random.default_rng(7)
    return [lengths.draw(rng) for _ in range(n)]


def test_lengths_are_read_from_text():
    assert parse_lengths("128") == Fixed(128)
    assert parse_lengths("fixed:5") == Fixed(5)
    assert parse_lengths("uniform:16:32") == Uniform(16, 32)
    assert parse_lengths("lognormal:400:0.8:2048") == LogNormal(400, 0.8, 2048)


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "x", "uniform:5", "uniform:9:3", "lognormal:0:1", "gamma:3:4"]
)
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(ValueError, match="not N, fixed:N"):
        parse_lengths(text)


def test_uniform_lengths_reach_both_ends():
    found = draws(Uniform(3, 6))
    assert set(found) == {3, 4, 5, 6}


def test_lognormal_lengths_have_their_median_and_stay_below_the_limit():
    found = draws(LogNormal(400, 0.8, 1000))
    assert 360 < statistics.median(found) < 440
    assert max(found) == 1000
    assert min(found) >= 1


def test_a_request_is_a_function_of_seed_and_number():
    one, same = (Workload(Uniform(4, 40), Uniform(1, 9), 3, n_vocab=1000) for _ in range(2))
    assert [one.item(i) for i in range(20)] == [same.item(i) for i in reversed(range(20))][::-1]
    other = Workload(Uniform(4, 40), Uniform(1, 9), 4, n_vocab=1000)
    assert one.item(0) != other.item(0)
    assert one.item(0) != one.item(1)


def test_ids_are_in_the_vocabulary_and_words_are_text():
    ids = Workload(Fixed(500), Fixed(1), n_vocab=50).item(0).prompt
    assert isinstance(ids, list)
    assert len(ids) == 500
    assert set(ids) <= set(range(50))
    text = Workload(Fixed(5), Fixed(1)).item(0).prompt
    assert isinstance(text, str)
    assert len(text.split()) == 5


def test_a_file_of_requests_is_sent_over_and_over(tmp_path: Path):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "Hi", "output_tokens": 3}\n\n{"prompt_tokens": 7, "output_tokens": 2}\n')
    workload = Workload(Fixed(1), Fixed(1), n_vocab=9, lines=read_lines(path))
    assert workload.item(0).prompt == workload.item(2).prompt == "Hi"
    assert len(workload.item(1).prompt) == 7
    assert [workload.item(i).max_tokens for i in range(4)] == [3, 2, 3, 2]


@pytest.mark.parametrize("line", ["{", '{"output_tokens": 3}', '{"prompt": "a", "output_tokens": 0}', "[1]"])
def test_a_bad_line_is_named(tmp_path: Path, line):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "Hi", "output_tokens": 3}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read_lines(path)


def test_arrivals_come_at_their_rate_and_again_with_the_same_seed():
    times = list(itertools.islice(arrival_times(50.0, 1), 5000))
    assert times == list(itertools.islice(arrival_times(50.0, 1), 5000))
    assert times != list(itertools.islice(arrival_times(50.0, 2), 5000))
    gaps = np.diff([0.0, *times])
    assert 0.9 < gaps.mean() * 50 < 1.1
    assert 0.9 < gaps.std() * 50 < 1.1  # exponential: the deviation is the mean
