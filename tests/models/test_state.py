"""What a sequence leaves behind: any chunking, any company and any predecessor give the same logits."""

import numpy as np
import pytest

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3", "qwen3moe", "qwen35", "qwen35moe"]
HYBRID = ["qwen35", "qwen35moe"]
TOLERANCE = 3e-4  # of logits that spread over some units: the same sums in another order


def prompt(n, seed=0):
    return [int(i) for i in np.random.default_rng(seed).integers(0, 500, n)]


def close(a, b):
    return np.abs(a - b).max() <= TOLERANCE * max(1.0, float(np.std(b)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prefill_in_any_chunks_equals_decode_one_by_one(name, tiny, open_model):
    """Case 33: lengths around a page's border, chunks across it."""
    model = open_model(tiny(name)[0])
    for n in (31, 32, 33, 70):
        ids = prompt(n)
        one_by_one = model.logits(ids, chunk=1)
        for chunk in (7, 32, n):
            assert close(model.logits(ids, chunk=chunk), one_by_one), (n, chunk)


@pytest.mark.parametrize("name", HYBRID)
def test_prefill_and_decode_meet_around_the_delta_chunk(name, tiny, open_model):
    ids = prompt(135)
    model = open_model(tiny(name)[0], n_ctx=160)
    one_by_one = model.logits(ids, chunk=1)
    for chunk in (3, 63, 64, 65, 128, 135):
        assert close(model.logits(ids, chunk=chunk), one_by_one), chunk


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_batch_of_sequences_equals_each_alone(name, tiny, open_model, rows):
    """Prompts of different lengths in one step, then decode steps together; pages in no order."""
    prompts = [prompt(n, seed=n) for n in (5, 33, 1, 40)]
    next_ids = prompt(4, seed=99)
    alone = []
    model = open_model(tiny(name)[0], scatter=True)
    for ids, following in zip(prompts, next_ids, strict=True):
        alone.append(model.logits([*ids, following])[-2:])
    for slot in range(4):
        model.executor.reset_state(slot)
    together = model.step(*[rows(slot, ids, 0, "last") for slot, ids in enumerate(prompts)])[0].copy()
    assert close(together, np.array([x[0] for x in alone]))
    decoded = model.step(*[rows(s, [i], len(prompts[s])) for s, i in enumerate(next_ids)])[0]
    assert close(decoded, np.array([x[1] for x in alone]))


def test_prefill_of_one_beside_decode_of_others(tiny, open_model, rows):
    model = open_model(tiny("qwen35")[0])
    first, second = prompt(20, 1), prompt(40, 2)
    want_first, want_second = model.logits(first)[-1], model.logits(second)[-1]
    model.executor.reset_state(0)
    model.executor.reset_state(1)
    model.step(rows(0, first[:-1], 0, False))
    mixed = model.step(rows(0, first[-1:], 19), rows(1, second, 0, "last"))[0]
    assert close(mixed, np.array([want_first, want_second]))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_sequence_is_untouched_by_its_predecessor_in_the_slot(name, tiny, open_model):
    """Case 34: A, B, A."""
    model = open_model(tiny(name)[0])
    a, b = prompt(37, 1), prompt(50, 2)
    first = model.logits(a)
    model.logits(b)
    assert np.array_equal(model.logits(a), first)


@pytest.mark.parametrize("name", HYBRID)
def test_copied_state_continues_like_the_original(name, tiny, open_model, rows):
    model = open_model(tiny(name)[0])
    ids = prompt(33)
    whole = model.logits(ids)[-1]
    model.executor.reset_state(0)
    model.step(rows(0, ids[:32], 0, False))
    model.executor.copy_state(0, 3)
    model.logits(prompt(20, 7), slot=0)  # page 0 is overwritten, so the KV is written anew below
    model.executor.reset_state(1)
    model.step(rows(1, ids[:32], 0, False))
    model.executor.copy_state(3, 1)
    assert close(model.step(rows(1, ids[32:], 32))[0], whole)


def test_reset_state_forgets_everything(tiny, open_model, rows):
    model = open_model(tiny("qwen35")[0])
    fresh = model.logits(prompt(4))
    model.step(rows(0, prompt(30, 3), 0, False))
    assert not close(model.step(rows(0, prompt(4)))[0], fresh)
    model.executor.reset_state(0)
    assert np.array_equal(model.step(rows(0, prompt(4)))[0], fresh)


def test_last_sampled_id_is_taken_up_from_the_slot(tiny, open_model, rows):
    """-1 stands for the id that this slot sampled last, in whatever order sequences come."""
    model = open_model(tiny("llama")[0])
    a, b = prompt(9, 1), prompt(12, 2)
    ids = model.step(rows(0, a, 0, "last"), rows(1, b, 0, "last"))[1].ids
    want = model.step(rows(0, [int(ids[0])], 9), rows(1, [int(ids[1])], 12))[0].copy()
    assert not close(want[0], want[1])
    model.step(rows(0, a, 0, "last"), rows(1, b, 0, "last"))
    got = model.step(rows(1, [-1], 12), rows(0, [-1], 9))[0]
    assert close(got[::-1], want)


def test_poisoned_memory_reaches_no_result(tiny, open_model):
    """Nothing is read that was not written: fresh device memory is NaN."""
    path = tiny("qwen35moe")[0]
    clean = open_model(path).logits(prompt(40))
    assert np.array_equal(open_model(path, poison=0xFF).logits(prompt(40)), clean)


def test_hidden_states_are_those_before_the_head(tiny, open_model, rows):
    model = open_model(tiny("qwen3")[0])
    ids = prompt(6)
    hidden = model.hidden(ids)
    logits = model.logits(ids)
    table = model.file_values("token_embd.weight")  # tied
    assert close(hidden @ table.T, logits)


def test_padding_rows_are_never_sampled(small_model, open_model, rows, tmp_path):
    """Case 23: the largest logit belongs to a row without a token."""
    model = small_model("llama")
    model.tokens = 40
    model.tensors["output.weight"][50] = 1000 * model.tensors["output.weight"][50]
    runner = open_model(model.write(tmp_path / "padded.gguf"))
    for token in range(10):
        logits, result = runner.step(rows(0, [token], 0))
        assert 0 <= result.ids[0] < 40
        assert result.ids[0] == logits[0, :40].argmax()
