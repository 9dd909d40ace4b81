"""Whatever comes in whatever order: nothing leaks, nothing starves, every request ends once, and every answer
is the one the request would get alone."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamer.engine.request import EmbeddingEvent, FinishReason, PromptEvent

SHARED = [list(range(7, 7 + 40)), list(range(500, 540)), [1] * 40]

requests = st.fixed_dictionaries(
    {
        "family": st.integers(0, 2),
        "shared": st.integers(0, 24),
        "own": st.integers(1, 14),
        "max_tokens": st.integers(0, 20),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "priority": st.sampled_from([0, 0, 0, 1, 5]),
        "kind": st.sampled_from(
            ["plain", "plain", "plain", "plain", "echo", "mean", "last", "no cache", "end"]
        ),
    }
)
actions = st.lists(
    st.one_of(
        requests,
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("turn"), st.integers(1, 6)),
        st.tuples(st.just("read"), st.integers(0, 30)),
        st.tuples(st.just("stall"), st.integers(0, 30)),
    ),
    max_size=30,
)
configurations = st.fixed_dictionaries(
    {
        "n_pages": st.integers(10, 40),
        "page_size": st.sampled_from([1, 2, 4, 8]),
        "recurrent": st.booleans(),
        "n_snapshots": st.integers(0, 3),
        "overlap": st.booleans(),
        "mixing": st.sampled_from(["mixed", "alternate"]),
        "max_sequences": st.integers(1, 5),
        "max_rows": st.sampled_from([5, 9, 32]),
        "max_logit_rows": st.sampled_from([5, 8]),
        "backlog_limit": st.sampled_from([4, 1000]),
    }
)


def build(request_of, number, wish, capacity):
    prompt = SHARED[wish["family"]][: wish["shared"]] + [
        900 + (number * 7 + i) % 90 for i in range(wish["own"])
    ]
    kind, fields = wish["kind"], {}
    if kind == "echo":
        fields["prompt_logprobs"] = True
    elif kind in ("mean", "last"):
        fields["embed"] = kind
    elif kind == "no cache":
        fields["use_prefix_cache"] = False
    elif kind == "end":
        fields["end_ids"] = frozenset(range(0, 997, 5))
    return request_of(
        f"q{number}",
        prompt[-capacity:],
        wish["max_tokens"],
        temperature=wish["temperature"],
        seed=wish["seed"],
        priority=wish["priority"],
        **fields,
    )


def check_answer(owner, expected, capacity, was_cancelled):
    request, end = owner.request, owner.finish
    assert end is not None, f"{request.id} never ended"
    if end.reason is FinishReason.CANCELLED:
        assert was_cancelled
        assert owner.ids == expected[: len(owner.ids)]
        return
    if request.embed:
        (embedding,) = [e for e in owner.events if isinstance(e, EmbeddingEvent)]
        n = len(request.prompt_ids)
        assert embedding.values[1] == pytest.approx((n - 1) / 2 if request.embed == "mean" else n - 1)
        return
    limit = min(request.max_tokens, capacity + 1 - len(request.prompt_ids))
    if end.reason is FinishReason.STOP:
        assert expected[-1] in request.end_ids
        assert owner.ids == expected[:-1]
    else:
        assert end.reason is FinishReason.LENGTH
        assert owner.ids == expected
        assert len(owner.ids) == limit
    if request.prompt_logprobs:
        (prompt,) = [e for e in owner.events if isinstance(e, PromptEvent)]
        assert [e.logprob for e in prompt.logprobs[1:]] == [-1.0 - id for id in request.prompt_ids[1:]]


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configurations, actions)
def test_any_course_of_events_ends_well(harness, request_of, alone, configuration, course):
    h = harness(n_ctx=60, min_prefill_rows=2, slow_reader_s=1e9, **configuration)
    capacity = h.loop.scheduler.capacity
    cancelled = set()
    for action in course:
        if isinstance(action, dict):
            h.submit(build(request_of, len(h.owners), action, capacity))
            continue
        name, number = action
        if name == "turn":
            for _ in range(number):
                h.turn()
        elif h.owners:
            owner = h.owners[number % len(h.owners)]
            if name == "cancel":
                cancelled.add(owner)
                h.finish(owner)
            else:
                owner.reads = name == "read"
                if owner.reads:
                    owner.read_all()
        h.pool.check_integrity([s.span_pages.tolist() for s in h.loop.scheduler.running])
        h.loop.scheduler.check_integrity()
    for _ in range(300):  # a reader may be paused many times: read until all have ended
        for owner in h.owners:
            owner.reads = True
            owner.read_all()
        h.run()
        if all(owner.finish for owner in h.owners):
            break
    for owner in h.owners:
        limit = min(owner.request.max_tokens, capacity + 1 - len(owner.request.prompt_ids))
        check_answer(owner, alone(owner.request, limit), capacity, owner in cancelled)
    h.loop.check_integrity()


@settings(max_examples=40, deadline=None)
@given(configurations, st.lists(requests, min_size=1, max_size=8))
def test_overlap_on_and_off_give_the_same_ids(harness, request_of, configuration, wishes):
    results = []
    for overlap in (False, True):
        h = harness(n_ctx=60, min_prefill_rows=2, **{**configuration, "overlap": overlap})
        for wish in wishes:
            h.submit(build(request_of, len(h.owners), wish, h.loop.scheduler.capacity))
            h.turn()
        h.run()
        results.append([owner.ids for owner in h.owners])
    assert results[0] == results[1]
