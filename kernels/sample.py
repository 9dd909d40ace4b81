"""From logits to ids. The reference is also what the host device runs; `sample.cu` decides the same way.

Order: adjust, mask, temperature, top-k, top-p of what top-k kept, min-p, then the draw over descending
probability (ties by ascending id). Log-probabilities are of the model's own distribution: unadjusted,
temperature 1.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamer.kernels.ops import Float32s, Int32s, SamplingBatch, StepResult

FIRST_CANDIDATES = 128  # sorted at first; sixteen times as many whenever they do not decide
MORE_CANDIDATES = 16


@dataclass(frozen=True)
class RowSampling:
    """One row's parameters, as in `SamplingBatch`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float


def sample_reference(logits: Float32s, sampling: SamplingBatch, n_valid: int) -> StepResult:
    """Sample each row of logits (n, n_vocab). Ids >= n_valid (padding rows) are never sampled nor listed.

    Fewer than `n_top` ids are listed where there are fewer. A row with a NaN or +inf, or with nothing finite
    left to choose, has finite False and id 0. Log-probabilities count the padding rows' mass: they are the
    model's.
    """
    n, n_top = len(logits), min(sampling.n_top, n_valid)
    ids = np.zeros(n, np.int32)
    logprobs, targets = np.zeros(n, np.float32), np.zeros(n, np.float32)
    top_ids = np.zeros((n, n_top), np.int32)
    top_logprobs = np.zeros((n, n_top), np.float32)
    finite = np.zeros(n, np.bool_)
    with np.errstate(invalid="ignore", over="ignore"):
        for row in range(n):
            x = logits[row]
            total = log_sum_exp(x)
            if not np.isfinite(total):
                continue
            choice = choose_reference(*_candidates(x, sampling, row, n_valid))
            if choice is None:
                continue
            finite[row], ids[row] = True, choice
            logprobs[row] = x[choice] - total
            target = int(sampling.target_ids[row])
            if target >= 0:
                targets[row] = x[target] - total
            if n_top:
                top_ids[row] = descending(x[:n_valid], n_top)
                top_logprobs[row] = x[top_ids[row]] - total
    return StepResult(ids, logprobs, targets, top_ids, top_logprobs, finite)


def log_sum_exp(x: Float32s) -> np.float32:
    """log of the sum of e^x over a row; NaN or inf where the row holds one."""
    largest = x.max()
    shifted = x - largest
    np.exp(shifted, out=shifted)
    return np.float32(largest + np.log(shifted.sum()))


def _candidates(x: Float32s, sampling: SamplingBatch, row: int, n_valid: int) -> tuple[Float32s, RowSampling]:
    """Adjusted and masked logits of the ids that have a token, and the row's parameters."""
    adjusted = x[:n_valid]
    first, last = np.searchsorted(sampling.adjust_rows, [row, row + 1])
    if last > first:
        adjusted = _adjust(adjusted, sampling, slice(int(first), int(last)))
    if sampling.masks is not None and sampling.mask_rows is not None:
        for mask in np.flatnonzero(sampling.mask_rows == row):
            allowed = np.unpackbits(sampling.masks[mask].view(np.uint8), bitorder="little", count=n_valid)
            adjusted = np.where(allowed.view(np.bool_), adjusted, np.float32(-np.inf))
    parameters = RowSampling(
        temperature=float(sampling.temperature[row]),
        top_k=int(sampling.top_k[row]),
        top_p=float(sampling.top_p[row]),
        min_p=float(sampling.min_p[row]),
        uniform=float(sampling.uniform[row]),
    )
    return adjusted, parameters


def _adjust(x: Float32s, sampling: SamplingBatch, entries: slice) -> Float32s:
    ids = sampling.adjust_ids[entries]
    known = ids < len(x)
    ids = ids[known]
    divide, add = sampling.adjust_divide[entries][known], sampling.adjust_add[entries][known]
    x = x.copy()
    before = x[ids]
    x[ids] = np.where(before > 0, before / divide, before * divide) + add
    return x


def choose_reference(x: Float32s, row: RowSampling) -> int | None:
    """The id drawn from adjusted logits x (n_valid,); None if no logit is finite or one is NaN or +inf."""
    best = int(x.argmax())
    if not np.isfinite(x[best]):
        return None
    if row.temperature <= 0 or row.top_k == 1:
        return best
    scaled = (x - x[best]) / np.float32(row.temperature)
    mass = np.exp(scaled)  # (n_valid,) relative to the most likely: 1 there
    limit = min(row.top_k, len(x)) if row.top_k > 0 else len(x)
    n = min(limit, max(FIRST_CANDIDATES, row.top_k))
    while True:
        order = descending(scaled, n)
        cumulative = np.cumsum(mass[order], dtype=np.float64)
        whole = float(cumulative[-1]) if n == limit else float(mass.sum(dtype=np.float64))
        place = _drawn_place(mass[order], cumulative, whole, row, complete=n == limit)
        if place is not None:
            return int(order[place])
        n = min(limit, n * MORE_CANDIDATES)


def _drawn_place(
    mass: Float32s, cumulative: npt.NDArray[np.float64], whole: float, row: RowSampling, *, complete: bool
) -> int | None:
    """Index of the drawn candidate among those sorted so far; None when more of them are needed to know."""
    kept, total, known = len(mass), whole, complete
    if row.top_p < 1:
        reached = int(np.searchsorted(cumulative, row.top_p * whole)) + 1  # the id that crosses stays
        if reached <= kept:
            kept, total, known = reached, float(cumulative[reached - 1]), True
    if row.min_p > 0:
        likely = int(np.count_nonzero(mass >= np.float32(row.min_p)))
        if likely < len(mass):
            kept, known = max(min(kept, likely), 1), True
            total = float(cumulative[kept - 1])
    place = int(np.searchsorted(cumulative, row.uniform * total, side="right"))
    cut = row.top_p < 1 or row.min_p > 0
    if not known and (cut or place >= kept):
        return None
    return min(place, kept - 1)


def descending(x: Float32s, n: int) -> Int32s:
    """Ids of the n largest of x, largest first, ties by ascending id."""
    if n < len(x):
        smallest = np.partition(x, len(x) - n)[len(x) - n]  # the n-th largest
        ids = np.flatnonzero(x >= smallest)  # more than n where it ties
    else:
        ids = np.arange(len(x))
    return ids[np.argsort(-x[ids], kind="stable")][:n].astype(np.int32)
