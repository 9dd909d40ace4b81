"""SamplingParameters of many sequences -> the rows of a SamplingBatch, and the random draws.

The draw for the id at `position` (0 is the prompt's first id) of a sequence with `seed` is output number
`position` of the splitmix64 generator whose state starts at mix64(seed): state + (position + 1) * GOLDEN,
mixed, and the upper 24 bits as a float32 in [0, 1). A pure function of (seed, position): the batch, the
device, preemption and prefix reuse cannot change it. Constants: Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", 2014.
"""

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamer.engine.request import SamplingParameters
from streamer.engine.sequence import Sequence
from streamer.kernels.ops import Float32s, Int32s, SamplingBatch, UInt32s

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_A, MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
MAX_TOP = 20

_NO_IDS = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)


def mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser; a bijection of 64-bit integers."""
    x = (x ^ (x >> np.uint64(30))) * MIX_A
    x = (x ^ (x >> np.uint64(27))) * MIX_B
    return x ^ (x >> np.uint64(31))


def seed_state(seed: int) -> int:
    """Where the generator of `seed` (any integer, taken modulo 2^64) starts."""
    return int(mix64(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))[0])


def uniform_draws(states: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> Float32s:
    """(n,) float32 in [0, 1) for start states `seed_state(seed)` and positions of the ids to be sampled."""
    mixed = mix64(states + (positions + np.uint64(1)) * GOLDEN)
    return (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


@dataclass(frozen=True)
class LogitRow:
    """One logit row that is no plain decode row: what is wanted of it."""

    sequence: Sequence
    position: int  # of the row's token; the row's logits are about position + 1
    samples: bool
    target_id: int = -1


class SamplerTable:
    """What the executor must know of each sequence slot, in arrays indexed by slot: written once at
    admission.
    """

    def __init__(self, n_slots: int) -> None:
        self._state = np.zeros(n_slots, np.uint64)
        self._temperature = np.zeros(n_slots, np.float32)
        self._top_k = np.zeros(n_slots, np.int32)
        self._top_p = np.ones(n_slots, np.float32)
        self._min_p = np.zeros(n_slots, np.float32)
        self._n_top = [0] * n_slots
        self._adjusted: set[int] = set()  # slots with a logit bias or penalties
        self._constrained: set[int] = set()
        self._bias: dict[int, tuple[Int32s, Float32s]] = {}

    def admit(self, slot: int, sequence: Sequence) -> None:
        p = sequence.request.sampling
        self._state[slot] = seed_state(p.seed)
        self._temperature[slot], self._top_k[slot] = p.temperature, p.top_k
        self._top_p[slot], self._min_p[slot] = p.top_p, p.min_p
        self._n_top[slot] = min(p.n_logprobs or 0, MAX_TOP)
        self._bias.pop(slot, None)
        if p.logit_bias:
            self._bias[slot] = _bias_arrays(p)
        _keep(self._adjusted, slot, bool(p.logit_bias) or sequence.penalties is not None)
        _keep(self._constrained, slot, sequence.request.constraint is not None)

    def batch(
        self, decode: AbstractSequence[Sequence], slots: Int32s, positions: Int32s, others: list[LogitRow]
    ) -> SamplingBatch:
        """Rows of `decode` (slots, positions: (len(decode),) of their tokens), then `others`."""
        special = self._special_rows(decode, others)
        store = slots
        targets = np.full(len(decode) + len(others), -1, np.int32)
        if others:
            slots = np.concatenate([slots, np.array([r.sequence.slot for r in others], np.int32)])
            store = slots.copy()
            store[len(decode) :][[not r.samples for r in others]] = -1
            positions = np.concatenate([positions, np.array([r.position for r in others], np.int32)])
            targets[len(decode) :] = [r.target_id for r in others]
        rows, ids, divide, add = self._adjustments(special)
        masks, mask_rows = self._masks(special)
        return SamplingBatch(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            uniform=uniform_draws(self._state[slots], positions.astype(np.uint64) + np.uint64(1)),
            slots=store,
            target_ids=targets,
            adjust_rows=rows,
            adjust_ids=ids,
            adjust_divide=divide,
            adjust_add=add,
            masks=masks,
            mask_rows=mask_rows,
            n_top=self._widest_top(decode, others),
        )

    def _widest_top(self, decode: AbstractSequence[Sequence], others: list[LogitRow]) -> int:
        n_top = self._n_top
        widest = max([n_top[s.slot] for s in decode], default=0)
        return max([n_top[r.sequence.slot] for r in others], default=widest) if others else widest

    def _special_rows(
        self, decode: AbstractSequence[Sequence], others: list[LogitRow]
    ) -> list[tuple[int, Sequence]]:
        """(row, sequence) of the sampling rows that have adjustments or masks."""
        special = self._adjusted | self._constrained
        if not special:
            return []
        found = [(row, s) for row, s in enumerate(decode) if s.slot in special]
        n = len(decode)
        found += [
            (n + i, r.sequence) for i, r in enumerate(others) if r.samples and r.sequence.slot in special
        ]
        return found

    def _adjustments(self, rows: list[tuple[int, Sequence]]) -> tuple[Int32s, Int32s, Float32s, Float32s]:
        parts = []
        for row, sequence in rows:
            if sequence.slot in self._adjusted:
                ids, divide, add = self._merged(sequence)
                parts.append((np.full(len(ids), row, np.int32), ids, divide, add))
        if not parts:
            return _NO_IDS, _NO_IDS, _NO_VALUES, _NO_VALUES
        columns = list(zip(*parts, strict=True))
        return (
            np.concatenate(columns[0]),
            np.concatenate(columns[1]),
            np.concatenate(columns[2]),
            np.concatenate(columns[3]),
        )

    def _merged(self, sequence: Sequence) -> tuple[Int32s, Float32s, Float32s]:
        """Penalties and bias of one sequence, one entry an id."""
        bias = self._bias.get(sequence.slot)
        if sequence.penalties is None:
            assert bias is not None
            return bias[0], np.ones(len(bias[0]), np.float32), bias[1]
        ids, divide, add = sequence.penalties.adjustments()
        if bias is None:
            return ids, divide, add
        every, inverse = np.unique(np.concatenate([ids, bias[0]]), return_inverse=True)
        all_divide, all_add = np.ones(len(every), np.float32), np.zeros(len(every), np.float32)
        all_divide[inverse[: len(ids)]] = divide
        np.add.at(all_add, inverse, np.concatenate([add, bias[1]]))
        return every.astype(np.int32), all_divide, all_add

    def _masks(self, rows: list[tuple[int, Sequence]]) -> tuple[UInt32s | None, Int32s | None]:
        masks, mask_rows = [], []
        for row, sequence in rows:
            if sequence.slot in self._constrained:
                assert sequence.mask is not None, f"{sequence} has no mask under way"
                bits = sequence.mask.result().bits
                if bits is not None:
                    masks.append(np.frombuffer(bits, np.uint32))
                    mask_rows.append(row)
        if not masks:
            return None, None
        return np.stack(masks), np.array(mask_rows, np.int32)


def _bias_arrays(parameters: SamplingParameters) -> tuple[Int32s, Float32s]:
    """(ids, add), ids distinct and ascending; an id given twice counts with the last value."""
    entries = sorted(dict(parameters.logit_bias).items())
    return np.array([id for id, _ in entries], np.int32), np.array(
        [value for _, value in entries], np.float32
    )


def _keep(slots: set[int], slot: int, wanted: bool) -> None:
    if wanted:
        slots.add(slot)
    else:
        slots.discard(slot)
