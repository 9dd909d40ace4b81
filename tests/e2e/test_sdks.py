"""The official SDKs, unchanged, over the Unix socket; and curl."""

import asyncio
import json
import shutil
import subprocess

import anthropic
import httpx
import httpx2
import openai
import pytest

PARIS = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture
def client(smollm2):
    transport = httpx2.HTTPTransport(uds=smollm2.path)
    http = openai.DefaultHttpxClient(transport=transport)
    with openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http) as client:
        yield client


@pytest.fixture(scope="session")
def model(smollm2):
    return smollm2.get("/v1/models").json["data"][0]["id"]


def test_openai_chat(client, model):
    answer = client.chat.completions.create(model=model, messages=PARIS, **GREEDY)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens > 10
    assert answer.model_extra["ggufd"]["weight_h2d_bytes"] == 0


def test_openai_chat_streamed_says_the_same(client, model):
    whole = client.chat.completions.create(model=model, messages=PARIS, **GREEDY)
    stream = client.chat.completions.create(
        model=model, messages=PARIS, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_completions_with_logprobs(client, model):
    answer = client.completions.create(model=model, prompt="The sky is", logprobs=3, echo=True, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs[0] is None
    assert all(x <= 0 for x in logprobs.token_logprobs[1:])


def test_openai_lists_models_and_embeds(client, model):
    assert [m.id for m in client.models.list()] == [model]
    answer = client.embeddings.create(model=model, input=["a cat", "a dog"], encoding_format="float")
    assert sum(x * x for x in answer.data[0].embedding) == pytest.approx(1.0, abs=1e-4)
    assert answer.data[0].embedding != answer.data[1].embedding
    packed = client.embeddings.create(model=model, input="a cat")  # base64 is the SDK's own default
    assert packed.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-5)


def test_openai_structured_output(client, model):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    }
    answer = client.chat.completions.create(
        model=model, messages=PARIS, temperature=0, max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema}},
    )  # fmt: skip
    assert set(json.loads(answer.choices[0].message.content)) >= {"city"}


def test_openai_demanded_tool_call(client, model):
    parameters = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
                  "required": ["city"], "additionalProperties": False}  # fmt: skip
    tool = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": parameters}}
    answer = client.chat.completions.create(
        model=model, messages=PARIS, tools=[tool], tool_choice="required", temperature=0, max_tokens=60
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")
    assert answer.choices[0].finish_reason == "tool_calls"


def test_openai_responses(client, model):
    answer = client.responses.create(model=model, input="Say hello.", temperature=0, max_output_tokens=80)
    assert answer.output_text
    with client.responses.stream(
        model=model, input="Say hello.", temperature=0, max_output_tokens=80
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert final.output_text == answer.output_text


def test_openai_errors_have_their_classes(client, model):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=PARIS, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="word " * 5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_openai_async_many_at_once(smollm2, model):
    async def main():
        transport = httpx2.AsyncHTTPTransport(uds=smollm2.path)
        http = openai.DefaultAsyncHttpxClient(transport=transport)
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="x", http_client=http
        ) as client:

            def ask():
                return client.chat.completions.create(model=model, messages=PARIS, **GREEDY)

            answers = await asyncio.gather(*(ask() for _ in range(4)))
            stream = await client.chat.completions.create(model=model, messages=PARIS, stream=True, **GREEDY)
            text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        assert {a.choices[0].message.content for a in answers} == {text}

    asyncio.run(main())


def test_anthropic(smollm2, model):
    http = anthropic.DefaultHttpxClient(transport=httpx2.HTTPTransport(uds=smollm2.path))
    with anthropic.Anthropic(base_url="http://localhost", api_key="none", http_client=http) as client:
        asked = {"model": model, "messages": PARIS, "max_tokens": 12, "extra_body": {"temperature": 0}}
        message = client.messages.create(**asked)
        assert "Paris" in message.content[0].text
        assert message.stop_reason in ("end_turn", "max_tokens")
        with client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
        assert text == message.content[0].text
        counted = client.messages.count_tokens(model=model, messages=PARIS)
        assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_httpx(smollm2):
    with httpx.Client(transport=httpx.HTTPTransport(uds=smollm2.path), base_url="http://x") as client:
        assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(smollm2):
    command = ["curl", "-sN", "--unix-socket", smollm2.path, "http://localhost/v1/chat/completions"]
    body = json.dumps({"messages": PARIS, "stream": True, **GREEDY})
    answer = subprocess.run([*command, "-d", body], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.rstrip().endswith("data: [DONE]")
