"""Who runs when: admission, priorities, preemption, sharing, fairness. In steps and rows only."""

import dataclasses

import numpy as np
import pytest

from streamer.engine.request import FinishReason
from streamer.engine.scheduler import BYPASS_LIMIT, Policy


def first_token_steps(h, owners):
    """The turn at which each owner got its first id."""
    seen = {}
    for turn in range(10_000):
        more = h.turn()
        for owner in owners:
            if owner.ids:
                seen.setdefault(owner.request.id, turn)
        if not more:
            return seen
    raise AssertionError("still busy")


def test_requests_start_in_order_of_arrival(harness, request_of):
    h = harness(max_sequences=1)
    owners = [h.submit(request_of(f"r{i}", 5, 3)) for i in range(4)]
    steps = first_token_steps(h, owners)
    assert list(steps) == ["r0", "r1", "r2", "r3"]


def test_a_lower_priority_number_goes_first(harness, request_of):
    h = harness(max_sequences=1)
    owners = [h.submit(request_of(f"p{p}", 5, 3, priority=p)) for p in (2, 0, 1)]
    steps = first_token_steps(h, owners)
    assert list(steps) == ["p0", "p1", "p2"]


def test_a_request_that_is_passed_over_often_goes_first(harness, request_of):
    h = harness(max_sequences=1)
    h.submit(request_of("running", 5, 3))
    meek = h.submit(request_of("meek", 5, 1, priority=9))
    for i in range(BYPASS_LIMIT + 5):
        h.submit(request_of(f"pushy{i}", 5, 1))
    order = list(first_token_steps(h, h.owners))
    assert order.index("meek") == BYPASS_LIMIT + 1
    assert meek.finish is not None


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_requests_recompute_and_lose_nothing(harness, request_of, alone, overlap):
    h = harness(overlap=overlap, n_pages=12, page_size=4)
    requests = [request_of(f"r{i}", 6, 30, temperature=1.0, seed=i) for i in range(4)]
    owners = [h.submit(r) for r in requests]
    h.run()
    assert h.loop.scheduler.n_preemptions > 0
    for request, owner in zip(requests, owners, strict=True):
        assert owner.ids == alone(request, 30)
    h.loop.check_integrity()


def test_the_latest_arrival_is_preempted_first_and_the_first_never(harness, request_of):
    h = harness(n_pages=8, page_size=4, max_sequences=3)
    for i in range(3):
        h.submit(request_of(f"r{i}", 6, 24))
    h.turn_until(lambda: h.loop.scheduler.n_preemptions == 1)
    assert [s.request.id for s in h.loop.scheduler.running] == ["r0", "r1"]
    h.run()
    order = sorted(h.owners, key=lambda o: o.finish.decode_ms + o.finish.ttft_ms)
    assert order[0].request.id == "r0"


def test_the_lowest_priority_is_preempted_before_a_later_arrival(harness, request_of):
    h = harness(n_pages=8, page_size=4, max_sequences=3)
    for i, priority in enumerate((0, 5, 0)):
        h.submit(request_of(f"r{i}", 6, 24, priority=priority))
    h.turn_until(lambda: h.loop.scheduler.n_preemptions == 1)
    assert [s.request.id for s in h.loop.scheduler.running] == ["r0", "r2"]


# ---- prefix cache ----


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_second_request_reuses_the_first_ones_prefix(harness, request_of, alone, recurrent):
    h = harness(recurrent=recurrent)
    system = list(range(40))
    first, second = request_of("a", [*system, 7], 5), request_of("b", [*system, 8, 9], 5)
    h.submit(first)
    h.run()
    owner = h.submit(second)
    rows_before = sum(b.n_rows for b in h.executor.batches)
    h.run()
    assert owner.finish.cached_prompt_tokens == 40
    assert sum(b.n_rows for b in h.executor.batches) - rows_before <= 2 + 5
    assert owner.ids == alone(second, 5)


def test_a_whole_cached_prompt_still_computes_one_row(harness, request_of, alone):
    h = harness()
    request = request_of("a", 40, 5)
    h.submit(request)
    h.run()
    owner = h.submit(dataclasses.replace(request, id="b"))
    h.run()
    assert (
        owner.finish.cached_prompt_tokens == 36
    )  # the last page is computed again: its last row has the logits
    assert owner.ids == alone(request, 5)


def test_the_answer_is_reusable_by_the_next_turn_of_a_conversation(harness, request_of, alone):
    h = harness()
    first = request_of("a", 10, 22)
    owner = h.submit(first)
    h.run()
    follow_up = request_of("b", [*first.prompt_ids, *owner.ids, 5, 6], 5)
    again = h.submit(follow_up)
    h.run()
    assert again.finish.cached_prompt_tokens >= 28
    assert again.ids == alone(follow_up, 5)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_equal_prompts_submitted_together_are_computed_once(harness, request_of, alone, recurrent, overlap):
    h = harness(recurrent=recurrent, overlap=overlap, n_pages=100)
    request = request_of("a", 81, 4, temperature=1.0)
    requests = [
        dataclasses.replace(request, id=f"n{i}", sampling=dataclasses.replace(request.sampling, seed=i))
        for i in range(4)
    ]
    owners = [h.submit(r) for r in requests]
    h.run()
    prefill_rows = sum(s.n_rows for b in h.executor.batches for s in b.spans if s.position < 81)
    assert prefill_rows == 81 + 3
    for r, owner in zip(requests, owners, strict=True):
        assert owner.ids == alone(r, 4)
    assert [o.finish.cached_prompt_tokens for o in owners] == [0, 80, 80, 80]
    h.loop.check_integrity()


def test_waiting_for_a_shared_prefix_ends_with_its_owner(harness, request_of, alone):
    h = harness(max_rows=8)
    request = request_of("a", 81, 4)
    owner = h.submit(request)
    second = h.submit(dataclasses.replace(request, id="b"))
    for _ in range(3):
        h.turn()
    assert h.sequences["b"] in h.loop.scheduler.waiting
    h.finish(owner)
    h.run()
    assert second.ids == alone(request, 4)
    assert 0 < second.finish.cached_prompt_tokens < 40
    h.loop.check_integrity()


def test_a_request_that_wants_no_cache_neither_takes_nor_leaves_pages(harness, request_of):
    h = harness()
    request = request_of("a", 40, 5, use_prefix_cache=False)
    h.submit(request)
    h.run()
    assert h.pool.statistics().cached == 0
    shared = h.submit(dataclasses.replace(request, id="b", use_prefix_cache=True))
    h.run()
    assert shared.finish.cached_prompt_tokens == 0
    own = h.submit(dataclasses.replace(request, id="c"))
    h.run()
    assert own.finish.cached_prompt_tokens == 0


def test_cached_pages_make_room_for_new_ones(harness, request_of, alone):
    h = harness(n_pages=12, page_size=4)
    for i in range(10):
        request = request_of(f"r{i}", 30, 4)
        owner = h.submit(request)
        h.run()
        assert owner.ids == alone(request, 4)
    assert h.pool.statistics().evictions > 0
    h.loop.check_integrity()


# ---- recurrent state ----


@pytest.mark.parametrize("overlap", [False, True])
def test_no_state_of_one_request_reaches_another(harness, request_of, alone, overlap):
    """Prompts A, B, A through one slot; the fake asserts that a slot's state is that of its own prefix."""
    h = harness(recurrent=True, n_snapshots=0, max_sequences=1, overlap=overlap)
    a, b = request_of("a", 13, 6), request_of("b", 17, 6)
    results = []
    for i, request in enumerate((a, b, a)):
        owner = h.submit(dataclasses.replace(request, id=f"{request.id}{i}"))
        h.run()
        results.append(owner.ids)
        assert owner.finish.cached_prompt_tokens == 0
    assert results == [alone(a, 6), alone(b, 6), alone(a, 6)]


def test_a_shared_prefix_without_a_snapshot_gets_one_on_the_way(harness, request_of, alone):
    h = harness(recurrent=True)
    system = list(range(100, 124))  # 6 pages
    h.submit(request_of("a", [*system, *range(50)], 3))
    h.run()
    second = h.submit(request_of("b", [*system, *range(200, 230)], 3))
    h.run()
    assert second.finish.cached_prompt_tokens == 0  # pages match, but there was no state at their end
    third = request_of("c", [*system, *range(300, 330)], 3)
    owner = h.submit(third)
    h.run()
    assert owner.finish.cached_prompt_tokens == 24
    assert owner.ids == alone(third, 3)
    h.loop.check_integrity()


def test_snapshots_are_bounded(harness, request_of):
    h = harness(recurrent=True, n_snapshots=2)
    for i in range(6):
        h.submit(request_of(f"r{i}", 30 + i, 3))
        h.run()
    assert len(h.loop.scheduler.snapshots) == 2
    assert {target for _, target in h.executor.copies} == {4, 5}


# ---- fairness ----


@pytest.mark.parametrize(("mixing", "bound"), [("mixed", 2.0), ("alternate", 3.0)])
@pytest.mark.parametrize("overlap", [False, True])
def test_running_streams_keep_their_pace_while_16000_tokens_are_prefilled(
    harness, request_of, mixing, bound, overlap
):
    """Twice the time between tokens; alternating steps pay the weights twice, so three times."""
    h = harness(
        n_pages=1200,
        page_size=32,
        max_sequences=8,
        n_ctx=20_000,
        max_rows=2048,
        max_logit_rows=64,
        min_prefill_rows=16,
        mixing=mixing,
        overlap=overlap,
        backlog_limit=10**6,
    )
    h.executor.base_s, h.executor.row_s = 0.005, 0.00004  # a 5 ms step, 25,000 prefill rows a second
    streams = [h.submit(request_of(f"s{i}", 20, 3000)) for i in range(4)]
    times: dict[str, list[float]] = {owner.request.id: [] for owner in streams}

    def watch(until):
        while not until():
            before = {o.request.id: len(o.ids) for o in streams}
            h.turn()
            for o in streams:
                times[o.request.id] += [h.clock.now] * (len(o.ids) - before[o.request.id])

    watch(lambda: min(len(o.ids) for o in streams) >= 60)
    alone_s = max(np.diff(t)[10:].max() for t in times.values())
    n_before = {id: len(t) for id, t in times.items()}
    long = h.submit(request_of("long", 16_000, 1))
    started = h.clock.now
    watch(lambda: bool(long.ids))
    for id, t in times.items():
        gaps = np.diff(t)[n_before[id] :]
        assert len(gaps) > 50
        assert gaps.max() <= 1.02 * bound * alone_s
    assert h.clock.now - started < 4 * 16_000 * h.executor.row_s  # nor is the prompt starved


def test_a_short_prompt_does_not_wait_for_a_long_one(harness, request_of):
    h = harness(n_pages=400, max_rows=32)
    long = h.submit(request_of("long", 1000, 2))
    h.turn()
    short = h.submit(request_of("short", 10, 2))
    h.turn_until(lambda: bool(short.ids), limit=4)
    assert not long.ids
    h.run()
    assert long.finish.reason is FinishReason.LENGTH


def test_a_long_prompt_gets_half_of_the_rows_however_many_short_ones_come(harness, request_of):
    h = harness(n_pages=400, max_rows=32)
    long = h.submit(request_of("long", 640, 2))
    steps = 0
    while not long.ids:
        h.submit(request_of(f"s{steps}", 14, 1))
        h.submit(request_of(f"t{steps}", 14, 1))
        h.turn()
        steps += 1
        assert steps < 60, "the long prompt starves"


def test_alternating_steps_never_mix(harness, request_of):
    h = harness(mixing="alternate", n_pages=200)
    for i in range(4):
        h.submit(request_of(f"r{i}", 40, 12))
        for _ in range(3):
            h.turn()
    h.run()
    for batch in h.executor.batches:
        kinds = {span.n_rows == 1 and span.position >= 40 for span in batch.spans}
        assert len(kinds) == 1


def test_a_policy_without_room_for_every_sequence_is_refused():
    with pytest.raises(ValueError, match="row of every sequence"):
        Policy(max_sequences=64, n_ctx=100, max_rows=32)
    with pytest.raises(ValueError, match="mixing"):
        Policy(max_sequences=1, n_ctx=100, mixing="both")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_request_whose_pages_are_all_still_cached_goes_on(harness, request_of, alone, overlap):
    """It comes back with a single row to compute, which is decode and not prefill."""
    h = harness(overlap=overlap, n_pages=28, page_size=2, max_sequences=2)
    first, second = request_of("first", 26, 17), request_of("second", 1, 16)
    owners = [h.submit(first), h.submit(second)]
    h.run()
    assert h.loop.scheduler.n_preemptions > 0
    assert [o.ids for o in owners] == [alone(first, 17), alone(second, 16)]
