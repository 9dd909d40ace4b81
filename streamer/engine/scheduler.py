"""Which rows run next: continuous batching over pages. No clock, no threads, no device: state in, plan out.

Rules, in this order:

1. Every sequence that decodes gets its row, unless its reader is slow or its last id is needed and not read
yet.
2. A decoding sequence that needs a page and finds none takes it from the sequence of worst rank (lowest
priority, then latest arrival; paused ones first), which goes back to the queue and recomputes later. The best
rank is never preempted for a worse one, so it always advances: nothing starves and nothing livelocks.
3. Waiting requests are admitted by rank while there are sequence slots and pages for all their known ids. The
head of the queue is never overtaken for lack of pages. A request passed over BYPASS_LIMIT times goes first.
4. A request whose next prefix page is just being computed by another one waits for it instead of computing it
twice.
5. The prefill rows of a step go half to the oldest, the rest to the shortest remainders: a short prompt does
not wait for a long one, and the long one always advances.
"""

import bisect
from dataclasses import dataclass, field

from streamer.cache.pages import PageName, PagePool
from streamer.cache.snapshots import SnapshotTable
from streamer.engine.chunking import divide_rows
from streamer.engine.sequence import NOWHERE, Sequence

BYPASS_LIMIT = 32
MAX_PREFILLING = 16  # begun prompts hold pages: only so many at once


@dataclass(frozen=True)
class Policy:
    max_sequences: int
    n_ctx: int  # tokens a sequence may have
    max_rows: int = 512  # rows a step
    max_logit_rows: int = 128  # rows a step with logits or hidden states: the executor's head workspace
    mixing: str = "mixed"  # "mixed": prefill rows join decode rows; "alternate": steps of one kind take turns

    def __post_init__(self) -> None:
        if min(self.max_rows, self.max_logit_rows) < self.max_sequences or self.max_sequences < 1:
            raise ValueError(f"a step must have room for a row of every sequence: {self}")
        if self.mixing not in ("mixed", "alternate"):
            raise ValueError(f"mixing is mixed or alternate, not {self.mixing!r}")


@dataclass
class StepPlan:
    """Rows of the next step, in batch order: one row for each of `decode`, then the chunks of `prefill`."""

    decode: list[Sequence] = field(default_factory=list)
    prefill: list[tuple[Sequence, int]] = field(default_factory=list)  # (sequence, rows), rows >= 1
    is_hidden: bool = False  # an embedding step: all chunks want hidden states
    # with the snapshot slot to resume from
    admitted: list[tuple[Sequence, int | None]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.decode and not self.prefill


class Scheduler:
    """Owns the queue, the running set, the sequence slots 0..max_sequences-1 and the references on pages.

    `snapshots` is given exactly for models with recurrent state: a prefix is then reused only up to a
    snapshot.
    """

    def __init__(self, policy: Policy, pool: PagePool, snapshots: SnapshotTable | None = None) -> None:
        self.policy, self.pool, self.snapshots = policy, pool, snapshots
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []  # by admission
        self.n_preemptions = 0
        self._slots = list(range(policy.max_sequences - 1, -1, -1))
        self._under_way: dict[PageName, Sequence] = {}  # prompt pages being computed, and by whom
        self._prefill_turn = False
        self._hidden_turn = False

    @property
    def capacity(self) -> int:
        """Positions one sequence can ever have computed."""
        return min(self.policy.n_ctx, self.pool.n_pages * self.pool.page_size)

    # ---- coming and going ----

    def add(self, sequence: Sequence) -> None:
        if sequence.request.use_prefix_cache:
            sequence.name_pages(self.pool.page_size)
        bisect.insort(self.waiting, sequence, key=lambda s: s.rank)

    def remove(self, sequence: Sequence, *, distrust: bool = False) -> None:
        """The sequence ends, wherever it is. `distrust`: what it computed must not be reused (not finite)."""
        if sequence.is_running:
            self.running.remove(sequence)
            if distrust and self.snapshots is not None:
                self.snapshots.forget(sequence.names)
            self._let_go(sequence, forget=distrust)
        else:
            self.waiting.remove(sequence)

    def _let_go(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Pages and slot back. A launched step may still write them; whoever gets them next runs after it."""
        self.pool.release(sequence.span_pages.tolist(), forget=forget)
        self._slots.append(sequence.slot)
        sequence.slot = NOWHERE
        sequence.take_pages((), 0)
        for name in [name for name, owner in self._under_way.items() if owner is sequence]:
            del self._under_way[name]

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._let_go(sequence)
        sequence.n_computed = 0
        self.n_preemptions += 1
        bisect.insort(self.waiting, sequence, key=lambda s: s.rank)

    # ---- a step ----

    def schedule(self, prefill_rows: int) -> StepPlan:
        """The next step, with at most `prefill_rows` rows of prefill. Pages are taken; counters move at
        launch.
        """
        plan = StepPlan()
        ready = self._give_pages([s for s in self.running if self._can_decode(s)])
        self._admit(plan)
        # one that comes back after a preemption may find all but its last row in the cache
        ready += [s for s, _ in plan.admitted if self._can_decode(s)]
        begun = [s for s in self.running if _can_prefill(s)]
        plan.is_hidden = self._choose_hidden(begun, ready)
        begun = [s for s in begun if s.is_embedding == plan.is_hidden]
        wants_decode, wants_prefill = self._choose_kinds(bool(ready), bool(begun), plan.is_hidden)
        if wants_decode:
            plan.decode = ready
        if wants_prefill:
            rows = min(prefill_rows, self.policy.max_rows - len(plan.decode))
            logit_rows = self.policy.max_logit_rows - len(plan.decode)
            plan.prefill = divide_rows(begun, rows, logit_rows, self.pool.page_size)
        return plan

    @staticmethod
    def _can_decode(s: Sequence) -> bool:
        return (
            s.goal - s.n_computed == 1
            and s.goal > s.n_prompt
            and not s.exhausted
            and s.paused_since_s is None
            and not (s.late and (s.in_flight or not s.knows_mask))
        )

    def _choose_hidden(self, begun: list[Sequence], ready: list[Sequence]) -> bool:
        """Hidden states and logits cannot share a step: they take turns when both are wanted."""
        hidden = any(s.is_embedding for s in begun)
        if hidden and (ready or not all(s.is_embedding for s in begun)):
            self._hidden_turn = not self._hidden_turn
            return self._hidden_turn
        return hidden

    def _choose_kinds(self, decode: bool, prefill: bool, hidden: bool) -> tuple[bool, bool]:
        if hidden:
            return False, True
        if decode and prefill and self.policy.mixing == "alternate":
            self._prefill_turn = not self._prefill_turn
            return not self._prefill_turn, self._prefill_turn
        return decode, prefill

    # ---- pages ----

    def _give_pages(self, candidates: list[Sequence]) -> list[Sequence]:
        """Those of the candidates that have a page for their next position, preempting where none is left."""
        size = self.pool.page_size
        needy = [s for s in candidates if s.n_computed == s.n_pages * size]
        if not needy:
            return candidates
        if len(needy) > self.pool.n_available:
            needy.sort(key=lambda s: s.rank)
        for sequence in needy:
            page = self._page_for(sequence)
            if page is not None:
                sequence.add_page(page)
        return [s for s in candidates if s.is_running]

    def _page_for(self, sequence: Sequence) -> int | None:
        """A page; None when `sequence` itself was the one to be preempted (now, or before)."""
        while sequence.is_running:
            page = self.pool.extend()
            if page is not None:
                return page
            self._preempt(max(self.running, key=lambda s: (s.paused_since_s is not None, s.rank)))
        return None

    # ---- admission ----

    def _admit(self, plan: StepPlan) -> None:
        if not self.waiting or not (self._slots or any(s.paused_since_s is not None for s in self.running)):
            return
        n_begun = sum(1 for s in self.running if _can_prefill(s))
        oldest = min(self.waiting, key=lambda s: s.arrival)
        queue = list(self.waiting)
        if oldest.bypassed >= BYPASS_LIMIT:
            queue = [oldest, *(s for s in queue if s is not oldest)]
        for sequence in queue:
            if n_begun >= MAX_PREFILLING:
                return
            if sequence.paused_since_s is not None or sequence.steps_in_flight or not sequence.knows_mask:
                continue  # not now, and nobody waits for it
            usable = self._usable_names(sequence)
            if self._is_under_way(usable):
                continue
            while not self._start(sequence, usable, plan):
                if not self._preempt_a_paused_one():
                    return
            n_begun += 1
            oldest.bypassed += not oldest.is_running

    def _preempt_a_paused_one(self) -> bool:
        """Those whose readers are slow keep nobody waiting."""
        paused = [s for s in self.running if s.paused_since_s is not None]
        if paused:
            self._preempt(max(paused, key=lambda s: s.rank))
        return bool(paused)

    def _usable_names(self, s: Sequence) -> list[PageName]:
        """Names of the pages it may take from the cache: at least one row is computed, so that there are
        logits.
        """
        if not s.request.use_prefix_cache:
            return []
        limit = s.n_known - 1
        if s.wants_every_row:
            limit = min(limit, s.n_scored)
        s.name_pages(self.pool.page_size)
        return s.names[: limit // self.pool.page_size]

    def _is_under_way(self, usable: list[PageName]) -> bool:
        """The first page that the cache lacks is being computed by someone else."""
        if not self._under_way:
            return False
        for name in usable:
            if not self.pool.holds(name):
                return name in self._under_way
        return False

    def _start(self, sequence: Sequence, usable: list[PageName], plan: StepPlan) -> bool:
        """Give it a slot and pages for all its known ids. False, with nothing changed, when they lack."""
        if not self._slots:
            return False
        size = self.pool.page_size
        shared = self.pool.match_prefix(usable)
        n_matched, state_slot = len(shared), None
        if self.snapshots is not None:
            found = self.snapshots.find(usable[:n_matched])
            n_reused, state_slot = found if found is not None else (0, None)
            shared = shared[:n_reused]
        n_new = -(-sequence.n_known // size) - len(shared)
        reserve = len(self.running) // 4  # room for the running ones to grow, or they preempt at once
        if n_new + reserve > self.pool.n_available and self.running:
            return False
        pages = self.pool.allocate(shared, n_new)
        if pages is None:
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.slot = self._slots.pop()
        sequence.take_pages(pages, -(-self._most_positions(sequence) // size))
        sequence.n_computed = len(shared) * size
        sequence.n_registered = len(shared)
        if sequence.times.admitted_s is None:
            sequence.cached_tokens = min(sequence.n_computed, sequence.n_prompt)
        self._announce(sequence, len(shared), n_matched)
        plan.admitted.append((sequence, state_slot))
        return True

    def _most_positions(self, sequence: Sequence) -> int:
        return min(self.capacity, sequence.n_prompt + sequence.max_new)

    def _announce(self, sequence: Sequence, n_reused: int, n_matched: int) -> None:
        """Pages it is about to compute, and where to stop for snapshots: where the cache's pages end (a
        prefix that others demonstrably share) and at the last page boundary before the final row (the next
        turn's prefix).
        """
        if not sequence.request.use_prefix_cache:
            return
        for name in sequence.names[n_reused:]:
            self._under_way.setdefault(name, sequence)
        if self.snapshots is not None and self.snapshots.n_slots:
            size = self.pool.page_size
            ends = {n_matched * size, (sequence.n_known - 1) // size * size}
            sequence.snapshot_at = tuple(sorted(end for end in ends if end > sequence.n_computed))

    # ---- after a launch, after a read ----

    def register_pages(self, sequence: Sequence) -> list[tuple[PageName, int]]:
        """Share the pages that are full by now; returns the snapshots to take, as (name, target slot)."""
        if not sequence.request.use_prefix_cache or not sequence.is_running:
            return []
        size = self.pool.page_size
        full = min(sequence.n_computed, sequence.n_known) // size
        if full > sequence.n_registered:
            sequence.name_pages(size)
            for i in range(sequence.n_registered, full):
                name = sequence.names[i]
                self.pool.register(int(sequence.page_table[i]), name)
                if self._under_way.get(name) is sequence:
                    del self._under_way[name]
            sequence.n_registered = full
        return self._claim_snapshot(sequence)

    def _claim_snapshot(self, sequence: Sequence) -> list[tuple[PageName, int]]:
        if sequence.n_computed not in sequence.snapshot_at or self.snapshots is None:
            return []
        name = sequence.names[sequence.n_computed // self.pool.page_size - 1]
        slot = self.snapshots.claim(name)
        return [] if slot is None else [(name, slot)]

    def check_integrity(self) -> None:
        """Pages, slots and snapshots add up to the running sequences. Raises AssertionError."""
        self.pool.check_integrity([s.span_pages.tolist() for s in self.running])
        slots = [*self._slots, *(s.slot for s in self.running)]
        assert sorted(slots) == list(range(self.policy.max_sequences)), (
            "a sequence slot is lost or held twice"
        )
        assert all(owner in self.running for owner in self._under_way.values()), "pages announced by nobody"
        if self.snapshots is not None:
            self.snapshots.check_integrity()


def _can_prefill(s: Sequence) -> bool:
    """Positions are missing, and not just the one that a decoding sequence always misses."""
    n_left = s.goal - s.n_computed
    return (n_left > 1 or (n_left == 1 and s.goal == s.n_prompt)) and not s.exhausted
