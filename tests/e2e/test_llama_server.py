"""What llama-server's documentation promises, asked of ggufd from outside: its clients should not notice."""

import json
import re

import pytest

SKY = "The sky is"
PARIS = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def events(answer):
    """The data of an SSE answer, decoded; without the [DONE] of the OpenAI APIs."""
    assert answer.status == 200, answer.body
    lines = [x[6:] for x in answer.body.decode().splitlines() if x.startswith("data: ")]
    return [json.loads(x) for x in lines if x != "[DONE]"]


# ---- basic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["/health", "/v1/health"])
def test_health(smollm2, route):
    answer = smollm2.get(route)
    assert (answer.status, answer.body) == (200, b'{"status":"ok"}')


def test_props(smollm2):
    props = smollm2.get("/props").json
    assert props["total_slots"] > 0
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["model_path"].endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
    assert "<|im_start|>" in props["chat_template"]
    assert props["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize("route", ["/models", "/v1/models"])
def test_models(smollm2, route):
    answer = smollm2.get(route).json
    (model,) = answer["data"]
    assert answer["object"] == "list"
    assert set(model) >= {"id", "object", "created", "owned_by", "root", "meta"}
    meta = {"n_ctx": 4096, "n_ctx_train": 8192, "n_vocab": 49152, "n_embd": 576, "n_params": 134515008}
    assert model["meta"].items() >= meta.items()


def test_unknown_routes_and_methods_are_errors_in_json(smollm2):
    assert smollm2.get("/nothing").json["error"]["code"] == 404
    assert smollm2.get("/v1/completions").status == 405


# ---- tokenize ----------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize_are_inverse(smollm2):
    text = "What is the capital of France? ü 日本 😀"
    tokens = smollm2.post("/tokenize", {"content": text}).json["tokens"]
    assert smollm2.post("/detokenize", {"tokens": tokens}).json["content"] == text


def test_tokenize_with_pieces(smollm2):
    pieces = smollm2.post("/tokenize", {"content": "Hi 日", "with_pieces": True}).json["tokens"]
    ids = smollm2.post("/tokenize", {"content": "Hi 日"}).json["tokens"]
    assert [p["id"] for p in pieces] == ids
    raw = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert raw == "Hi 日".encode()


def test_tokenize_parses_control_tokens_unless_told_otherwise(smollm2):
    assert smollm2.post("/tokenize", {"content": "<|im_end|>"}).json["tokens"] == [2]
    text = smollm2.post("/tokenize", {"content": "<|im_end|>", "parse_special": False}).json["tokens"]
    assert 2 not in text
    assert len(text) > 1


# ---- completion --------------------------------------------------------------------------------------------


def test_completion(smollm2):
    answer = smollm2.post("/completion", {"prompt": SKY, "n_predict": 8, "temperature": 0}).json
    assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (3, 8)
    assert (answer["stop"], answer["stop_type"], answer["truncated"]) == (True, "limit", False)
    timings = answer["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == 3
    assert timings["predicted_n"] == 8
    assert answer["generation_settings"]["n_predict"] == 8


def test_completion_streamed_says_the_same(smollm2):
    body = {"prompt": SKY, "n_predict": 12, "temperature": 0}
    whole = smollm2.post("/completion", body).json
    streamed = events(smollm2.post("/completion", {**body, "stream": True}))
    assert "".join(e["content"] for e in streamed) == whole["content"]
    assert [e["stop"] for e in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1]["tokens_predicted"] == 12


def test_same_seed_same_answer_and_other_seed_another(smollm2):
    def ask(seed):
        members = {"prompt": SKY, "n_predict": 16, "temperature": 1.0, "seed": seed}
        return smollm2.post("/completion", members).json["content"]

    first = ask(42)
    assert [ask(42), ask(42)] == [first, first]
    assert len({first, ask(1), ask(2)}) > 1


def test_a_prompt_in_the_cache_is_not_computed_again_and_changes_nothing(smollm2):
    body = {"prompt": f"{SKY} blue because " * 20, "n_predict": 8, "temperature": 0}
    cold = smollm2.post("/completion", {**body, "cache_prompt": False}).json
    smollm2.post("/completion", body)
    warm = smollm2.post("/completion", body).json
    assert (cold["timings"]["cache_n"], warm["content"]) == (0, cold["content"])
    assert warm["timings"]["cache_n"] > 64


def test_prompts_as_ids_and_mixed(smollm2):
    ids = smollm2.post("/tokenize", {"content": "I believe the meaning of life is"}).json["tokens"]
    body = {"n_predict": 6, "temperature": 0, "return_tokens": True}
    text = smollm2.post("/completion", {"prompt": "I believe the meaning of life is", **body}).json
    assert smollm2.post("/completion", {"prompt": ids, **body}).json["tokens"] == text["tokens"]
    several = smollm2.post("/completion", {"prompt": [ids, "I believe the meaning of life is"], **body}).json
    assert [x["tokens"] for x in several] == [text["tokens"]] * 2
    mixed = smollm2.post("/completion", {"prompt": [*ids[:-2], " life is"], **body}).json
    assert mixed["tokens"] == text["tokens"]


def test_a_bias_forbids_and_demands(smollm2):
    free = smollm2.post(
        "/completion", {"prompt": SKY, "n_predict": 1, "temperature": 0, "return_tokens": True}
    ).json["tokens"]
    other = {"prompt": SKY, "n_predict": 1, "temperature": 0, "return_tokens": True}
    for bias in ({str(free[0]): -100}, [[free[0], -100]]):
        assert smollm2.post("/completion", {**other, "logit_bias": bias}).json["tokens"] != free
    demanded = smollm2.post("/completion", {**other, "n_predict": 3, "logit_bias": {"28": 100}}).json
    assert demanded["tokens"] == [28, 28, 28]


# ---- chat --------------------------------------------------------------------------------------------------


def test_chat(smollm2):
    answer = smollm2.post("/v1/chat/completions", {"messages": PARIS, "max_tokens": 8, "temperature": 0}).json
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert "Paris" in choice["message"]["content"]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert answer["object"] == "chat.completion"


def test_chat_streamed_says_the_same(smollm2):
    body = {"messages": PARIS, "max_tokens": 8, "temperature": 0}
    whole = smollm2.post("/v1/chat/completions", body).json
    chunks = events(smollm2.post("/v1/chat/completions", {**body, "stream": True}))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert len({c["id"] for c in chunks}) == 1


@pytest.mark.parametrize(
    "messages",
    [None, 123, [], [123], ["hello"], [{"role": 123}], [{"role": "system", "content": 123}], [{"role": "x"}]],
)
def test_messages_that_are_none_are_400(smollm2, messages):
    answer = smollm2.post("/v1/chat/completions", {"messages": messages})
    assert (answer.status, answer.json["error"]["code"] is not None) == (400, True)
    assert answer.json["error"]["message"]


def test_a_prompt_over_the_context_tells_both_numbers(smollm2):
    messages = [{"role": "user", "content": "word " * 5000}]
    error = smollm2.post("/v1/chat/completions", {"messages": messages}).json["error"]
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > error["n_ctx"] == 4096


# ---- stop --------------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_answer_and_is_named(smollm2):
    body = {"prompt": "Count: one, two, three,", "n_predict": 24, "temperature": 0}
    free = smollm2.post("/completion", body).json["content"]
    word = free[5:9]  # over token borders, most likely
    for stream in (False, True):
        answer = smollm2.post("/completion", {**body, "stop": [word, "never"], "stream": stream})
        parts = events(answer) if stream else [answer.json]
        assert "".join(p["content"] for p in parts) == free[: free.index(word)]
        assert (parts[-1]["stop_type"], parts[-1]["stopping_word"]) == ("word", word)


# ---- logprobs ----------------------------------------------------------------------------------------------


def test_n_probs(smollm2):
    body = {"prompt": SKY, "n_predict": 5, "n_probs": 10, "temperature": 0}
    answer = smollm2.post("/completion", body).json
    for token in answer["completion_probabilities"]:
        assert token["id"] >= 0
        assert token["token"].encode() == bytes(token["bytes"])
        assert token["logprob"] <= 0
        top = [x["logprob"] for x in token["top_logprobs"]]
        assert len(top) == 10
        assert top == sorted(top, reverse=True)
        assert top[0] == token["logprob"]  # greedy
    streamed = events(smollm2.post("/completion", {**body, "stream": True}))
    probabilities = [p for e in streamed for p in e["completion_probabilities"]]
    assert [p["id"] for p in probabilities] == [p["id"] for p in answer["completion_probabilities"]]
    # a step of one token and a step of a batch may round differently
    assert [p["logprob"] for p in probabilities] == pytest.approx(
        [p["logprob"] for p in answer["completion_probabilities"]], abs=1e-3
    )


def test_chat_logprobs(smollm2):
    body = {"messages": PARIS, "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 5}
    (choice,) = smollm2.post("/v1/chat/completions", body).json["choices"]
    tokens = choice["logprobs"]["content"]
    assert b"".join(bytes(t["bytes"]) for t in tokens).decode().startswith(choice["message"]["content"])
    assert all(len(t["top_logprobs"]) == 5 for t in tokens)


# ---- security ----------------------------------------------------------------------------------------------


def test_keys_are_asked_for_on_tcp_but_not_for_probes(start, scripted, make_scripted, tmp_path):
    import http.client
    import socket

    key = "sk-0123456789abcdef"
    (tmp_path / "keys").write_text(key + "\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = make_scripted(tmp_path / "m.gguf", scripted.ids("abc"))
    start(model, "--listen", f"127.0.0.1:{port}", "--api-key-file", str(tmp_path / "keys"))

    def ask(route, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST" if body else "GET", route, body, headers)
        response = connection.getresponse()
        answer = response.status, json.loads(response.read())
        connection.close()
        return answer

    assert ask("/health")[0] == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": key[:-1]}):
        status, answer = ask("/v1/completions", '{"prompt": "a"}', **headers)
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert key not in str(answer)
    for headers in ({"Authorization": f"Bearer {key}"}, {"X-Api-Key": key}):
        assert ask("/v1/completions", '{"prompt": "a"}', **headers)[0] == 200


# ---- metrics -----------------------------------------------------------------------------------------------


def test_metrics_are_prometheus_text_and_count(smollm2):
    before = smollm2.metric("ggufd_generated_tokens_total")
    smollm2.complete(prompt=SKY, max_tokens=5, ignore_eos=True)
    assert smollm2.metric("ggufd_generated_tokens_total") == before + 5
    answer = smollm2.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    line = re.compile(r'(# (HELP|TYPE) .*|[a-z_0-9]+(\{([a-z]+="[^"]*",?)+\})? [-+0-9.eInf]+)')
    assert all(line.fullmatch(x) for x in answer.body.decode().splitlines())


# ---- template ----------------------------------------------------------------------------------------------


def test_the_template_is_applied_without_generating(smollm2):
    answer = smollm2.post("/apply-template", {"messages": [{"role": "system", "content": "S"}, *PARIS]})
    assert answer.json["prompt"] == (
        "<|im_start|>system\nS<|im_end|>\n"
        f"<|im_start|>user\n{PARIS[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    )


# ---- tools -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_demanded_tool_is_called_with_arguments_of_its_schema(smollm2, choice, stream):
    body = {
        "messages": [{"role": "user", "content": "Weather in Rome?"}],
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 64,
        "temperature": 0,
        "stream": stream,
    }
    answer = smollm2.post("/v1/chat/completions", body)
    if stream:
        deltas = [c["choices"][0]["delta"] for c in events(answer)]
        pieces = [x for d in deltas for x in d.get("tool_calls", [])]
        name, finish = pieces[0]["function"]["name"], events(answer)[-1]["choices"][0]["finish_reason"]
        arguments = "".join(p["function"]["arguments"] for p in pieces)
    else:
        (found,) = answer.json["choices"]
        (call,) = found["message"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        finish = found["finish_reason"]
        assert call["id"]
    assert (name, finish) == ("get_weather", "tool_calls")
    parsed = json.loads(arguments)
    assert isinstance(parsed["city"], str)
    assert set(parsed) <= {"city", "days"}


def test_tools_not_to_be_used_are_not(smollm2):
    body = {"messages": PARIS, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 8, "temperature": 0}
    (choice,) = smollm2.post("/v1/chat/completions", body).json["choices"]
    assert "tool_calls" not in choice["message"]
    assert "Paris" in choice["message"]["content"]


# ---- JSON schema and grammar -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"response_format": {"type": "json_object", "schema": {"const": "42"}}}, r'"42"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [7]}}}}, r"7"),
        (
            {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}},
            r"\[[\s\S]*\]",
        ),
        ({"grammar": 'root ::= ("yes" | "no") "!"{2}'}, r"(yes|no)!!"),
    ],
)
def test_formats_hold(smollm2, wanted, pattern):
    body = {"messages": PARIS, "max_tokens": 64, "temperature": 0, **wanted}
    text = smollm2.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    assert re.fullmatch(pattern, text), text
    if "grammar" not in wanted:
        json.loads(text)


@pytest.mark.parametrize(
    "wanted",
    [
        {"response_format": {"type": "sound"}},
        {"response_format": {"type": "json_object", "schema": 123}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}}},
        {"json_schema": {"type": "hiccup"}},
        {"grammar": "root ::= nowhere"},
        {"grammar": "no grammar at all"},
    ],
)
def test_formats_that_cannot_be_held_are_400_never_an_unbound_200(smollm2, wanted):
    answer = smollm2.post("/v1/chat/completions", {"messages": PARIS, "max_tokens": 4, **wanted})
    assert answer.status == 400, answer.body
