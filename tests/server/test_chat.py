"""POST /v1/chat/completions: messages in, content, thoughts and tool calls out."""

import json

import pytest

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = b'<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
END = 266


def say(text):
    return lambda request: [*text, END]


def test_an_answer_has_openais_shape(run):
    async def body(server):
        server.engine.script = say(b"hello")
        answer = await server.chat(temperature=0)
        assert answer.json["object"] == "chat.completion"
        (choice,) = answer.json["choices"]
        assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert answer.json["model"] == "m"
        assert answer.json["ggufd"]["weight_h2d_bytes"] == 0

    run(body)


def test_without_max_tokens_the_context_is_the_limit(run):
    async def body(server):
        server.engine.script = lambda request: [*b"x" * 100]
        answer = await server.chat()
        usage = answer.json["usage"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] == 65
        assert answer.json["choices"][0]["finish_reason"] == "length"

    run(body)


def test_a_stream_begins_with_the_role_and_says_the_same(run):
    async def body(server):
        server.engine.script = say("hé!".encode())
        answer = await server.chat(stream=True, stream_options={"include_usage": True})
        first, *middle, finish, usage, done = answer.events
        assert done == "[DONE]"
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(e["choices"][0]["delta"]["content"] for e in middle) == "hé!"
        assert finish["choices"][0]["finish_reason"] == "stop"
        assert finish["choices"][0]["delta"] == {}
        assert usage["usage"]["completion_tokens"] == 5
        assert all(e["object"] == "chat.completion.chunk" for e in answer.events[:-1])

    run(body)


def test_n_choices_stream_interleaved_each_with_its_end(run):
    async def body(server):
        server.engine.script = lambda request: [*(b"a" if request.id.endswith("0") else b"bb"), END]
        answer = await server.chat(n=2, stream=True)
        texts = {0: "", 1: ""}
        for event in answer.events[:-1]:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == {0: "a", 1: "bb"}
        assert sorted(
            e["choices"][0]["index"] for e in answer.events[:-1] if e["choices"][0]["finish_reason"]
        ) == [0, 1]

    run(body)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_come_with_ids(run, stream):
    async def body(server):
        server.engine.script = say(b"ok")
        answer = await server.chat(logprobs=True, top_logprobs=1, stream=stream)
        if stream:
            entries = [
                x
                for e in answer.events[:-1]
                if e["choices"][0]["logprobs"]
                for x in e["choices"][0]["logprobs"]["content"]
            ]
        else:
            entries = answer.json["choices"][0]["logprobs"]["content"]
        assert [e["token"] for e in entries] == ["o", "k"]
        assert entries[0]["id"] == ord("o")
        assert entries[0]["top_logprobs"][0]["id"] == ord("o")

    run(body)


def test_control_tokens_in_a_message_are_text(run):
    """Case 28."""

    async def body(server):
        await server.chat("<|im_end|>")
        ids = list(server.engine.requests[0].prompt_ids)
        assert ids.count(END) == 1  # the template's own
        assert bytes(i for i in ids if i < 256).count(b"<|im_end|>") == 1

    run(body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_parsed(run, stream):
    async def body(server):
        server.engine.script = say(CALL)
        answer = await server.chat(tools=[TOOL], stream=stream, max_tokens=200)
        assert answer.status == 400  # the tools alone are longer than the scripted model's context
        assert "n_ctx" in answer.error

    run(body)


def test_tool_calls_whole_and_streamed(roomy):
    async def body(server):
        server.engine.script = say(b"Let me see. " + CALL)
        answer = await server.chat(tools=[TOOL])
        (choice,) = answer.json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function"
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
        assert choice["message"]["content"] == "Let me see."
        streamed = await server.chat(tools=[TOOL], stream=True)
        deltas = [e["choices"][0]["delta"] for e in streamed.events[:-1]]
        (pieces,) = [d["tool_calls"] for d in deltas if "tool_calls" in d]
        assert pieces[0]["index"] == 0
        assert pieces[0]["function"]["name"] == "weather"
        assert streamed.events[-2]["choices"][0]["finish_reason"] == "tool_calls"

    roomy(body)


def test_tools_that_are_not_wanted_stay_out_of_prompt_and_answer(roomy):
    async def body(server):
        server.engine.script = say(CALL)
        answer = await server.chat(tools=[TOOL], tool_choice="none")
        assert answer.json["choices"][0]["message"]["content"].startswith("<tool_call>")
        assert b"weather" not in bytes(i for i in server.engine.requests[0].prompt_ids if i < 256)

    roomy(body)


def test_a_demanded_call_is_constrained(roomy):
    async def body(server):
        server.engine.script = say(CALL)
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = await server.chat(tools=[TOOL], tool_choice=choice)
            assert answer.status == 200, answer.body
        assert all(r.constraint is not None for r in server.engine.requests)

    roomy(body)


@pytest.mark.parametrize(
    "wanted",
    [
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object"}},
            }
        },
        {"json_schema": {"type": "object"}},
        {"grammar": 'root ::= "yes" | "no"'},
    ],
)
def test_formats_become_constraints_one_a_choice(run, wanted):
    async def body(server):
        answer = await server.chat(n=2, **wanted)
        assert answer.status == 200, answer.body
        first, second = (r.constraint for r in server.engine.requests)
        assert first is not None
        assert first is not second

    run(body)


def test_thoughts_are_told_apart(roomy):
    async def body(server):
        server.engine.script = say(b"<think>hm, yes</think>\n\nYes.")
        answer = await server.chat()
        message = answer.json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm, yes", "Yes.")
        assert answer.json["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        server.engine.script = say(b"hm</think>Yes.")
        opened = await server.chat(stream=True, chat_template_kwargs={"think": True})
        deltas = [e["choices"][0]["delta"] for e in opened.events[:-1]]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm"
        assert "".join(d.get("content") or "" for d in deltas) == "Yes."

    roomy(body)


def test_a_constrained_answer_may_be_thought_about_first(roomy):
    """The thought is free and told apart; what is said is constrained."""

    def allows(constraint, text):
        for i in text:
            if not constraint.mask()[i // 8] >> i % 8 & 1:
                return False
            constraint.accept(i)
        return True

    async def body(server):
        server.engine.script = say(b'hm</think>\n\n{"a": 1}')
        wanted = {"response_format": {"type": "json_object"}}
        answer = await server.chat(**wanted, chat_template_kwargs={"think": True})
        message = answer.json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", '{"a": 1}')
        assert allows(server.engine.requests[-1].constraint, b'hm</think>\n\n{"a": 1}')
        await server.chat(**wanted)
        assert allows(server.engine.requests[-1].constraint, b'<think>hm</think>\n{"a": 1}')
        await server.chat(**wanted)
        assert not allows(server.engine.requests[-1].constraint, b"hm")
        server.engine.script = say(b"yes")  # a grammar of the client's own is of the whole answer
        answer = await server.chat(grammar='root ::= "yes"', chat_template_kwargs={"think": True})
        assert answer.json["choices"][0]["message"]["content"] == "yes"
        assert not allows(server.engine.requests[-1].constraint, b"hm")

    roomy(body)


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "sound"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "response_format"),
    ],
)
def test_wrong_members_are_400(run, members, param):
    async def body(server):
        answer = await server.chat(**members)
        assert answer.status == 400, answer.body
        assert answer.error["param"] == param

    run(body)


def test_parts_and_developer_messages_are_taken(roomy):
    async def body(server):
        function = {"name": "weather", "arguments": '{"city": "Rome"}'}
        messages = [
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function}]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ]  # fmt: skip
        answer = await server.post("/v1/chat/completions", {"messages": messages})
        assert answer.status == 200, answer.body
        prompt = bytes(i for i in server.engine.requests[0].prompt_ids if i < 256)
        assert b"system\nbe kind" in prompt
        assert b"user\nab" in prompt
        assert b'"city": "Rome"' in prompt

    roomy(body)
