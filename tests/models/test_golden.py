"""Golden values: whole models equal transformers' float32 within the stated band (|log-probability| 2e-3)."""

import numpy as np
import pytest

BAND = 2e-3  # of log-probabilities: float32 sums in another order
CLEAR = 5e-3  # two best ids further apart than this must come in the same order
ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3", "qwen3moe", "qwen35", "qwen35moe"]


def log_softmax(logits):
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def check_prompt(prompt, logits):
    logprobs = log_softmax(logits)
    ids = np.array(prompt["ids"])
    top = np.array([i for i, _ in prompt["top"]])
    assert np.abs(logprobs[-1][top] - [p for _, p in prompt["top"]]).max() <= BAND
    best_two = np.sort(logprobs, axis=-1)[:, -2:]
    clear = best_two[:, 1] - best_two[:, 0] > CLEAR
    if "argmax" in prompt:
        assert np.array_equal(logprobs.argmax(-1)[clear], np.array(prompt["argmax"])[clear])
    if prompt.get("prompt_nll") is not None:
        nll = -logprobs[np.arange(len(ids) - 1), ids[1:]].mean()
        assert abs(nll - prompt["prompt_nll"]) <= BAND


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tiny_model_equals_golden_values(name, tiny, open_model):
    path, golden = tiny(name)
    model = open_model(path)
    for prompt in golden["prompts"]:
        check_prompt(prompt, model.logits(prompt["ids"]))
