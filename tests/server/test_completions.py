"""POST /v1/completions over scripted ids."""

import json

import pytest

HELLO = [*b"hello"]
END = 266


def test_a_completion_has_text_usage_and_the_account(run):
    async def body(server):
        answer = await server.complete(max_tokens=5)
        assert answer.status == 200
        assert answer.headers["X-Request-Id"].startswith("req-")
        completion = answer.json
        assert completion["object"] == "text_completion"
        assert completion["choices"] == [
            {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}
        ]
        assert completion["usage"]["prompt_tokens"] == 2
        assert completion["usage"]["completion_tokens"] == 5
        assert completion["usage"]["total_tokens"] == 7
        assert completion["ggufd"] == {
            "ttft_ms": 4.0,
            "prompt_ms": 2.0,
            "decode_ms": 3.0,
            "queue_ms": 1.0,
            "weight_h2d_bytes": 0,
            "cached_prompt_tokens": 0,
            "finish": "length",
        }

    run(body)


def test_an_end_token_stops_and_is_not_text(run):
    async def body(server):
        server.engine.script = lambda request: [*HELLO, END, *HELLO]
        answer = await server.complete(max_tokens=20)
        assert answer.json["choices"][0] == {
            "index": 0,
            "text": "hello",
            "logprobs": None,
            "finish_reason": "stop",
        }
        ignored = await server.complete(max_tokens=12, ignore_eos=True)
        assert ignored.json["choices"][0]["text"] == "hellohello"

    run(body)


def test_sampling_fields_reach_the_engine(run):
    async def body(server):
        await server.complete(
            temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=11, presence_penalty=1, frequency_penalty=-1,
            repeat_penalty=1.1, repeat_last_n=9, logit_bias={"5": 2, "7": -100}, max_tokens=3, priority=4,
            cache_prompt=False,
        )  # fmt: skip
        (request,) = server.engine.requests
        s = request.sampling
        assert (s.temperature, s.top_p, s.top_k, s.min_p, s.seed) == (0.5, 0.9, 7, 0.1, 11)
        assert (s.presence_penalty, s.frequency_penalty, s.repeat_penalty, s.repeat_last_n) == (1, -1, 1.1, 9)
        assert s.logit_bias == ((5, 2.0), (7, -100.0))
        assert (request.max_tokens, request.priority, request.use_prefix_cache) == (3, 4, False)
        assert list(request.prompt_ids) == [*b"Hi"]

    run(body)


def test_without_a_seed_requests_differ_with_one_they_do_not(run):
    async def body(server):
        for _ in range(2):
            await server.complete(n=2)
        seeds = [r.sampling.seed for r in server.engine.requests]
        assert len(set(seeds)) == 4
        await server.complete(n=2, seed=5)
        assert [r.sampling.seed for r in server.engine.requests[4:]] == [5, 6]

    run(body)


def test_lists_of_prompts_and_n_make_choices_in_order(run):
    async def body(server):
        server.engine.script = lambda request: [request.prompt_ids[0], *b"!"]
        answer = await server.complete(prompt=["ab", "cd"], n=2, max_tokens=2)
        assert [(c["index"], c["text"]) for c in answer.json["choices"]] == [
            (0, "a!"),
            (1, "a!"),
            (2, "c!"),
            (3, "c!"),
        ]
        assert answer.json["usage"]["prompt_tokens"] == 4  # each prompt counts once
        assert answer.json["usage"]["completion_tokens"] == 8
        ids = await server.complete(prompt=[[65, 66], [67]], max_tokens=2)
        assert [c["text"] for c in ids.json["choices"]] == ["A!", "C!"]
        one = await server.complete(prompt=[65, 66], max_tokens=2)
        assert one.json["choices"][0]["text"] == "A!"

    run(body)


def test_logprobs_have_openais_lists_and_the_ids(run):
    async def body(server):
        answer = await server.complete(max_tokens=2, logprobs=2)
        logprobs = answer.json["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["h", "e"]
        assert logprobs["token_logprobs"] == [-0.5, -0.5]
        assert logprobs["top_logprobs"][0] == {"h": -0.5, "i": -1.5}
        assert logprobs["text_offset"] == [0, 1]
        assert logprobs["content"][1] == {
            "id": 101,
            "token": "e",
            "logprob": -0.5,
            "bytes": [101],
            "top_logprobs": [
                {"id": 101, "token": "e", "logprob": -0.5, "bytes": [101]},
                {"id": 102, "token": "f", "logprob": -1.5, "bytes": [102]},
            ],
        }
        none = await server.complete(max_tokens=1, logprobs=0)
        assert none.json["choices"][0]["logprobs"]["top_logprobs"] == [{}]

    run(body)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_says_the_prompt_first_with_its_scores(run, stream):
    async def body(server):
        answer = await server.complete(echo=True, logprobs=1, max_tokens=1, stream=stream)
        if stream:
            choices = [e["choices"][0] for e in answer.events[:-1]]
            text = "".join(c["text"] for c in choices)
            scores = [x for c in choices if c["logprobs"] for x in c["logprobs"]["token_logprobs"]]
        else:
            text = answer.json["choices"][0]["text"]
            scores = answer.json["choices"][0]["logprobs"]["token_logprobs"]
        assert text == "Hih"
        assert scores == [None, -0.5, -0.5]
        assert server.engine.requests[0].prompt_logprobs

    run(body)


def test_echo_with_no_tokens_only_scores(run):
    async def body(server):
        answer = await server.complete(echo=True, logprobs=0, max_tokens=0)
        assert answer.json["choices"][0]["text"] == "Hi"
        assert answer.json["choices"][0]["finish_reason"] == "length"

    run(body)


def test_a_stream_gives_the_same_text_and_ends_with_done(run):
    async def body(server):
        answer = await server.complete(stream=True, max_tokens=5, stream_options={"include_usage": True})
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        *chunks, finish, usage, done = answer.events
        assert done == "[DONE]"
        assert "".join(c["choices"][0]["text"] for c in chunks) == "hello"
        assert finish["choices"][0]["finish_reason"] == "length"
        assert finish["ggufd"]["weight_h2d_bytes"] == 0
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 5
        assert len({c["id"] for c in (*chunks, finish, usage)}) == 1

    run(body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_tokens_neither_leaks_nor_loses_a_byte(run, stream):
    """Case 37."""

    async def body(server):
        server.engine.script = lambda request: [*b"one STORY two STOP three"]
        answer = await server.complete(stop=["STOP", "never"], stream=stream, max_tokens=60)
        if stream:
            text = "".join(e["choices"][0]["text"] for e in answer.events[:-1])
            finish = answer.events[-2]["choices"][0]["finish_reason"]
        else:
            text, finish = answer.json["choices"][0]["text"], answer.json["choices"][0]["finish_reason"]
        assert (text, finish) == ("one STORY two ", "stop")

    run(body)


def test_what_looked_like_a_stop_string_comes_out_at_the_end(run):
    async def body(server):
        server.engine.script = lambda request: [*b"x STO"]
        answer = await server.complete(stop="STOP")
        assert answer.json["choices"][0]["text"] == "x STO"

    run(body)


def test_an_emoji_a_byte_a_token_is_never_split(run):
    """Case 36."""

    async def body(server):
        server.engine.script = lambda request: [0xF0, 0x9F, 0x98, 0x80, *b"!", 0xF0, 0x9F]
        answer = await server.complete(stream=True)
        pieces = [e["choices"][0]["text"] for e in answer.events[:-1]]
        assert [p for p in pieces if p] == ["\U0001f600", "!", "\ufffd"]  # the last was never finished
        whole = await server.complete()
        assert whole.json["choices"][0]["text"] == "\U0001f600!\ufffd"

    run(body)


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -1}, "min_p"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": 128, "prompt": ["a", "b"]}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"seed": 1 << 65}, "seed"),
        ({"logit_bias": {"191222": 1}}, "logit_bias"),  # case 39
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"mirostat": 2}, "mirostat"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, None]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"timeout": 0}, "timeout"),
        ({"grammar": "root ::= ("}, "response_format"),
        ({"json_schema": {"type": "nonsense"}}, None),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
    ],
)
def test_wrong_fields_are_400_with_the_fields_name(run, members, param):
    async def body(server):
        answer = await server.complete(**members)
        assert answer.status == 400, answer.body
        assert answer.error["param"] == param
        assert set(answer.error) >= {"message", "type", "param", "code"}
        assert not server.engine.requests

    run(body)


@pytest.mark.parametrize(
    "members",
    [
        {"user": "me", "metadata": {"a": 1}, "store": True, "no_such_field": [1]},
        {"mirostat": 0, "typical_p": 1.0, "xtc_probability": 0.0},
        {"temperature": None, "stop": None, "max_tokens": None, "logit_bias": None, "stream_options": None},
        {"max_tokens": 5.0, "seed": -1, "top_k": -1},
        {"response_format": {"type": "text"}},
        {"best_of": 2, "n": 2},
    ],
)
def test_fields_that_change_nothing_are_taken(run, members):
    async def body(server):
        answer = await server.complete(**members)
        assert answer.status == 200, answer.body

    run(body)


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": "x", "temperature": NaN}',  # case 38
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": -Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b"[" * 20_000,  # case 41
        b'{"prompt": ' + b"[" * 20_000,
        b'{"a":' * 20_000,
        b"",
        b"null",
        b"[]",
        b'"x"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "x"',
        b'{"prompt": "x",}',
        b'{"n": ' + b"9" * 100_000 + b"}",
        b"\xef\xbb\xbf{}",
    ],
)
def test_bodies_that_are_no_json_objects_are_400(run, data):
    async def body(server):
        answer = await server.post("/v1/completions", data)
        assert answer.status == 400, answer.body
        assert answer.error["type"] == "invalid_request_error"
        assert (await server.complete()).status == 200

    run(body)


def test_a_prompt_one_token_over_the_context_is_400_with_both_numbers(run):
    """Case 40, and its twin that fits."""

    async def body(server):
        over = await server.complete(prompt="x" * 65)
        assert over.status == 400
        assert (over.error["n_prompt_tokens"], over.error["n_ctx"]) == (65, 64)
        assert over.error["type"] == "exceed_context_size_error"
        full = await server.complete(prompt="x" * 64)
        assert full.status == 200
        assert full.json["usage"]["completion_tokens"] == 1
        assert full.json["choices"][0]["finish_reason"] == "length"

    run(body)


def test_a_lone_surrogate_cannot_break_the_answer(run):
    async def body(server):
        answer = await server.post("/v1/completions", json.dumps({"prompt": "a\ud800b"}).encode())
        assert answer.status in (200, 400)

    run(body)
