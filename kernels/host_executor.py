"""Steps of a model on the host: one thread computes, inside `step`; helpers share large products."""

from dataclasses import dataclass

import numpy as np

from streamer.kernels.host_batch import read_batch
from streamer.kernels.host_ops import HostOps
from streamer.kernels.host_threads import HostProducts, SingleThreadedBlas, Team, allowed_cpus
from streamer.kernels.ops import (
    Batch,
    CacheStorage,
    ExecutorStatistics,
    Float32s,
    Model,
    SamplingBatch,
    StepResult,
)
from streamer.kernels.sample import sample_reference


@dataclass(frozen=True)
class Done:
    """A `PendingStep` that is not pending: the host computes inside `step`."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class HostExecutor:
    """`Executor` on the host. Owned by one thread; keeps the last sampled id of each slot.

    `n_valid`: ids from there on have no token and are never sampled. Owns its threads, not the cache.
    `threads` None: as many as the process may use.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheStorage,
        *,
        n_valid: int,
        threads: int | None = None,
    ) -> None:
        self._model, self._cache, self._n_valid = model, cache, n_valid
        self._blas = SingleThreadedBlas()
        self._team = Team(threads if threads is not None else allowed_cpus())
        self._products = HostProducts(self._team)
        self._ops = HostOps(cache, self._products)
        self._last_ids = np.zeros(cache.n_slots, np.int32)
        self._recurrent = [x.layer for x in cache.layout.recurrent]
        self._steps = 0

    def warm(self) -> None:
        """Measure what a core gives, so that only products worth it are split."""
        self._products.measure()

    def step(self, batch: Batch, sampling: SamplingBatch) -> Done:
        """Compute now. A row that overflows ends as a result that is not finite, never as a warning."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            self._ops.begin(read_batch(batch, self._cache.layout.page_size, self._last_ids))
            out = self._model.forward(self._ops)
            self._steps += 1
            if batch.want_hidden:
                return Done(_hidden_result(out))
            result = sample_reference(out, sampling, self._n_valid)
        kept = sampling.slots >= 0
        self._last_ids[sampling.slots[kept]] = result.ids[kept]
        return Done(result)

    def prepare_more(self) -> bool:
        return False

    def copy_state(self, source_slot: int, target_slot: int) -> None:
        for layer in self._recurrent:
            for state in (self._cache.conv_state(layer), self._cache.delta_state(layer)):
                state[target_slot] = state[source_slot]

    def reset_state(self, slot: int) -> None:
        for layer in self._recurrent:
            self._cache.conv_state(layer)[slot] = 0
            self._cache.delta_state(layer)[slot] = 0

    def statistics(self) -> ExecutorStatistics:
        return ExecutorStatistics(self._steps, 0, {"threads": self._team.size})

    def close(self) -> None:
        """End the helpers and give BLAS its threads back. Idempotent."""
        self._team.close()
        self._blas.restore()


def _hidden_result(hidden: Float32s) -> StepResult:
    n = len(hidden)
    zeros, ids = np.zeros(n, np.float32), np.zeros(n, np.int32)
    top = np.zeros((n, 0), np.int32)
    finite = np.logical_and.reduce(np.isfinite(hidden), axis=1)
    return StepResult(ids, zeros, zeros, top, top.astype(np.float32), finite, hidden)
