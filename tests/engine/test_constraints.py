"""Sequences whose next row depends on the id just sampled: constraints (and penalties)."""

import threading

import numpy as np
import pytest

from streamer.engine.request import FinishReason, SamplingParameters


class Counting:
    """Allows only the next number, ends after `n`; can be told to fail or to wait."""

    def __init__(
        self, n: int, *, fail_at: int | None = None, gate: threading.Event | None = None, gate_at: int = 0
    ) -> None:
        self.n, self.fail_at, self.gate, self.gate_at = n, fail_at, gate, gate_at
        self.accepted: list[int] = []
        self.inside = threading.Lock()
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def mask(self) -> bytes | None:
        assert self.inside.acquire(blocking=False), "two calls at a time"
        if self.gate is not None and self.gate_at == len(self.accepted):
            assert self.gate.wait(60)
        if self.fail_at == len(self.accepted):
            self.inside.release()
            raise RuntimeError("grammar too complex")
        words = np.zeros(-(-997 // 32), np.uint32)
        id = 100 + len(self.accepted)
        words[id // 32] = np.uint32(1) << np.uint32(id % 32)
        self.inside.release()
        return words.tobytes()

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    @property
    def is_finished(self) -> bool:
        return len(self.accepted) == self.n


both = pytest.mark.parametrize("overlap", [False, True])


@both
@pytest.mark.parametrize("n_others", [0, 1, 3, 7])
def test_masks_restrict_their_own_row_and_the_end_of_the_grammar_ends_it(
    harness, request_of, alone, overlap, n_others
):
    h = harness(overlap=overlap, max_sequences=8, n_pages=200)
    constraint = Counting(6)
    owner = h.submit(request_of("c", 9, 50, constraint=constraint))
    requests = [request_of(f"r{i}", 5 + i, 20) for i in range(n_others)]
    others = [h.submit(r) for r in requests]
    h.run()
    assert owner.ids == constraint.accepted == [100, 101, 102, 103, 104, 105]
    assert owner.finish.reason is FinishReason.STOP
    assert constraint.is_closed
    for request, other in zip(requests, others, strict=True):
        assert other.ids == alone(request, 20)
    h.loop.check_integrity()
    h.loop.close()


@both
def test_a_grammar_that_is_cut_by_the_limit_ends_with_length_and_one_that_just_fits_with_stop(
    harness, request_of, overlap
):
    h = harness(overlap=overlap)
    cut = h.submit(request_of("cut", 5, 3, constraint=Counting(6)))
    fits = h.submit(request_of("fits", 5, 6, constraint=Counting(6)))
    h.run()
    assert (cut.finish.reason, len(cut.ids)) == (FinishReason.LENGTH, 3)
    assert (fits.finish.reason, len(fits.ids)) == (FinishReason.STOP, 6)
    h.loop.close()


def test_a_constraint_that_allows_everything_needs_no_mask(harness, request_of, alone):
    class Free(Counting):
        def mask(self):
            return None

    h = harness()
    request = request_of("f", 5, 9)
    owner = h.submit(request_of("f", 5, 9, constraint=Free(100)))
    h.run()
    assert owner.ids == alone(request, 9)
    assert all(s.masks is None for s in h.executor.samplings)
    h.loop.close()


@both
@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_constraint_that_fails_ends_its_request_only(harness, request_of, alone, overlap, fail_at):
    h = harness(overlap=overlap)
    bad = h.submit(request_of("bad", 5, 9, constraint=Counting(6, fail_at=fail_at)))
    good = request_of("good", 5, 9)
    kept = h.submit(good)
    h.run()
    assert bad.finish.reason is FinishReason.ERROR
    assert "grammar too complex" in bad.finish.error
    assert len(bad.ids) == fail_at
    assert kept.ids == alone(good, 9)
    h.loop.check_integrity()
    h.loop.close()


def test_a_constraint_that_is_finished_from_the_start_generates_nothing(harness, request_of):
    h = harness()
    owner = h.submit(request_of("c", 5, 9, constraint=Counting(0)))
    h.run()
    assert owner.ids == []
    assert owner.finish.reason is FinishReason.STOP
    h.loop.close()


@pytest.mark.parametrize("gate_at", [0, 1])
def test_a_slow_mask_does_not_hold_up_many_others(harness, request_of, gate_at):
    """The mask is computed while the others' steps run: they go on while it blocks."""
    h = harness(overlap=True, max_sequences=8, n_pages=200)
    gate = threading.Event()
    constraint = Counting(3, gate=gate, gate_at=gate_at)
    others = [h.submit(request_of(f"r{i}", 5, 30)) for i in range(6)]
    h.turn_until(lambda: all(o.ids for o in others))
    owner = h.submit(request_of("c", 5, 9, constraint=constraint))
    h.turn_until(lambda: all(o.finish for o in others))
    assert len(owner.ids) == gate_at
    gate.set()
    h.run()
    assert owner.ids == [100, 101, 102]
    h.loop.close()


@both
def test_preemption_keeps_a_constraint_in_step(harness, request_of, overlap):
    h = harness(overlap=overlap, n_pages=10, page_size=4)
    h.submit(request_of("first", 6, 24))
    constraint = Counting(20)
    owner = h.submit(request_of("c", 6, 30, constraint=constraint))
    h.submit(request_of("third", 6, 24))
    h.run()
    assert h.loop.scheduler.n_preemptions > 0
    assert owner.ids == constraint.accepted == list(range(100, 120))
    h.loop.check_integrity()
    h.loop.close()


def test_few_penalised_streams_sit_out_steps_instead_of_stalling_many(harness, request_of):
    h = harness(overlap=True, max_sequences=8, n_pages=200)
    sampling = SamplingParameters(temperature=0, presence_penalty=1.0)
    late = h.submit(request_of("late", 5, 10, sampling=sampling))
    others = [h.submit(request_of(f"r{i}", 5, 40)) for i in range(6)]
    h.turn_until(lambda: late.finish is not None)
    rows = [len(b.spans) for b in h.executor.batches]
    assert {6, 7} <= set(rows)
    assert all(len(o.ids) >= 15 for o in others)
    h.run()


@both
def test_a_slow_mask_holds_nobody_else_up(harness, request_of, alone, overlap):
    """Neither a sequence that runs nor one that comes while nothing else does."""
    h = harness(overlap=overlap, max_sequences=4, n_pages=200)
    gate = threading.Event()
    slow = h.submit(request_of("slow", 5, 9, constraint=Counting(6, gate=gate, gate_at=2)))
    requests = [request_of("first", 7, 8), request_of("second", 6, 5)]
    for request in requests:
        other = h.submit(request)
        h.turn_until(lambda other=other: other.finish is not None, 200)
        assert other.ids == alone(request, request.max_tokens)
    assert len(slow.ids) == 2
    gate.set()
    h.run()
    assert slow.ids == [100, 101, 102, 103, 104, 105]
    h.loop.check_integrity()
    h.loop.close()
