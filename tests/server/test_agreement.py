"""Streams, whole answers and counts agree; bounds under every API's own names are kept or refused."""

import json
import logging

import pytest

from streamer.server.state import Limits
from streamer.server.textwork import TextWork
from streamer.text.chat_template import ChatTemplates
from streamer.text.constraint import ConstraintFactory

END = 266
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "weather", "input_schema": SCHEMA}]
THOUGHT = {"type": "thinking", "thinking": "x"}
USER = [{"role": "user", "content": "x"}]


def say(text):
    return lambda request: [*text, END]


@pytest.fixture
def with_template(run, text, make_metadata):
    """`with_template(source, body)`: a server whose model has this chat template."""

    def go(source, body):
        metadata = make_metadata() | {"tokenizer.chat_template": source}
        templates = ChatTemplates(metadata, text.tokenizer, deadline_s=5.0)
        work = TextWork(text.tokenizer, templates, ConstraintFactory(text.tokenizer, text.tokenizer.n_tokens))
        try:
            run(body, text=work)
        finally:
            work.close()

    return go


# ---- counts and places -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stop", "n_tokens"), [("c", 3), ("cd", 4), ("bcd", 4), ("ef", 6)])
def test_usage_counts_up_to_the_token_that_completes_a_stop_string(run, stop, n_tokens):
    async def body(server):
        server.engine.script = say(b"abcdefgh" * 4)
        answer = await server.complete(stop=stop, max_tokens=40)
        assert answer.json["usage"]["completion_tokens"] == n_tokens

    run(body)


def offsets_of(choices):
    return [at for choice in choices for at in (choice["logprobs"] or {"text_offset": []})["text_offset"]]


@pytest.mark.parametrize("members", [{}, {"echo": True}, {"stop": "cd"}, {"echo": True, "stop": ["x", "cd"]}])
def test_places_of_tokens_are_the_same_streamed_or_not(run, members):
    """A character of several tokens is at one place; nothing is counted for what a stop string takes."""

    async def body(server):
        server.engine.script = say("ab😀cde".encode())
        asked = {"prompt": "I 😀 ", "max_tokens": 40, "logprobs": 0, **members}
        whole = (await server.complete(**asked)).json["choices"]
        events = (await server.complete(**asked, stream=True)).events
        streamed = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
        assert offsets_of(streamed) == offsets_of(whole)
        text, logprobs = whole[0]["text"], whole[0]["logprobs"]
        assert "".join(choice["text"] for choice in streamed) == text
        for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert token == "�" or text[at] == token

    run(body)


def test_what_could_never_run_at_once_is_400_and_what_must_wait_429(run):
    async def body(server):
        server.engine.waiting = 1
        assert (await server.complete(n=2)).status == 429
        never = await server.complete(n=128)
        assert (never.status, never.error["type"]) == (400, "invalid_request_error")

    run(body, limits=Limits(max_queue=1))


@pytest.mark.parametrize(
    ("route", "members", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 65}, "prompt"),
        ("/v1/embeddings", {"input": "x" * 65}, "input"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 65}]}, "messages"),
        ("/v1/completions", {"prompt": "x" * 100_000}, "prompt"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_by_its_name_and_length(run, route, members, param):
    async def body(server):
        error = (await server.post(route, members)).error
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        said = "at least " if len(str(members)) > 1000 else ""
        assert f"needs {said}{error['n_prompt_tokens']} prompt tokens" in error["message"]

    run(body)


@pytest.mark.parametrize("wanted", [False, True])
def test_the_text_of_a_prompt_is_logged_only_where_that_was_asked_for(run, caplog, wanted):
    async def body(server):
        with caplog.at_level(logging.DEBUG):
            await server.complete(prompt="SECRET one")
            await server.chat("SECRET two")

    run(body, limits=Limits(log_prompts=wanted))
    told = [record.fields["text"] for record in caplog.records if record.getMessage() == "prompt"]
    assert [("SECRET one" in text, "SECRET two" in text) for text in told] == [(1, 0), (0, 1)] * wanted
    everything = str([(record.getMessage(), getattr(record, "fields", None)) for record in caplog.records])
    assert wanted or "SECRET" not in everything


# ---- templates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_template_that_makes_nothing_of_a_conversation_is_400(with_template, route):
    async def body(server):
        members = {"messages": USER, "input": "x", "max_tokens": 5}
        for stream in (False, True):
            answer = await server.post(route, {**members, "stream": stream})
            assert answer.status == 400
            assert b"empty prompt" in answer.body
        assert not server.engine.requests

    with_template("{{ '' }}", body)


def test_earlier_calls_are_words_for_a_template_that_does_not_know_them(with_template):
    async def body(server):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        messages = [
            *USER,
            {"role": "assistant", "content": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "r", "tool_call_id": "1"},
        ]
        answer = await server.post("/apply-template", {"messages": messages})
        assert answer.json["prompt"] == 'user:x assistant:hm\n{"name": "f", "arguments": {"a": 1}} tool:r '

    with_template("{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}", body)


# ---- Anthropic's names -------------------------------------------------------------------------------------


def message(server, **members):
    return server.post("/v1/messages", {"max_tokens": 40, "messages": USER, **members})


@pytest.mark.parametrize(
    ("members", "word"),
    [
        ({"messages": [{"role": "user", "content": []}], "tools": TOOLS}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages",
        ),
        ({"n": 2}, "n is only accepted"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "schema"),
        ({"output_config": {"format": 7}}, "output_config.format"),
        (
            {"output_format": {"type": "json_object"}, "response_format": {"type": "json_object"}},
            "output_config.format",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice"),
    ],
)
def test_what_a_message_cannot_be_is_400(run, members, word):
    async def body(server):
        answer = await message(server, **members)
        assert (answer.status, answer.json["type"]) == (400, "error")
        assert word in answer.error["message"]

    run(body)


@pytest.mark.parametrize("name", ["output_config", "output_format", "response_format"])
def test_a_messages_format_is_a_constraint(roomy, name):
    async def body(server):
        wanted = {"type": "json_schema", "schema": SCHEMA}
        if name == "response_format":
            wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        assert (
            await message(server, **{name: {"format": wanted} if name == "output_config" else wanted})
        ).json
        assert server.engine.requests[-1].constraint is not None

    roomy(body)


def test_one_call_a_turn_is_asked_for_inside_tool_choice(roomy):
    async def body(server):
        call = b'<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        choice = {"type": "any", "disable_parallel_tool_use": True}
        server.engine.script = say(call)
        assert (await message(server, tools=TOOLS, tool_choice=choice)).status == 200
        constraint = server.engine.requests[-1].constraint
        for token_id in call:
            constraint.accept(token_id)
        assert constraint.is_finished  # no second call may follow

    roomy(body)


@pytest.mark.parametrize("said", [b"", b"<think>hm</think>", b"hi"])
def test_a_streamed_message_begins_with_its_prompts_length_and_has_the_same_blocks(roomy, said):
    async def body(server):
        server.engine.script = say(said)
        whole = (await message(server)).json
        events = (await message(server, stream=True)).events
        usage = events[0]["message"]["usage"]
        assert usage["input_tokens"] == len(server.engine.requests[-1].prompt_ids)
        begun = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
        assert begun == [block["type"] for block in whole["content"]]

    roomy(body)


# ---- responses ---------------------------------------------------------------------------------------------


def respond(server, **members):
    return server.post("/v1/responses", {"input": "x", "max_output_tokens": 40, **members})


@pytest.mark.parametrize("members", [{"n": 2}, {"response_format": {"type": "json_object"}}])
def test_bounds_of_other_apis_are_refused_in_a_response(run, members):
    async def body(server):
        assert (await respond(server, **members)).status == 400

    run(body)


def outline(response):
    return response["status"], [
        (item["type"], item.get("status"), [p["text"] for p in item.get("content", [])])
        for item in response["output"]
    ]


@pytest.mark.parametrize("said", [b"", b"<think>hm</think>", b"hello", b"<think>hm</think>hello"])
@pytest.mark.parametrize("n_tokens", [3, 40])
def test_a_streamed_response_ends_as_the_whole_one(roomy, said, n_tokens):
    async def body(server):
        server.engine.script = say(said)
        asked = {
            "max_output_tokens": n_tokens,
            "instructions": "be kind",
            "text": {"format": {"type": "json_schema", "name": "c", "schema": SCHEMA}},
        }
        whole = (await respond(server, **asked)).json
        last = (await respond(server, **asked, stream=True)).events[-1]["response"]
        assert outline(last) == outline(whole)
        for response in (whole, last):
            assert (response["instructions"], response["text"]) == ("be kind", asked["text"])

    roomy(body)


# ---- HTTP --------------------------------------------------------------------------------------------------


def test_the_head_of_an_event_stream_has_no_body(run):
    async def body(server):
        ask = b"%s HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n%s\r\n"
        pipelined = ask % (b"HEAD /residency", b"") + ask % (b"GET /livez", b"Connection: close\r\n")
        head, _, rest = (await server.raw(pipelined)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert rest.startswith(b"HTTP/1.1 200")
        assert json.loads(rest.partition(b"\r\n\r\n")[2]) == {"status": "ok"}

    run(body)


def test_a_wrong_method_is_told_the_right_ones_and_a_model_that_is_not_there_so(run):
    async def body(server):
        wrong = await server.post("/livez", {})
        assert (wrong.status, set(wrong.headers["Allow"].split(","))) == (405, {"GET", "HEAD"})
        missing = await server.get("/v1/models/nope")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        broken = await server.raw(b"nonsense\r\n\r\n")
        assert b"Server: ggufd" in broken

    run(body)
