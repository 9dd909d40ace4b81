"""Sampling: order of the cuts, the draw, log-probabilities, masks, what is never sampled."""

import math
from dataclasses import replace

import numpy as np
import pytest

from streamer.kernels.ops import SamplingBatch
from streamer.kernels.sample import descending, sample_reference

RNG = np.random.default_rng(8)


def batch(n=1, **changes):
    none = np.zeros(0, np.int32)
    neutral = SamplingBatch(
        temperature=np.zeros(n, np.float32),
        top_k=np.zeros(n, np.int32),
        top_p=np.ones(n, np.float32),
        min_p=np.zeros(n, np.float32),
        uniform=np.zeros(n, np.float32),
        slots=np.full(n, -1, np.int32),
        target_ids=np.full(n, -1, np.int32),
        adjust_rows=none,
        adjust_ids=none,
        adjust_divide=none.astype(np.float32),
        adjust_add=none.astype(np.float32),
    )
    arrays = {
        k: np.full(n, v, getattr(neutral, k).dtype) if np.isscalar(v) and k != "n_top" else v
        for k, v in changes.items()
    }
    return replace(neutral, **arrays)


def adjusted(entries, **changes):
    rows, ids, divide, add = zip(*entries, strict=True)
    return batch(
        adjust_rows=np.array(rows, np.int32),
        adjust_ids=np.array(ids, np.int32),
        adjust_divide=np.array(divide, np.float32),
        adjust_add=np.array(add, np.float32),
        **changes,
    )


def drawn(logits, **changes):
    x = np.atleast_2d(np.asarray(logits, np.float32))
    return int(sample_reference(x, batch(**changes), x.shape[1]).ids[0])


def loop_choice(logits, temperature, top_k, top_p, min_p, uniform):
    """The same decision in plain Python and float64."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    mass = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    kept = order[:top_k] if top_k else order
    if top_p < 1:
        limit, reached, cut = top_p * sum(mass[i] for i in kept), 0.0, []
        for i in kept:
            cut.append(i)
            reached += mass[i]
            if reached >= limit:
                break
        kept = cut
    kept = [i for i in kept if mass[i] >= min_p] or kept[:1]
    mark, reached = uniform * sum(mass[i] for i in kept), 0.0
    for i in kept:
        reached += mass[i]
        if reached > mark:
            return i
    return kept[-1]


@pytest.mark.parametrize("n", [40, 3000])
def test_draws_equal_the_plain_decision(n):
    logits = (RNG.standard_normal(n) * 3).astype(np.float32)
    for _ in range(150):
        choice = {
            "temperature": float(RNG.choice([0.3, 1.0, 4.0])),
            "top_k": int(RNG.choice([0, 1, 5, 200])),
            "top_p": float(RNG.choice([0.2, 0.95, 1.0])),
            "min_p": float(RNG.choice([0.0, 0.05, 0.5])),
            "uniform": float(np.float32(RNG.uniform())),
        }
        want = loop_choice(logits.astype(np.float64), **choice)
        assert drawn(logits, **choice) == want, choice


def test_frequencies_follow_the_distribution():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    ids = [drawn(logits, temperature=1.0, uniform=u) for u in np.linspace(0, 1, 1000, endpoint=False)]
    assert np.abs(np.bincount(ids) / 1000 - [0.5, 0.3, 0.15, 0.05]).max() <= 2e-3


def test_greedy_takes_the_lowest_of_equal_ids():
    assert drawn([1.0, 5.0, 5.0, 0.0]) == 1


def test_padding_rows_are_never_sampled_nor_listed():
    """Case 23: 40 tokens over 64 logit rows, row 50 the largest."""
    logits = RNG.standard_normal((3, 64)).astype(np.float32)
    logits[:, 50] = 30.0
    for sampling in (batch(3, n_top=20), batch(3, temperature=1.5, uniform=0.999, n_top=20)):
        result = sample_reference(logits, sampling, 40)
        assert result.ids.max() < 40
        assert result.top_ids.max() < 40
        assert result.finite.all()


def test_logprobs_are_of_the_unadjusted_distribution():
    logits = RNG.standard_normal((1, 30)).astype(np.float32)
    want = logits[0] - math.log(sum(math.exp(v) for v in logits[0].astype(np.float64)))
    sampling = adjusted([(0, 7, 1.0, 100.0)], temperature=0.5, target_ids=3, n_top=5)
    result = sample_reference(logits, sampling, 30)
    assert result.ids[0] == 7
    assert math.isclose(result.logprobs[0], want[7], abs_tol=1e-5)
    assert math.isclose(result.target_logprobs[0], want[3], abs_tol=1e-5)
    best = np.argsort(-want)[:5]
    assert result.top_ids[0].tolist() == best.tolist()
    assert np.abs(result.top_logprobs[0] - want[best]).max() < 1e-5


def test_adjustments_divide_positive_and_multiply_negative_logits():
    logits = np.array([[2.0, 1.5, -1.0, -1.2]], np.float32)
    assert sample_reference(logits, adjusted([(0, 0, 2.0, 0.0)]), 4).ids[0] == 1
    both = adjusted([(0, 0, 1.0, -9.0), (0, 1, 1.0, -9.0), (0, 2, 1.5, 0.0)])
    assert sample_reference(logits, both, 4).ids[0] == 3


def test_adjustments_reach_their_row_only():
    logits = np.zeros((3, 8), np.float32)
    sampling = replace(
        batch(3),
        adjust_rows=np.array([0, 2], np.int32),
        adjust_ids=np.array([4, 6], np.int32),
        adjust_divide=np.ones(2, np.float32),
        adjust_add=np.full(2, 5.0, np.float32),
    )
    assert sample_reference(logits, sampling, 8).ids.tolist() == [4, 0, 6]
    assert not logits.any()


def test_mask_allows_only_its_ids():
    logits = RNG.standard_normal((2, 70)).astype(np.float32)
    mask = np.zeros((1, 3), np.uint32)
    for allowed in (33, 65):
        mask[0, allowed // 32] |= np.uint32(1 << allowed % 32)
    sampling = batch(2, masks=mask, mask_rows=np.array([1], np.int32), temperature=2.0, uniform=0.99)
    assert sample_reference(logits, sampling, 70).ids[1] in (33, 65)


def test_row_without_anything_to_choose_is_not_finite():
    logits = np.zeros((4, 40), np.float32)
    logits[1, 3] = np.nan
    logits[2, 3] = np.inf
    sampling = batch(4, masks=np.zeros((1, 2), np.uint32), mask_rows=np.array([3], np.int32), n_top=2)
    result = sample_reference(logits, sampling, 40)
    assert result.finite.tolist() == [True, False, False, False]
    assert np.isfinite(result.logprobs).all()


def test_some_minus_infinities_are_ordinary():
    logits = np.array([[-np.inf, 0.0, -np.inf, 1.0]], np.float32)
    result = sample_reference(logits, batch(temperature=1.0, uniform=0.9999), 4)
    assert result.finite[0]
    assert result.ids[0] == 1


def test_small_vocabulary_lists_what_it_has():
    result = sample_reference(np.zeros((1, 8), np.float32), batch(n_top=20), 3)
    assert result.top_ids.tolist() == [[0, 1, 2]]


def test_descending_breaks_ties_by_id():
    x = np.array([1, 3, 3, 0, 3, 2], np.float32)
    assert descending(x, 2).tolist() == [1, 2]
    assert descending(x, 5).tolist() == [1, 2, 4, 5, 0]
    assert descending(x, 9).tolist() == [1, 2, 4, 5, 0, 3]
