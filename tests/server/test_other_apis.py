"""Anthropic's messages, OpenAI's responses and embeddings, llama-server's own routes."""

import base64
import json
import struct

import pytest

END = 266
CALL = b'<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def say(text):
    return lambda request: [*text, END]


def kinds(answer):
    lines = answer.body.decode().splitlines()
    return [x[7:] for x in lines if x.startswith("event: ")]


# ---- Anthropic ---------------------------------------------------------------------------------------------


def message(server, **members):
    body = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}], **members}
    return server.post("/v1/messages", body)


def test_a_message(roomy):
    async def body(server):
        server.engine.script = say(b"hello")
        answer = await message(server, system="be kind", stop_sequences=["STOP"])
        assert answer.json["type"] == "message"
        assert answer.json["content"] == [{"type": "text", "text": "hello"}]
        assert answer.json["stop_reason"] == "end_turn"
        assert answer.json["usage"]["output_tokens"] == 6
        assert b"system\nbe kind" in bytes(i for i in server.engine.requests[0].prompt_ids if i < 256)
        server.engine.script = say(b"hello STOP")
        stopped = await message(server, stop_sequences=["STOP"])
        assert (stopped.json["stop_reason"], stopped.json["stop_sequence"]) == ("stop_sequence", "STOP")
        short = await message(server, max_tokens=2)
        assert short.json["stop_reason"] == "max_tokens"

    roomy(body)


def test_a_streamed_message_with_thought_text_and_call(roomy):
    async def body(server):
        server.engine.script = say(b"<think>hm</think>ok " + CALL)
        tools = [{"name": "weather", "description": "d", "input_schema": SCHEMA}]
        answer = await message(server, stream=True, tools=tools)
        named = kinds(answer)
        assert named[:2] == ["message_start", "ping"]
        assert named[-2:] == ["message_delta", "message_stop"]
        blocks = [e["content_block"]["type"] for e in answer.events if e["type"] == "content_block_start"]
        assert blocks == ["thinking", "text", "tool_use"]
        assert named.count("content_block_stop") == 3
        deltas = [e["delta"] for e in answer.events if e["type"] == "content_block_delta"]
        assert "".join(d.get("thinking", "") for d in deltas) == "hm"
        assert json.loads("".join(d.get("partial_json", "") for d in deltas)) == {"city": "Rome"}
        last = next(e for e in answer.events if e["type"] == "message_delta")
        assert last["delta"]["stop_reason"] == "tool_use"

    roomy(body)


def test_tool_use_and_results_go_into_the_prompt(roomy):
    async def body(server):
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "x", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}]},
        ]  # fmt: skip
        answer = await message(server, messages=messages)
        assert answer.status == 200, answer.body
        prompt = bytes(i for i in server.engine.requests[0].prompt_ids if i < 256)
        assert b"tool\nsunny" in prompt
        assert b'"city": "Rome"' in prompt

    roomy(body)


def test_counted_tokens_are_those_of_the_prompt(roomy):
    async def body(server):
        counted = await server.post(
            "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}
        )
        server.engine.script = say(b"x")
        answer = await message(server)
        assert counted.json == {"input_tokens": answer.json["usage"]["input_tokens"]}

    roomy(body)


@pytest.mark.parametrize(
    "members",
    [
        {"max_tokens": None},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "tool", "name": "x"}},
        {"temperature": 1.5},
        {"mcp_servers": []},
    ],
)
def test_bad_messages_are_400_in_anthropics_shape(run, members):
    async def body(server):
        answer = await message(server, **members)
        assert answer.status == 400
        assert answer.json["type"] == "error"
        assert answer.error["type"] == "invalid_request_error"

    run(body)


# ---- responses ---------------------------------------------------------------------------------------------


def test_a_response(roomy):
    async def body(server):
        server.engine.script = say(b"hello")
        answer = await server.post("/v1/responses", {"input": "Hi", "instructions": "be kind"})
        assert answer.json["status"] == "completed"
        (item,) = answer.json["output"]
        assert item["content"][0]["text"] == "hello"
        assert answer.json["usage"]["output_tokens"] == 6
        short = await server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 1})
        assert short.json["status"] == "incomplete"
        assert short.json["incomplete_details"] == {"reason": "max_output_tokens"}

    roomy(body)


def test_a_streamed_response_numbers_its_events(roomy):
    async def body(server):
        server.engine.script = say(b"<think>hm</think>ok " + CALL)
        tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
        answer = await server.post("/v1/responses", {"input": "Hi", "stream": True, "tools": tools})
        assert [e["sequence_number"] for e in answer.events] == list(range(len(answer.events)))
        assert [e["type"] for e in answer.events] == kinds(answer)
        final = answer.events[-1]["response"]
        assert [i["type"] for i in final["output"]] == ["reasoning", "message", "function_call"]
        assert json.loads(final["output"][2]["arguments"]) == {"city": "Rome"}
        done = [e["item"] for e in answer.events if e["type"] == "response.output_item.done"]
        assert done == final["output"]

    roomy(body)


def test_items_of_a_conversation_are_taken_and_stored_ones_refused(roomy):
    async def body(server):
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        ]
        answer = await server.post("/v1/responses", {"input": items})
        assert answer.status == 200, answer.body
        assert b"tool\nsunny" in bytes(i for i in server.engine.requests[0].prompt_ids if i < 256)
        for members in ({"previous_response_id": "r"}, {"background": True}, {"input": [{"type": "x"}]}):
            refused = await server.post("/v1/responses", {"input": "Hi", **members})
            assert refused.status == 400

    roomy(body)


# ---- embeddings --------------------------------------------------------------------------------------------


def test_embeddings_have_length_one_and_come_in_order(run):
    async def body(server):
        answer = await server.post("/v1/embeddings", {"input": ["ab", "c"], "pooling": "last"})
        assert [d["embedding"] for d in answer.json["data"]] == [[0.6, 0.8], [0.6, 0.8]]
        assert [d["index"] for d in answer.json["data"]] == [0, 1]
        assert answer.json["usage"]["prompt_tokens"] == 3
        assert [r.embed for r in server.engine.requests] == ["last", "last"]
        packed = await server.post("/v1/embeddings", {"input": "ab", "encoding_format": "base64"})
        raw = base64.b64decode(packed.json["data"][0]["embedding"])
        assert struct.unpack("<2f", raw) == pytest.approx((0.6, 0.8))

    run(body)


@pytest.mark.parametrize(
    "members",
    [
        {"input": None},
        {"input": ""},
        {"input": []},
        {"dimensions": 3},
        {"pooling": "max"},
        {"input": "x" * 65},
    ],
)
def test_bad_embeddings_are_400(run, members):
    async def body(server):
        assert (await server.post("/v1/embeddings", {"input": "a", **members})).status == 400

    run(body)


# ---- llama-server's own ------------------------------------------------------------------------------------


def test_tokenize_and_back(run):
    async def body(server):
        plain = await server.post("/tokenize", {"content": "hi<|im_end|>"})
        assert plain.json == {"tokens": [104, 105, END]}
        text = await server.post("/tokenize", {"content": "<|im_end|>", "parse_special": False})
        assert len(text.json["tokens"]) == 10
        pieces = await server.post("/tokenize", {"content": "é", "with_pieces": True})
        assert pieces.json == {"tokens": [{"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]}
        back = await server.post("/detokenize", {"tokens": [104, 105, END]})
        assert back.json == {"content": "hi<|im_end|>"}
        for route, bad in (
            ("/tokenize", {"content": 5}),
            ("/detokenize", {"tokens": [9999]}),
            ("/detokenize", {}),
        ):
            assert (await server.post(route, bad)).status == 400

    run(body)


def test_apply_template(run):
    async def body(server):
        answer = await server.post("/apply-template", {"messages": [{"role": "user", "content": "Hi"}]})
        assert answer.json == {"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"}

    run(body)


def test_native_completion(run):
    async def body(server):
        answer = await server.post("/completion", {"prompt": "Hi", "n_predict": 3, "n_probs": 1})
        assert answer.json["content"] == "hel"
        assert answer.json["stop_type"] == "limit"
        assert answer.json["tokens_predicted"] == 3
        assert len(answer.json["completion_probabilities"]) == 3
        streamed = await server.post(
            "/completion", {"prompt": "Hi", "stream": True, "stop": "l", "n_probs": 1}
        )
        assert "".join(e["content"] for e in streamed.events) == "he"
        assert sum(len(e["completion_probabilities"]) for e in streamed.events) == 2
        assert streamed.events[-1]["stopping_word"] == "l"
        assert not answer.json["truncated"]
        assert answer.json["generation_settings"]["n_predict"] == 3
        refused = await server.post("/completion", {"prompt": "Hi", "post_sampling_probs": True})
        assert refused.status == 400

    run(body)


def test_native_completion_of_several_and_mixed_prompts(run):
    async def body(server):
        several = {"prompt": ["a", [72, 105], [72, "i"]], "n_predict": 2, "return_tokens": True}
        answers = (await server.post("/completion", several)).json
        assert [x["index"] for x in answers] == [0, 1, 2]
        assert all(x["tokens"] == [*b"he"] for x in answers)
        assert [list(r.prompt_ids) for r in server.engine.requests] == [[97], [72, 105], [72, 105]]
        mixed = await server.post("/completion", {"prompt": ["H", 105, "j"], "n_predict": 1})
        assert mixed.json["content"] == "h"
        assert list(server.engine.requests[-1].prompt_ids) == [*b"Hij"]
        full = await server.post("/completion", {"prompt": [1] * 62, "n_predict": 9})
        assert full.json["truncated"]

    run(body)
