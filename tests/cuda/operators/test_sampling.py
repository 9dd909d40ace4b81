"""Sampling on the device against the numpy reference: the same ids from the same draws."""

from typing import Any

import numpy as np
import pytest

from streamer.kernels.ops import SamplingBatch
from streamer.kernels.sample import sample_reference

pytestmark = pytest.mark.cuda


def sampling_rows(rng: np.random.Generator, n: int, vocab: int) -> SamplingBatch:
    """Every kind of row: greedy, plain draws, cuts of all sorts, penalties and masks."""
    f, i = np.float32, np.int32
    temperature = rng.choice([0, 0.3, 0.7, 1, 1.5], n).astype(f)
    rows = np.sort(rng.integers(0, n, 5 * n)).astype(i)
    ids = np.concatenate([rng.choice(vocab, np.count_nonzero(rows == r), replace=False) for r in range(n)])
    words = -(-vocab // 32)
    masked = np.arange(0, n, 5, dtype=i)
    return SamplingBatch(
        temperature=temperature,
        top_k=rng.choice([0, 0, 1, 5, 40, 500], n).astype(i),
        top_p=rng.choice([1, 1, 0.95, 0.5], n).astype(f),
        min_p=rng.choice([0, 0, 0.05], n).astype(f),
        uniform=rng.random(n).astype(f),
        slots=np.arange(n, dtype=i),
        target_ids=rng.integers(-1, vocab, n).astype(i),
        adjust_rows=rows,
        adjust_ids=ids.astype(i),
        adjust_divide=rng.choice([1, 1.3], len(rows)).astype(f),
        adjust_add=rng.choice([0, -1, 5], len(rows)).astype(f),
        masks=rng.integers(0, 2**32, (len(masked), words), dtype=np.uint32),
        mask_rows=masked,
        n_top=7,
    )


@pytest.mark.parametrize(("vocab", "n_valid"), [(512, 500), (49152, 49152), (151936, 151669)])
def test_sampling(bench: Any, vocab: int, n_valid: int) -> None:
    rng = np.random.default_rng(vocab)
    n = 64
    logits = (rng.standard_normal((n, vocab)) * rng.choice([1, 3, 6], (n, 1))).astype(np.float32)
    logits[7, 3] = np.nan
    s = sampling_rows(rng, n, n_valid)
    assert s.masks is not None
    assert s.mask_rows is not None
    start = np.searchsorted(s.adjust_rows, np.arange(n + 1)).astype(np.int32)
    mask_of = np.full(n, -1, np.int32)
    mask_of[s.mask_rows] = np.arange(len(s.mask_rows))
    slices = -(-vocab // 4096)
    d_logits, work, stats = bench.put(logits), bench.poisoned((n, vocab)), bench.poisoned((n * slices, 8))
    histograms, temperature = bench.put(np.zeros((n, 256 * 12), np.uint8)), bench.put(s.temperature)
    names = ("ids", "logprobs", "targets", "finite", "sums")
    out = {name: bench.poisoned((n,)) for name in names}
    last = bench.put(np.full(n, -5, np.int32))
    bench.launch(
        "sample.cu",
        "sample_prepare",
        (slices, n),
        256,
        d_logits,
        work,
        stats,
        temperature,
        bench.put(start),
        bench.put(s.adjust_ids),
        bench.put(s.adjust_divide),
        bench.put(s.adjust_add),
        bench.put(mask_of),
        bench.put(s.masks),
        vocab,
        vocab,
        n_valid,
        s.masks.shape[1],
    )
    bench.launch(
        "sample.cu", "sample_histogram", (slices, n), 256, work, stats, temperature, histograms, vocab, vocab
    )
    bench.launch(
        "sample.cu",
        "sample_pick",
        (n,),
        1024,
        d_logits,
        work,
        stats,
        histograms,
        temperature,
        bench.put(s.top_k),
        bench.put(s.top_p),
        bench.put(s.min_p),
        bench.put(s.uniform),
        bench.put(s.slots),
        bench.put(s.target_ids),
        last,
        out["ids"],
        out["logprobs"],
        out["targets"],
        out["finite"],
        out["sums"],
        vocab,
        vocab,
        slices,
    )
    top_ids, top = bench.poisoned((n, 7)), bench.poisoned((n, 7))
    bench.launch(
        "sample.cu", "sample_top", (n,), 1024, d_logits, out["sums"], top_ids, top, vocab, n_valid, 7
    )
    want = sample_reference(logits, s, n_valid)
    ids, finite = bench.get(out["ids"], (n,), np.int32), bench.get(out["finite"], (n,), np.int32)
    assert (finite.astype(bool) == want.finite).all()
    assert not finite[7]
    ok = want.finite
    # a draw that falls within rounding of a boundary may land on the neighbour: at most one row in this many
    assert np.count_nonzero(ids[ok] != want.ids[ok]) <= 1
    same = ok & (ids == want.ids)
    assert np.abs(bench.get(out["logprobs"], (n,))[same] - want.logprobs[same]).max() < 2e-4
    assert np.abs(bench.get(out["targets"], (n,))[ok] - want.target_logprobs[ok]).max() < 2e-4
    assert (bench.get(last, (n,), np.int32) == ids).all()
    assert (bench.get(top_ids, (n, 7), np.int32)[ok] == want.top_ids[ok]).all()
    assert np.abs(bench.get(top, (n, 7))[ok] - want.top_logprobs[ok]).max() < 2e-4
    assert (bench.get(histograms, (n, 256 * 12), np.uint8) == 0).all()  # ready for the next step
