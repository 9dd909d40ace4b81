"""The step loop without its thread: take in, schedule, launch, read. Every call is made by one thread.

With `overlap`, step n+1 is scheduled and launched before step n is read: decode rows then carry token id -1
("the id sampled last for this slot"), and the device never waits for the host. What a sequence computed
beyond its end is thrown away when it is read. Sequences whose next row depends on the ids just sampled
(penalties, constraints) cannot run ahead: when they are few beside the others they sit out every second step,
else the loop reads before it launches. One whose mask is not there in time sits out, too.
"""

import heapq
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice

from streamer.cache.pages import PagePool
from streamer.cache.snapshots import SnapshotTable
from streamer.engine.batches import build_batch
from streamer.engine.masks import MaskWorkers, wait_for_masks
from streamer.engine.outcomes import LaunchedStep, Outcomes
from streamer.engine.pacing import CROWD, SHORT_PROMPT, Pacer
from streamer.engine.request import FinishReason
from streamer.engine.sampler import SamplerTable
from streamer.engine.scheduler import Policy, Scheduler, StepPlan
from streamer.engine.sequence import Sequence
from streamer.kernels.ops import Executor

LATE_SHARE = 4  # late sequences sit out steps while there are this many times as many others


@dataclass(frozen=True)
class EngineOptions:
    """Bounds and policies. Rows are tokens of a step, whoever they belong to."""

    max_sequences: int = 16
    n_ctx: int = 4096
    max_rows: int = 512
    max_logit_rows: int = 128
    mixing: str = (
        "mixed"  # | "alternate": where prefill rows slow decode rows down more than a step of their own
    )
    overlap: bool = True  # False where `Executor.step` computes before it returns
    slack: float = 2.0  # how many times longer a step may last because of prefill while streams decode
    min_prefill_rows: int = 16
    queue_limit: int = 256  # requests beyond max_sequences; more are refused
    max_queue_s: float | None = None  # waiting longer than this ends a request
    backlog_limit: int = 128  # unread events at which a stream is paused
    slow_reader_s: float = 30.0  # paused longer than this, a stream is dropped
    mask_threads: int = 2

    @property
    def policy(self) -> Policy:
        return Policy(self.max_sequences, self.n_ctx, self.max_rows, self.max_logit_rows, self.mixing)


class StepLoop:
    """`turn` until it says there is nothing to do. `on_step(phase, seconds)` after each step, for metrics.

    Phase `host` is the host's own work in the turn that read a step, without what it waited for.
    """

    def __init__(
        self,
        executor: Executor,
        pool: PagePool,
        options: EngineOptions,
        *,
        snapshots: SnapshotTable | None,
        clock: Callable[[], float],
        weight_h2d_bytes: Callable[[], int],
        on_step: Callable[[str, float], None] | None = None,
    ) -> None:
        self._executor, self._options, self._clock, self._on_step = executor, options, clock, on_step
        self.scheduler = Scheduler(options.policy, pool, snapshots)
        self._masks = MaskWorkers(options.mask_threads)
        self.outcomes = Outcomes(self.scheduler, self._masks, clock, weight_h2d_bytes, options.backlog_limit)
        self._table = SamplerTable(options.max_sequences)
        self._pacer = Pacer(slack=options.slack, min_rows=options.min_prefill_rows, max_rows=options.max_rows)
        self._in_flight: deque[LaunchedStep] = deque()
        self._depth = 1 if options.overlap else 0
        self._deadlines: list[
            tuple[float, int, bool, Sequence]
        ] = []  # heap: (when, arrival, queue only, whose)
        self.n_steps = 0
        self.waited_s = 0.0  # for the device and for masks, in all: what the host's own time is without
        self.last_done_s = clock()

    # ---- coming and going ----

    def submit(self, sequence: Sequence) -> None:
        self.outcomes.begin(sequence)
        self.scheduler.add(sequence)
        self._masks.begin(sequence)
        if sequence.request.deadline_s is not None:
            self._add_deadline(sequence.request.deadline_s, sequence, queue_only=False)
        if self._options.max_queue_s is not None:
            when = sequence.times.submitted_s + self._options.max_queue_s
            self._add_deadline(when, sequence, queue_only=True)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """The consumer wants no more. Its rows in flight are dropped when they are read."""
        self.outcomes.conclude(sequence, reason)

    def conclude_all(self, reason: FinishReason, error: str) -> None:
        """Every request ends now; steps in flight are abandoned (the caller launches none any more)."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self.outcomes.conclude(sequence, reason, error)
        self._in_flight.clear()

    def prepare_more(self) -> bool:
        """While idle: let the executor prepare a piece of what later steps will want. False: nothing left."""
        return self._executor.prepare_more()

    def close(self) -> None:
        self._masks.close()

    def note_turn(self, n_steps: int, host_s: float) -> None:
        """After a turn of `host_s` own work, before which there had been `n_steps` steps."""
        if self._on_step is not None and self.n_steps > n_steps:
            self._on_step("host", host_s)

    # ---- a turn ----

    def turn(self) -> bool:
        """At most one launch and, in the steady state, one blocking read. False: idle until something is
        submitted, finished, resumed or due (`next_due_s`). DeviceError passes through: the engine is then
        broken.
        """
        now = self._clock()
        self._expire(now)
        self._resume_readers(now)
        if self.outcomes.live_late:
            self._see_to_late_sequences()
        plan = self.scheduler.schedule(self._prefill_rows())
        for sequence, state_slot in plan.admitted:
            self._admit(sequence, state_slot)
        if not plan.is_empty:
            self._launch(plan)
        if self._in_flight and (plan.is_empty or len(self._in_flight) > self._depth):
            self._read()
        elif plan.is_empty:
            return self._wait_for_a_mask()
        return True

    def _prefill_rows(self) -> int:
        """Asked of the pacer only when there is prefill beside decode, which is seldom."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        n_decode = n_begun = 0
        for s in running:
            if s.goal == s.n_prompt:
                n_begun += 1
            else:
                n_decode += not s.exhausted
        if not n_begun and not waiting:
            return self._options.max_rows
        n_short = 0
        startable = islice(waiting, self._options.max_sequences - len(running))
        for s in (*startable, *(s for s in running if s.goal == s.n_prompt)):
            n_short += s.goal - s.n_computed <= SHORT_PROMPT
            if n_short == CROWD:
                break
        return self._pacer.prefill_rows(n_decode, n_short)

    def _launch(self, plan: StepPlan) -> None:
        batch, sampling, chunks = build_batch(plan, self._table, self.scheduler.pool.page_size)
        launched_s = self._clock()
        pending = self._executor.step(batch, sampling)
        if not self._options.overlap:  # it has computed already
            self.waited_s += self._clock() - launched_s
        for chunk in chunks:
            for _, slot in self.scheduler.register_pages(chunk.sequence):
                self._executor.copy_state(chunk.sequence.slot, slot)
        self._in_flight.append(LaunchedStep(pending, plan.decode, chunks, plan.is_hidden, launched_s))

    def _admit(self, sequence: Sequence, state_slot: int | None) -> None:
        self._table.admit(sequence.slot, sequence)
        if sequence.times.admitted_s is None:
            sequence.times.admitted_s = self._clock()
        if self.scheduler.snapshots is not None:
            if state_slot is None:
                self._executor.reset_state(sequence.slot)
            else:
                self._executor.copy_state(state_slot, sequence.slot)

    def _read(self) -> None:
        step = self._in_flight[0]
        asked_s = self._clock()
        result = step.pending.result()
        self._in_flight.popleft()
        now = self._clock()
        self.waited_s += now - asked_s
        duration_s = now - max(step.launched_s, self.last_done_s)
        self.last_done_s = now
        self.n_steps += 1
        self._pacer.observe(len(step.decode), step.n_prefill, duration_s)
        if self._on_step is not None:
            self._on_step(step.phase, duration_s)
        self.outcomes.read(step, result)

    # ---- sequences that need their last id ----

    def _see_to_late_sequences(self) -> None:
        """Read and wait for masks first, unless the late ones are few enough to sit this step out."""
        self._collect_masks()
        late = [s for s in self.outcomes.live_late if s.is_running]
        n_others = len(self.scheduler.running) - len(late)
        if not late or (self._options.overlap and len(late) * LATE_SHARE <= n_others):
            return
        while self._in_flight:
            self._read()
        self._wait_for_masks([s for s in late if not s.finished], every=True)
        self._collect_masks()

    def _collect_masks(self) -> None:
        """Constraints that have ended or failed end their requests."""
        for s in [s for s in self.outcomes.live_late if s.mask is not None and s.mask.done()]:
            assert s.mask is not None
            error = s.mask.exception()
            if error is not None:
                self.outcomes.conclude(s, FinishReason.ERROR, f"the constraint failed: {error}")
            elif s.mask.result().is_finished:
                self.outcomes.conclude(s, FinishReason.STOP)
            elif s.exhausted and not s.in_flight and not s.is_embedding and s.max_new:
                self.outcomes.conclude(s, FinishReason.LENGTH)

    def _wait_for_a_mask(self) -> bool:
        """Nothing else can run: wait for a mask if one is under way. False: truly idle."""
        late = self.outcomes.live_late
        if all(s.knows_mask for s in late):
            return False
        self._wait_for_masks(late, every=False)
        return True

    def _wait_for_masks(self, late: Collection[Sequence], *, every: bool) -> None:
        asked_s = self._clock()
        wait_for_masks(late, every=every)
        self.waited_s += self._clock() - asked_s

    # ---- clocks ----

    def _add_deadline(self, when: float, sequence: Sequence, *, queue_only: bool) -> None:
        if len(self._deadlines) > 64 + 4 * len(self.scheduler.running) + 4 * len(self.scheduler.waiting):
            self._deadlines = [entry for entry in self._deadlines if not entry[3].finished]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (when, sequence.arrival, queue_only, sequence))

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, queue_only, sequence = heapq.heappop(self._deadlines)
            if queue_only and sequence.times.admitted_s is not None:
                continue
            error = "waited too long in the queue" if queue_only else None
            self.outcomes.conclude(sequence, FinishReason.DEADLINE, error)

    def _resume_readers(self, now: float) -> None:
        for sequence in list(self.outcomes.paused):
            assert sequence.paused_since_s is not None
            owner = sequence.owner
            if owner.sent - owner.taken <= self._options.backlog_limit // 2:
                sequence.paused_since_s, owner.paused = None, False
                self.outcomes.paused.remove(sequence)
            elif now - sequence.paused_since_s > self._options.slow_reader_s:
                self.outcomes.conclude(sequence, FinishReason.CANCELLED, "the reader is too slow")

    def next_due_s(self) -> float | None:
        """When `turn` must be called although nothing happens: a deadline, or a paused reader's patience."""
        due = [
            s.paused_since_s + self._options.slow_reader_s for s in self.outcomes.paused if s.paused_since_s
        ]
        if self._deadlines:
            due.append(self._deadlines[0][0])
        return min(due, default=None)

    def check_integrity(self) -> None:
        """Idle: nothing in flight, nothing held. Raises AssertionError otherwise."""
        assert not self._in_flight, "a step is in flight"
        assert not self.scheduler.running, "sequences are running"
        assert not self.scheduler.waiting, "sequences are waiting"
        assert not self.outcomes.paused, "an ended request is still paused"
        assert not self.outcomes.live_late, "an ended request still holds steps up"
        self.scheduler.check_integrity()
