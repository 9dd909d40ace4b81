"""Constraint masks, computed by worker threads while the device runs the step before."""

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from streamer.engine.request import Constraint
from streamer.engine.sequence import Mask, Sequence

PATIENCE_S = 0.02  # others wait no longer for a slow mask, of which some grammars have seconds


class MaskWorkers:
    """At most one call into a constraint at a time: the next is asked for only after the last one's answer
    was used.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, sequence: Sequence) -> None:
        """The mask of the first id, before the prompt is computed. Preemption keeps the one it has."""
        constraint = sequence.request.constraint
        if constraint is not None:
            sequence.mask = self._submit(constraint, None)

    def advance(self, sequence: Sequence, token_id: int) -> None:
        """`token_id` was sampled: tell the constraint, then compute the next mask."""
        assert sequence.request.constraint is not None
        sequence.mask = self._submit(sequence.request.constraint, token_id)

    def _submit(self, constraint: Constraint, token_id: int | None) -> Future[Mask]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._n_threads, thread_name_prefix="mask")
        return self._pool.submit(_next_mask, constraint, token_id)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _next_mask(constraint: Constraint, token_id: int | None) -> Mask:
    if token_id is not None:
        constraint.accept(token_id)
    if constraint.is_finished:
        return Mask(True, None)
    return Mask(False, constraint.mask())


def wait_for_masks(sequences: Iterable[Sequence], *, every: bool) -> None:
    """Until one (or `every` one) of the masks under way is there, or patience is over."""
    pending = [s.mask for s in sequences if s.mask is not None and not s.knows_mask]
    if pending:
        wait(pending, PATIENCE_S, return_when="ALL_COMPLETED" if every else FIRST_COMPLETED)
