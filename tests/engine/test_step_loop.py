"""The step loop over a fake device: what each request gets, in every phase of its life."""

import dataclasses

import numpy as np
import pytest

from streamer.engine.refusals import PromptTooLong
from streamer.engine.request import (
    EmbeddingEvent,
    FinishReason,
    PrefillEvent,
    PromptEvent,
    SamplingParameters,
    TokenEvent,
)

both = pytest.mark.parametrize("overlap", [False, True])


def events_of(owner, kind):
    return [event for event in owner.events if isinstance(event, kind)]


@both
@pytest.mark.parametrize("mixing", ["mixed", "alternate"])
def test_a_single_request_gets_what_the_model_says(harness, request_of, alone, overlap, mixing):
    h = harness(overlap=overlap, mixing=mixing)
    request = request_of("a", 50, 20)
    owner = h.submit(request)
    h.run()
    assert owner.ids == alone(request, 20)
    assert owner.finish.reason is FinishReason.LENGTH
    assert (owner.finish.n_prompt, owner.finish.n_generated) == (50, 20)
    h.loop.check_integrity()


@both
def test_many_requests_get_what_each_would_get_alone(harness, request_of, alone, overlap):
    h = harness(overlap=overlap, n_pages=256)
    requests = [request_of(f"r{i}", 1 + 7 * i, 5 + 3 * i, temperature=i % 2, seed=i) for i in range(12)]
    owners = [h.submit(r) for r in requests]
    h.run()
    for request, owner in zip(requests, owners, strict=True):
        assert owner.ids == alone(request, request.max_tokens)
    h.loop.check_integrity()


def test_events_come_in_order_prompt_progress_then_prompt_then_tokens(harness, request_of):
    h = harness()
    owner = h.submit(request_of("a", 100, 3))
    h.run()
    kinds = [type(event) for event in owner.events]
    assert kinds == [PrefillEvent] * 3 + [PromptEvent] + [TokenEvent] * 3 + [type(owner.finish)]
    assert [e.processed for e in events_of(owner, PrefillEvent)] == [32, 64, 96]


@both
def test_an_end_id_stops_and_is_counted_but_not_sent(harness, request_of, alone, overlap):
    h = harness(overlap=overlap)
    plain = request_of("a", 9, 20)
    ids = alone(plain, 20)
    owner = h.submit(dataclasses.replace(plain, end_ids=frozenset({ids[5]})))
    h.run()
    assert owner.ids == ids[:5]
    assert owner.finish.reason is FinishReason.STOP
    assert owner.finish.n_generated == 6
    h.loop.check_integrity()


def test_with_overlap_a_step_is_launched_before_the_previous_is_read(harness, request_of):
    h = harness(overlap=True)
    owner = h.submit(request_of("a", 4, 5))
    h.turn()
    assert len(h.executor.batches) == 1
    h.turn()
    assert len(h.executor.batches) == 2
    assert len(owner.ids) == 1
    assert h.executor.batches[1].token_ids.tolist() == [-1]


def test_without_overlap_ids_are_sent_as_read(harness, request_of):
    h = harness(overlap=False)
    owner = h.submit(request_of("a", 4, 5))
    h.turn()
    assert len(owner.ids) == 1
    h.turn()
    assert h.executor.batches[1].token_ids.tolist() == owner.ids[:1]


@both
def test_the_longest_prompt_gets_one_id_and_a_longer_one_is_refused(harness, request_of, overlap):
    h = harness(overlap=overlap, n_ctx=16)
    owner = h.submit(request_of("a", 16, 100))
    h.run()
    assert len(owner.ids) == 1
    assert owner.finish.reason is FinishReason.LENGTH
    with pytest.raises(PromptTooLong) as refused:
        h.submit(request_of("b", 17, 100))
    assert (refused.value.n_prompt, refused.value.n_ctx) == (17, 16)


@both
def test_a_sequence_may_fill_every_page_of_the_pool(harness, request_of, alone, overlap):
    h = harness(overlap=overlap, n_pages=5, page_size=4)
    request = request_of("a", 3, 1000)
    owner = h.submit(request)
    h.run()
    assert owner.ids == alone(request, 18)  # 3 + 18 - 1 positions in 20
    assert owner.finish.reason is FinishReason.LENGTH
    h.loop.check_integrity()


def test_no_tokens_asked_is_a_finished_prompt(harness, request_of):
    h = harness()
    owner = h.submit(request_of("a", 40, 0))
    h.run()
    assert [type(e) for e in owner.events[-2:]] == [PromptEvent, type(owner.finish)]
    assert owner.finish.reason is FinishReason.LENGTH
    assert owner.finish.n_generated == 0
    h.loop.check_integrity()


# ---- ending early ----


@both
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 9])
def test_cancelling_in_any_phase_frees_everything_and_touches_nobody(
    harness, request_of, alone, overlap, turns
):
    h = harness(overlap=overlap, max_sequences=2)
    other = request_of("other", 20, 30)
    kept, cut = h.submit(other), h.submit(request_of("cut", 100, 50))
    queued = h.submit(request_of("queued", 30, 5))
    for _ in range(turns):
        h.turn()
    h.finish(cut)
    h.finish(queued)
    assert cut.finish.reason is FinishReason.CANCELLED
    assert queued.finish.reason is FinishReason.CANCELLED
    h.run()
    assert kept.ids == alone(other, 30)
    h.loop.check_integrity()


def test_finishing_twice_or_after_the_end_does_nothing(harness, request_of):
    h = harness()
    owner = h.submit(request_of("a", 4, 2))
    h.run()
    h.finish(owner)
    h.finish(owner, FinishReason.STOP)
    assert owner.finish.reason is FinishReason.LENGTH


@both
def test_a_row_that_is_not_finite_ends_its_request_only(harness, request_of, alone, overlap):
    h = harness(overlap=overlap)
    good = request_of("good", 10, 20)
    kept, bad = h.submit(good), h.submit(request_of("bad", 10, 20))
    h.executor.poison = lambda slot, position: slot == h.sequences["bad"].slot and position == 14
    h.run()
    assert bad.finish.reason is FinishReason.ERROR
    assert bad.finish.error == "the model's output is not finite"
    assert len(bad.ids) == 5
    assert kept.ids == alone(good, 20)
    h.loop.check_integrity()


def test_what_was_not_finite_is_not_reused(harness, request_of, alone):
    h = harness()
    request = request_of("bad", 20, 5)
    h.executor.poison = lambda slot, position: position == 19
    first = h.submit(request)
    h.run()
    assert first.finish.reason is FinishReason.ERROR
    h.executor.poison = lambda slot, position: False
    again = h.submit(dataclasses.replace(request, id="again"))
    h.run()
    assert again.finish.cached_prompt_tokens == 0
    assert again.ids == alone(request, 5)


def test_a_deadline_ends_a_request_wherever_it_is(harness, request_of):
    h = harness(max_sequences=1)
    running = h.submit(request_of("a", 4, 1000, deadline_s=h.clock.now + 0.5))
    queued = h.submit(request_of("b", 4, 10, deadline_s=h.clock.now + 0.2))
    h.run()
    assert queued.finish.reason is FinishReason.DEADLINE
    assert queued.ids == []
    assert running.finish.reason is FinishReason.DEADLINE
    assert 40 < len(running.ids) < 60
    h.loop.check_integrity()


def test_waiting_longer_than_the_queue_allows_ends_a_request_but_running_long_does_not(harness, request_of):
    h = harness(max_sequences=1, max_queue_s=0.3)
    running, queued = h.submit(request_of("a", 4, 200)), h.submit(request_of("b", 4, 10))
    h.run()
    assert running.finish.reason is FinishReason.LENGTH
    assert queued.finish.reason is FinishReason.DEADLINE
    assert "queue" in queued.finish.error


def test_next_due_is_the_earliest_deadline(harness, request_of):
    h = harness()
    assert h.loop.next_due_s() is None
    h.submit(request_of("a", 4, 10, deadline_s=500.0))
    h.submit(request_of("b", 4, 10, deadline_s=300.0))
    assert h.loop.next_due_s() == 300.0


# ---- what else is wanted of rows ----


def test_logprobs_come_with_as_many_alternatives_as_asked(harness, request_of):
    h = harness()
    some = h.submit(request_of("some", 4, 3, sampling=SamplingParameters(temperature=0, n_logprobs=2)))
    bare = h.submit(request_of("bare", 4, 3, sampling=SamplingParameters(temperature=0, n_logprobs=0)))
    none = h.submit(request_of("none", 4, 3))
    h.run()
    for event in events_of(some, TokenEvent):
        assert event.logprobs.logprob == pytest.approx(-event.token_id / 997)
        assert [id for id, _ in event.logprobs.top] == [event.token_id, (event.token_id + 1) % 997]
    assert all(event.logprobs.top == () for event in events_of(bare, TokenEvent))
    assert all(event.logprobs is None for event in events_of(none, TokenEvent))


@both
@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("n_prompt", [1, 2, 7, 50])
def test_echo_scores_every_prompt_id_whatever_the_chunks(
    harness, request_of, alone, overlap, max_tokens, n_prompt
):
    h = harness(overlap=overlap)
    request = request_of("a", n_prompt, max_tokens, prompt_logprobs=True)
    warm = h.submit(dataclasses.replace(request, id="warm", prompt_logprobs=False, max_tokens=1))
    h.run()
    assert warm.finish is not None
    owner = h.submit(request)
    h.run()
    (prompt,) = events_of(owner, PromptEvent)
    assert prompt.logprobs[0] is None
    assert [entry.logprob for entry in prompt.logprobs[1:]] == [-1.0 - id for id in request.prompt_ids[1:]]
    assert prompt.cached_tokens == 0  # cached rows would have no logits
    assert owner.ids == alone(request, max_tokens)[:max_tokens]
    h.loop.check_integrity()


@both
@pytest.mark.parametrize("how", ["mean", "last"])
def test_embeddings_pool_over_chunks_beside_running_streams(harness, request_of, alone, overlap, how):
    h = harness(overlap=overlap)
    stream_request = request_of("stream", 10, 40)
    stream = h.submit(stream_request)
    embeds = [h.submit(request_of(f"e{i}", n, 0, embed=how)) for i, n in enumerate((1, 5, 45))]
    h.run()
    for owner in embeds:
        (event,) = events_of(owner, EmbeddingEvent)
        n = owner.finish.n_prompt
        assert event.values[1] == pytest.approx((n - 1) / 2 if how == "mean" else n - 1)
        assert owner.finish.reason is FinishReason.STOP
    assert stream.ids == alone(stream_request, 40)
    h.loop.check_integrity()


def test_hidden_states_and_logits_are_never_asked_in_one_step(harness, request_of):
    h = harness()
    h.submit(request_of("a", 10, 10))
    h.submit(request_of("e", 50, 0, embed="mean"))
    h.run()
    e_slots = {s.slot for b in h.executor.batches if b.want_hidden for s in b.spans}
    assert e_slots
    assert all(len(b.spans) == 1 for b in h.executor.batches if b.want_hidden)


# ---- sampling ----


@both
def test_seeds_are_reproducible_whatever_the_batch(harness, request_of, overlap):
    request = request_of("a", 9, 25, temperature=0.9, seed=77)
    single = harness(overlap=overlap)
    expected = single.submit(request)
    single.run()
    crowd = harness(overlap=not overlap, n_pages=200, max_rows=11)
    for i in range(3):
        crowd.submit(request_of(f"x{i}", 40 + i, 30, temperature=1.0, seed=i))
    again = crowd.submit(request)
    crowd.run()
    assert again.ids == expected.ids
    other = harness().submit(dataclasses.replace(request, sampling=SamplingParameters(seed=78)))
    assert other.ids != expected.ids


@both
def test_penalties_and_bias_reach_the_rows_they_belong_to(harness, request_of, overlap):
    h = harness(overlap=overlap)
    sampling = SamplingParameters(
        temperature=0, repeat_penalty=1.5, repeat_last_n=2, logit_bias=((900, 3.0), (4, -1.0))
    )
    owner = h.submit(request_of("a", [3, 4, 5], 3, sampling=sampling))
    plain = h.submit(request_of("b", 3, 3))
    h.run()
    first = h.executor.samplings[0]
    entries = sorted(
        zip(first.adjust_ids.tolist(), first.adjust_divide.tolist(), first.adjust_add.tolist(), strict=True)
    )
    assert entries == [(4, 1.5, -1.0), (5, 1.5, 0.0), (900, 1.0, 3.0)]
    assert set(first.adjust_rows.tolist()) == {0}
    assert len(owner.ids) == len(plain.ids) == 3
    seen = [set(s.adjust_ids.tolist()) for s in h.executor.samplings if len(s.adjust_ids)]
    assert seen[1] == {5, owner.ids[0], 900, 4}
    assert seen[2] == {*owner.ids[:2], 900, 4}


@both
def test_overlap_changes_no_id_with_penalties_either(harness, request_of, overlap):
    sampling = SamplingParameters(temperature=0, frequency_penalty=0.5, repeat_last_n=-1)
    results = []
    for mode in (overlap, not overlap):
        h = harness(overlap=mode)
        owner = h.submit(request_of("a", 9, 30, sampling=sampling))
        h.submit(request_of("b", 9, 30))
        h.run()
        results.append(owner.ids)
    assert results[0] == results[1]


# ---- accounts ----


def test_times_and_moved_weight_bytes_are_told(harness, request_of):
    h = harness(max_sequences=1, overlap=False)
    h.submit(request_of("first", 4, 10))
    owner = h.submit(request_of("second", 40, 5))
    h.turn()
    h.uploaded += 123
    h.run()
    end = owner.finish
    assert end.queue_ms == pytest.approx(10 * 10.0, rel=0.05)
    assert end.prompt_ms == pytest.approx(2 * 10.0 + 40 * 0.1, rel=0.1)
    assert end.decode_ms == pytest.approx(4 * 10.0, rel=0.05)
    assert end.ttft_ms == pytest.approx(end.queue_ms + end.prompt_ms)
    assert end.weight_h2d_bytes == 123


def test_counters_add_up(harness, request_of):
    h = harness()
    for i in range(3):
        h.submit(request_of(f"r{i}", 8, 4))
    h.run()
    outcomes = h.loop.outcomes
    assert (outcomes.n_prompt_tokens, outcomes.n_generated_tokens) == (24, 12)
    assert h.loop.n_steps == len(h.executor.batches)


def test_batches_cover_rows_in_span_order(harness, request_of):
    h = harness(n_pages=200)
    for i in range(6):
        h.submit(request_of(f"r{i}", 3 + 11 * i, 9))
    h.run()
    for batch in h.executor.batches:
        assert batch.token_ids.dtype == batch.positions.dtype == batch.logit_rows.dtype == np.int32
        assert batch.n_rows <= 32
        assert len(batch.logit_rows) <= 8
        assert np.all(np.diff(batch.logit_rows) > 0)
