"""Repetition, presence and frequency penalties over a sequence's last n ids, counted incrementally."""

from collections import Counter, deque
from collections.abc import Iterable

import numpy as np

from streamer.engine.request import SamplingParameters
from streamer.kernels.ops import Float32s, Int32s

WHOLE = -1  # repeat_last_n: the whole sequence


class Penalties:
    """The window holds the prompt's ids too, as llama-server counts. `push` costs O(1), `adjustments`
    O(distinct).
    """

    def __init__(self, parameters: SamplingParameters, ids: Iterable[int]) -> None:
        self._parameters = parameters
        self._length = None if parameters.repeat_last_n == WHOLE else parameters.repeat_last_n
        self._window: deque[int] = deque()
        self._counts: Counter[int] = Counter()
        for id in ids:
            self.push(id)

    @staticmethod
    def wanted(parameters: SamplingParameters) -> bool:
        return parameters.repeat_last_n != 0 and (
            parameters.repeat_penalty != 1.0
            or parameters.presence_penalty != 0.0
            or parameters.frequency_penalty != 0.0
        )

    def push(self, id: int) -> None:
        self._window.append(id)
        self._counts[id] += 1
        if self._length is not None and len(self._window) > self._length:
            oldest = self._window.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def adjustments(self) -> tuple[Int32s, Float32s, Float32s]:
        """(ids, divide, add), each (n_distinct,): logit = (l > 0 ? l / divide : l * divide) + add."""
        n = len(self._counts)
        ids = np.fromiter(self._counts.keys(), np.int32, n)
        counts = np.fromiter(self._counts.values(), np.float32, n)
        p = self._parameters
        divide = np.full(n, p.repeat_penalty, np.float32)
        add = -(np.float32(p.presence_penalty) + np.float32(p.frequency_penalty) * counts)
        return ids, divide, add.astype(np.float32, copy=False)
