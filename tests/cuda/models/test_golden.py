"""Whole models on CUDA against golden values of float32 arithmetic, and against themselves in batches.

Bands: activations are bf16 or 16-bit integers and keys and values f16, so log-probabilities differ from
float32 by rounding; the stated band is a mean KL divergence of 5e-3 over a prompt's last positions, taken
over the 20 most likely ids. Chunks and batches change kernels (other roundings), so they agree within the
same band.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.cuda

DENSE = ["llama", "qwen2", "qwen3", "gemma3"]
HYBRID = ["qwen35"]
EXPERTS = ["qwen3moe", "qwen35moe"]
MAX_KL = 5e-3
CLEAR = 0.25  # two best log-probabilities further apart than this must come in the same order (random models)


def kl(reference: Sequence[tuple[int, float]], ids: np.ndarray, logprobs: np.ndarray) -> float:
    """KL over the reference's listed ids; one that we do not list has at most our last one's probability."""
    ours = dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
    return float(sum(np.exp(p) * (p - ours.get(i, float(logprobs[-1]))) for i, p in reference))


def check_golden(
    golden: dict[str, Any], run: Callable[[Sequence[int]], Any], *, routed: bool = False
) -> float:
    """`routed`: random experts' routers have near ties that rounding decides otherwise, and what follows such
    a position differs too: a few positions may, and the middle prompt's divergence counts."""
    divergences = []
    n_wrong = 0
    for prompt in golden["prompts"]:
        result = run(prompt["ids"])
        assert result.finite.all()
        divergences.append(kl(prompt["top"], result.top_ids[-1], result.top_logprobs[-1]))
        clear = result.top_logprobs[:, 0] - result.top_logprobs[:, 1] > CLEAR
        if "argmax" in prompt:
            wrong = (result.ids != np.array(prompt["argmax"])) & clear
            n_wrong += int(wrong.sum())
            assert routed or not wrong.any(), np.flatnonzero(wrong)
    assert n_wrong <= 5, n_wrong
    mean = float((np.median if routed else np.mean)(np.abs(divergences)))
    assert mean <= MAX_KL, divergences
    return mean


@pytest.mark.parametrize("name", [*DENSE, *HYBRID, *EXPERTS])
def test_tiny_model_equals_golden_values(
    name: str, open_model: Any, golden: Any, record_property: Callable[[str, object], None]
) -> None:
    path, values = golden(name)
    model = open_model(path)
    record_property("mean_kl", check_golden(values, model.prompt, routed=name in EXPERTS))


@pytest.mark.parametrize("name", [*DENSE, *HYBRID, *EXPERTS])
def test_chunks_and_single_tokens_agree_with_the_whole_prompt(
    name: str, open_model: Any, golden: Any
) -> None:
    path, values = golden(name)
    model = open_model(path)
    for chunk in (1, 7, 32):
        check_golden(values, lambda ids, chunk=chunk: model.prompt(ids, chunk=chunk), routed=name in EXPERTS)


@pytest.mark.parametrize("name", [*DENSE, *HYBRID, *EXPERTS])
def test_sequences_in_one_batch_equal_single_ones_and_leave_nothing_behind(
    name: str, open_model: Any, golden: Any
) -> None:
    path, values = golden(name)
    model = open_model(path)
    prompts = [p["ids"] for p in values["prompts"]]
    alone = [model.prompt(ids) for ids in prompts]
    again = model.prompt(prompts[0])  # slot 0 after other sequences
    assert np.array_equal(again.top_ids, alone[0].top_ids)
    assert np.array_equal(again.top_logprobs, alone[0].top_logprobs)
    for slot in range(len(prompts)):
        model.executor.reset_state(slot)
    together = model.step([(slot, ids, 0) for slot, ids in enumerate(prompts)], every_row=False)
    for slot, single in enumerate(alone):
        reference = list(zip(single.top_ids[-1].tolist(), single.top_logprobs[-1].tolist(), strict=True))
        assert abs(kl(reference, together.top_ids[slot], together.top_logprobs[slot])) <= MAX_KL
    # one decode step of all, then of each alone
    ids = [int(together.ids[slot]) for slot in range(len(prompts))]
    batch = model.step([(slot, [ids[slot]], len(p)) for slot, p in enumerate(prompts)])
    for slot, prompt in enumerate(prompts):
        single = model.prompt([*prompt, ids[slot]])
        reference = list(zip(single.top_ids[-1].tolist(), single.top_logprobs[-1].tolist(), strict=True))
        assert abs(kl(reference, batch.top_ids[slot], batch.top_logprobs[slot])) <= MAX_KL


@pytest.mark.parametrize("name", ["smollm2-135m.q4_1", "gemma-3-270m.q4_k_m"])
def test_real_model_equals_golden_values(
    name: str, open_model: Any, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    path: Path = request.getfixturevalue("smollm2_path" if name.startswith("smollm2") else "gemma_path")
    values = json.loads((Path(__file__).parents[2] / "data" / f"{name}.json").read_text())
    model = open_model(path, n_ctx=1024, max_rows=1024)
    record_property("mean_kl", check_golden(values, model.prompt))
    record_property("mean_kl_decode", check_golden(values, lambda ids: model.prompt(ids, chunk=1)))
