"""A fake executor and builders for the engine's tests.

The fake keeps, per page and position, a digest of everything up to there, as attention would see it: a page
shared wrongly, written twice or read before it was computed changes the ids. Recurrent state is the same
digest, per slot.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from streamer.cache.pages import PagePool
from streamer.cache.snapshots import SnapshotTable
from streamer.engine.request import Event, FinishEvent, FinishReason, Request, SamplingParameters, TokenEvent
from streamer.engine.sampler import seed_state, uniform_draws
from streamer.engine.sequence import Sequence as EngineSequence
from streamer.engine.sequence import new_sequence
from streamer.engine.steps import EngineOptions, StepLoop
from streamer.errors import DeviceError
from streamer.kernels.ops import Batch, SamplingBatch, StepResult

N_VOCAB = 997
START = 12345


def digest(before: int, id: int) -> int:
    return (before * 6364136223846793005 + id * 2862933555777941757 + 3037000493) & 0xFFFFFFFFFFFFFFFF


def pick(state: int, uniform: float, temperature: float) -> int:
    """The fake model's id after a prefix with digest `state`."""
    if temperature == 0.0:
        return (state >> 20) % N_VOCAB
    return ((state >> 20) + int(uniform * 2**24)) % N_VOCAB


def run_alone(request: Request, n: int) -> list[int]:
    """What the fake model generates for a request without constraint or adjustments: the reference."""
    state = START
    for id in request.prompt_ids:
        state = digest(state, int(id))
    ids: list[int] = []
    seed = np.array([seed_state(request.sampling.seed)], np.uint64)
    for position in range(len(request.prompt_ids), len(request.prompt_ids) + n):
        uniform = float(uniform_draws(seed, np.array([position], np.uint64))[0])
        id = pick(state, uniform, request.sampling.temperature)
        ids.append(id)
        if id in request.end_ids:
            break
        state = digest(state, id)
    return ids


@dataclass
class VirtualClock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakePending:
    outcome: StepResult | Exception
    clock: VirtualClock
    seconds: float
    gate: threading.Event | None

    def result(self) -> StepResult:
        if self.gate is not None:
            assert self.gate.wait(60), "the test never opened the gate"
        self.clock.now += self.seconds
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclass
class FakeExecutor:
    """Computes at `step`, as a device that runs its stream in order would; `result` only hands over."""

    n_pages: int
    page_size: int
    n_slots: int
    is_recurrent: bool = False
    clock: VirtualClock = field(default_factory=VirtualClock)
    base_s: float = 0.01  # of a step
    row_s: float = 0.0001  # more for each prefill row
    fail_at: int | None = None  # the step whose result raises DeviceError
    fail_in_call: bool = False  # raise from `step` itself instead
    poison: Callable[[int, int], bool] = lambda slot, position: False  # rows that come back not finite
    gate: threading.Event | None = None
    n_pieces: int = 0  # what it may still prepare
    stepped: threading.Event = field(default_factory=threading.Event)  # a step was launched
    batches: list[Batch] = field(default_factory=list)
    samplings: list[SamplingBatch] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pages = np.zeros((self.n_pages, self.page_size), np.uint64)
        self.state = [START] * self.n_slots
        self.last = [-1] * self.n_slots

    def warm(self) -> None: ...
    def close(self) -> None: ...

    def prepare_more(self) -> bool:
        self.n_pieces -= 1
        return self.n_pieces > 0

    def copy_state(self, source_slot: int, target_slot: int) -> None:
        assert self.is_recurrent
        self.copies.append((source_slot, target_slot))
        self.state[target_slot] = self.state[source_slot]

    def reset_state(self, slot: int) -> None:
        assert self.is_recurrent
        self.state[slot] = START

    def step(self, batch: Batch, sampling: SamplingBatch) -> FakePending:
        self.batches.append(batch)
        self.stepped.set()
        self.samplings.append(sampling)
        outcome: StepResult | Exception
        if self.fail_at == len(self.batches) - 1:
            outcome = DeviceError("cuStreamSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS", "illegal access")
            if self.fail_in_call:
                raise outcome
        else:
            outcome = self._compute(batch, sampling)
        n_prefill = sum(span.n_rows for span in batch.spans if span.n_rows > 1)
        return FakePending(outcome, self.clock, self.base_s + self.row_s * n_prefill, self.gate)

    def _compute(self, batch: Batch, sampling: SamplingBatch) -> StepResult:
        states = self._forward(batch)
        n, n_top = len(batch.logit_rows), sampling.n_top
        assert all(len(a) == n for a in (sampling.temperature, sampling.uniform, sampling.slots))
        ids = np.zeros(n, np.int32)
        finite = np.ones(n, bool)
        positions = batch.positions[batch.logit_rows]
        slots = np.repeat([s.slot for s in batch.spans], [s.n_rows for s in batch.spans])[batch.logit_rows]
        for i, row in enumerate(batch.logit_rows):
            ids[i] = self._sample(i, states[row], sampling)
            finite[i] = not self.poison(int(slots[i]), int(positions[i]))
            if sampling.slots[i] >= 0:
                self.last[sampling.slots[i]] = int(ids[i])
        tops = (ids[:, None] + np.arange(n_top)) % N_VOCAB
        hidden = np.stack([[states[r] % 251, batch.positions[r]] for r in batch.logit_rows]) if n else None
        return StepResult(
            ids=ids,
            logprobs=-ids / np.float32(N_VOCAB),
            target_logprobs=np.where(sampling.target_ids >= 0, -1.0 - sampling.target_ids, 0).astype(
                np.float32
            ),
            top_ids=tops.astype(np.int32),
            top_logprobs=-tops / np.float32(N_VOCAB),
            finite=finite,
            hidden=hidden.astype(np.float32) if batch.want_hidden and hidden is not None else None,
        )

    def _forward(self, batch: Batch) -> list[int]:
        states, row = [], 0
        for span in batch.spans:
            assert span.row_offset == row
            assert len(span.pages) == -(-(span.position + span.n_rows) // self.page_size)
            for position in range(span.position, span.position + span.n_rows):
                assert batch.positions[row] == position
                id = int(batch.token_ids[row])
                states.append(
                    self._position(span.slot, position, span.pages, self.last[span.slot] if id < 0 else id)
                )
                row += 1
        assert row == batch.n_rows
        return states

    def _position(self, slot: int, position: int, pages: np.ndarray, id: int) -> int:
        size = self.page_size
        before = START
        if position:
            before = int(self.pages[pages[(position - 1) // size], (position - 1) % size])
        state = digest(before, id)
        self.pages[pages[position // size], position % size] = state
        if self.is_recurrent:
            self.state[slot] = digest(self.state[slot], id)
            assert self.state[slot] == state, f"slot {slot}'s state is not that of its prefix"
        return state

    @staticmethod
    def _sample(row: int, state: int, sampling: SamplingBatch) -> int:
        for adjusted, add, divide in zip(
            *np.nonzero(sampling.adjust_rows == row),
            sampling.adjust_add,
            sampling.adjust_divide,
            strict=False,
        ):
            state += int(sampling.adjust_ids[adjusted]) * int(8 * add + 4 * divide) << 20
        id = pick(state, float(sampling.uniform[row]), float(sampling.temperature[row]))
        if sampling.masks is not None and sampling.mask_rows is not None:
            for mask, mask_row in zip(sampling.masks, sampling.mask_rows, strict=True):
                while mask_row == row and not mask[id // 32] >> np.uint32(id % 32) & 1:
                    id = (id + 1) % N_VOCAB
        return id


@dataclass(eq=False)
class FakeOwner:
    """The engine's counterpart of a handle, without a loop. `taken` moves when a test reads."""

    request: Request
    sent: int = 0
    taken: int = 0
    paused: bool = False
    events: list[Event] = field(default_factory=list)
    reads: bool = True

    @property
    def ids(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, TokenEvent)]

    @property
    def finish(self) -> FinishEvent | None:
        ends = [event for event in self.events if isinstance(event, FinishEvent)]
        assert len(ends) <= 1, f"{self.request.id} finished {len(ends)} times"
        assert not ends or self.events[-1] is ends[0], f"{self.request.id} got events after its end"
        return ends[0] if ends else None

    def read_all(self) -> None:
        self.taken = self.sent


class Harness:
    """A StepLoop turned by the test, with its events collected."""

    def __init__(
        self,
        *,
        n_pages: int = 64,
        page_size: int = 4,
        recurrent: bool = False,
        n_snapshots: int = 4,
        options: EngineOptions | None = None,
        **changes: object,
    ) -> None:
        small = EngineOptions(
            max_sequences=4, n_ctx=4096, max_rows=32, max_logit_rows=8, min_prefill_rows=2, overlap=True
        )
        self.options = replace(options or small, **changes)  # type: ignore[arg-type]
        n = self.options.max_sequences
        slots = range(n, n + n_snapshots) if recurrent else ()
        self.executor = FakeExecutor(n_pages, page_size, n + len(slots), is_recurrent=recurrent)
        self.clock = self.executor.clock
        self.pool = PagePool(n_pages, page_size)
        self.uploaded = 0
        self.loop = StepLoop(
            self.executor,
            self.pool,
            self.options,
            snapshots=SnapshotTable(slots) if recurrent else None,
            clock=self.clock,
            weight_h2d_bytes=lambda: self.uploaded,
        )
        self.owners: list[FakeOwner] = []
        self.sequences: dict[str, EngineSequence] = {}

    def submit(self, request: Request) -> FakeOwner:
        owner = FakeOwner(request)
        capacity = self.loop.scheduler.capacity
        sequence = new_sequence(request, capacity, len(self.owners), owner, self.clock())
        self.owners.append(owner)
        self.sequences[request.id] = sequence
        self.loop.submit(sequence)
        return owner

    def finish(self, owner: FakeOwner, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.loop.finish(self.sequences[owner.request.id], reason)
        self.deliver()

    def turn(self) -> bool:
        more = self.loop.turn()
        self.deliver()
        return more

    def deliver(self) -> None:
        for owner, event in self.loop.outcomes.outbox:
            owner.events.append(event)
            owner.taken += owner.reads
        self.loop.outcomes.outbox = []

    def run(self, limit: int = 20_000) -> int:
        """Turn until idle; returns the number of turns."""
        for n in range(limit):
            if not self.turn() and not self._some_reader_caught_up():
                return n
        raise AssertionError(f"still busy after {limit} turns: {self.loop.scheduler.running}")

    def _some_reader_caught_up(self) -> bool:
        """A handle would wake the engine for it."""
        low = self.options.backlog_limit // 2
        return any(s.owner.sent - s.owner.taken <= low for s in self.loop.outcomes.paused)

    def turn_until(self, condition: Callable[[], bool], limit: int = 10_000) -> None:
        for _ in range(limit):
            if condition():
                return
            self.turn()
        raise AssertionError("it never happened")


def make_request(
    id: str = "r",
    prompt: Sequence[int] | int = 5,
    max_tokens: int = 8,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    sampling: SamplingParameters | None = None,
    **fields: object,
) -> Request:
    """`prompt`: ids, or how many (made from `id`, so that different requests share nothing)."""
    if isinstance(prompt, int):
        salt = sum(map(ord, id)) * 31 + len(id)
        prompt = [(salt * 7 + i * 13) % N_VOCAB for i in range(prompt)]
    sampling = sampling or SamplingParameters(temperature=temperature, seed=seed)
    return Request(id, tuple(prompt), sampling, max_tokens, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def harness() -> type[Harness]:
    return Harness


@pytest.fixture(scope="session")
def request_of() -> Callable[..., Request]:
    return make_request


@pytest.fixture(scope="session")
def alone() -> Callable[[Request, int], list[int]]:
    return run_alone


@pytest.fixture(scope="session")
def fake_executor() -> type[FakeExecutor]:
    return FakeExecutor
