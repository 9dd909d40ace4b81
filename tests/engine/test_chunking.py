"""How a step's prefill rows are shared out, and what a sequence hands to launched steps."""

import numpy as np
import pytest

from streamer.engine.chunking import divide_rows
from streamer.engine.sequence import new_sequence


@pytest.fixture
def begun(request_of):
    """Sequences with prompts of these lengths, in order of arrival."""

    def build(*lengths, **fields):
        return [
            new_sequence(request_of(f"r{i}", n, 4, **fields), 10_000, i, None, 0.0)
            for i, n in enumerate(lengths)
        ]

    return build


def shares(chunks):
    return {s.request.id: n for s, n in chunks}


def test_one_prompt_gets_all_rows(begun):
    assert shares(divide_rows(begun(100), 64, 8, 4)) == {"r0": 64}


def test_the_oldest_gets_half_and_the_shortest_the_rest(begun):
    assert shares(divide_rows(begun(100, 90, 20, 12), 64, 8, 4)) == {"r0": 32, "r3": 12, "r2": 20}


def test_what_the_others_do_not_need_goes_to_the_oldest(begun):
    assert shares(divide_rows(begun(100, 8), 64, 8, 4)) == {"r0": 56, "r1": 8}


def test_chunks_end_at_page_boundaries_unless_they_end_the_prompt(begun):
    assert shares(divide_rows(begun(100), 30, 8, 8)) == {"r0": 24}
    assert shares(divide_rows(begun(30), 30, 8, 8)) == {"r0": 30}
    assert shares(divide_rows(begun(100), 5, 8, 8)) == {"r0": 5}  # less than a page still advances


def test_chunks_end_where_a_snapshot_is_wanted(begun):
    (sequence,) = begun(100)
    sequence.snapshot_at = (16, 96)
    assert shares(divide_rows([sequence], 64, 8, 4)) == {"r0": 16}


def test_prompts_end_only_while_there_are_logit_rows(begun):
    assert shares(divide_rows(begun(4, 4, 4), 64, 2, 4)) == {"r0": 4, "r1": 4, "r2": 3}
    assert shares(divide_rows(begun(1, 1), 64, 1, 4)) == {"r0": 1}


def test_a_prompt_whose_every_row_has_logits_is_bounded_by_them(begun):
    assert shares(divide_rows(begun(50, prompt_logprobs=True), 64, 8, 4)) == {"r0": 8}
    (scored,) = begun(50, prompt_logprobs=True)
    scored.n_scored = 20  # preempted before: these rows need no logits again
    assert shares(divide_rows([scored], 64, 8, 4)) == {"r0": 28}


def test_no_rows_means_no_chunks(begun):
    assert divide_rows(begun(5), 0, 8, 4) == []
    assert divide_rows([], 64, 8, 4) == []


def test_a_page_table_handed_out_is_never_written_again(begun):
    """Launched steps may not have read it yet when the sequence grows, or is preempted and comes back."""
    (sequence,) = begun(5)
    sequence.take_pages([3, 4], 8)
    first = sequence.span_pages
    sequence.add_page(5)
    sequence.take_pages([9, 9, 9], 8)
    assert first.tolist() == [3, 4]
    assert sequence.span_pages.dtype == np.int32


@pytest.mark.parametrize("kind", ["echo", "mean"])
def test_rows_are_scored_once_though_a_preemption_computes_them_again(harness, request_of, kind):
    fields = {"prompt_logprobs": True} if kind == "echo" else {"embed": "mean"}
    h = harness(n_pages=13, page_size=4, max_sequences=2, max_logit_rows=3, overlap=False)
    first = h.submit(request_of("first", 8, 30))
    h.turn_until(lambda: len(first.ids) >= 3)
    second = h.submit(request_of("second", 36, 0, **fields))
    h.turn()
    assert h.sequences["second"].n_scored > 0
    h.turn_until(lambda: not h.sequences["second"].is_running or second.finish is not None)
    assert second.finish is None, "the test needs a preemption in mid-prompt"
    h.run()
    if kind == "echo":
        (prompt,) = [e for e in second.events if hasattr(e, "cached_tokens")]
        assert [e.logprob for e in prompt.logprobs[1:]] == [-1.0 - i for i in second.request.prompt_ids[1:]]
    else:
        (embedding,) = [e for e in second.events if hasattr(e, "values")]
        assert embedding.values[1] == pytest.approx(35 / 2)
