"""Log-probabilities as clients see them equal an independent float32 engine's within its band."""

import json
from pathlib import Path

import pytest

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2-135m.q4_1.json").read_text())
BAND = 2e-3
PROMPTS = [p for p in GOLDEN["prompts"] if len(p["ids"]) <= 64]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: repr(p["text"][:16]))
def test_completions(smollm2, prompt):
    """The most likely ids after the prompt, the prompt's own, and the greedy continuation."""
    greedy = prompt["greedy"][:8]
    members = {"prompt": prompt["ids"], "max_tokens": len(greedy), "temperature": 0}
    answer = smollm2.complete(**members, logprobs=20, echo=True, ignore_eos=True).json
    logprobs = answer["choices"][0]["logprobs"]
    n = len(prompt["ids"])
    assert logprobs["ids"][:n] == prompt["ids"]
    assert logprobs["ids"][n:] == greedy
    first = {t["id"]: t["logprob"] for t in logprobs["content"][n]["top_logprobs"]}
    for token_id, expected in prompt["top"]:
        assert first[token_id] == pytest.approx(expected, abs=BAND)
    assert len(first) == 20
    if n > 1:
        nll = -sum(logprobs["token_logprobs"][1:n]) / (n - 1)
        assert nll == pytest.approx(prompt["prompt_nll"], abs=BAND)


def test_chat_says_the_logprobs_of_its_prompt(smollm2):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = smollm2.post("/apply-template", {"messages": messages}).json["prompt"]
    members = {"max_tokens": 6, "temperature": 0}
    raw = smollm2.complete(prompt=text, logprobs=5, **members).json["choices"][0]["logprobs"]["content"]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 5, **members}
    chat = smollm2.post("/v1/chat/completions", body).json["choices"][0]["logprobs"]["content"]
    assert [t["id"] for t in chat] == [t["id"] for t in raw]
    assert [t["logprob"] for t in chat] == pytest.approx([t["logprob"] for t in raw], abs=BAND)
