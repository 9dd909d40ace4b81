"""Probes, facts and what every answer has."""

import pytest

LOADING = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
INFERENCE = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/tokenize",
    "/completion",
]


def test_while_loading_the_daemon_lives_and_says_so(run):
    async def body(server):
        assert (await server.get("/livez")).json == {"status": "ok"}
        ready = await server.get("/readyz")
        assert (ready.status, ready.headers["Retry-After"]) == (503, "1")
        assert ready.json["fraction"] == 1.0
        for route in ("/health", "/v1/health"):
            health = await server.get(route)
            assert (health.status, health.body) == (503, LOADING)
        for route in INFERENCE:  # case 44
            answer = await server.post(route, {"prompt": "x"})
            assert (answer.status, answer.body, answer.headers["Retry-After"]) == (503, LOADING, "1")
        assert (await server.get("/v1/models")).status == 503
        assert (await server.get("/metrics")).status == 200
        message = await server.post("/v1/messages", {})
        assert message.json == {
            "type": "error",
            "error": {"type": "overloaded_error", "message": "Loading model"},
        }

    run(body, status="loading", backend=None)


def test_when_ready_the_probes_say_yes(run):
    async def body(server):
        assert (await server.get("/readyz")).status == 200
        health = await server.get("/health")
        assert (health.status, health.body) == (200, b'{"status":"ok"}')
        assert (await server.get("/residency")).json["layers"] == []
        assert (await server._ask("HEAD", "/livez")).status == 200

    run(body)


@pytest.mark.parametrize("status", ["draining", "failed"])
def test_a_daemon_that_goes_takes_nothing_new(run, status):
    async def body(server):
        assert (await server.get("/livez")).status == 200
        assert (await server.get("/readyz")).status == 503
        assert (await server.get("/health")).status == 503
        answer = await server.complete()
        assert answer.status == 503
        assert answer.headers["Retry-After"]
        assert answer.error["type"] == "unavailable_error"

    run(body, status=status)


def test_residency_streams_until_ready(run):
    async def body(server):
        request = server.session.get("http://x/residency", headers={"Accept": "text/event-stream"})
        async with request as response:
            await response.content.readuntil(b"\n\n")
            server.state.status = "ready"
            rest = await response.read()
        assert rest.startswith(b"data: {")

    run(body, status="loading")


def test_models_and_props(run):
    async def body(server):
        (entry,) = (await server.get("/v1/models")).json["data"]
        assert (entry["id"], entry["object"], entry["root"], entry["owned_by"]) == (
            "m",
            "model",
            "/m.gguf",
            "ggufd",
        )
        wanted = {"n_ctx", "n_ctx_train", "n_params", "n_vocab", "n_embd", "size", "ftype"}
        assert wanted <= set(entry["meta"])
        assert (await server.get("/v1/models/m")).json == entry
        assert (await server.get("/v1/models/other")).status == 404
        props = (await server.get("/props")).json
        assert props["default_generation_settings"]["n_ctx"] == 64
        assert props["eos_token"] == "<|im_end|>"
        assert "im_start" in props["chat_template"]

    run(body)


def test_metrics_have_interfaces_names(run):
    names = """residency_bytes residency_ratio load_seconds load_phase_seconds h2d_bytes_total requests_total
    request_queue sequences kv_pages prompt_tokens_total generated_tokens_total prompt_cache_tokens_total
    time_to_first_token_seconds inter_token_seconds step_seconds device_bytes pinned_bytes"""

    async def body(server):
        await server.complete(max_tokens=3)
        await server.get("/no/such/route")
        answer = await server.get("/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.body.decode()
        for name in names.split():
            assert f"# TYPE ggufd_{name.removesuffix('_total')}" in text
        assert 'ggufd_requests_total{code="200",route="/v1/completions"} 1.0' in text
        assert 'ggufd_requests_total{code="404",route="other"} 1.0' in text
        assert "ggufd_time_to_first_token_seconds_count 1.0" in text
        assert "_created" not in text

    run(body)


def test_unknown_routes_and_methods(run):
    async def body(server):
        missing = await server.get("/v1/nothing")
        assert (missing.status, missing.error["type"]) == (404, "not_found_error")
        wrong = await server.get("/v1/completions")
        assert wrong.status == 405
        assert wrong.error["message"]
        assert "aiohttp" not in str(wrong.headers)

    run(body)


def test_a_plain_request_id_is_kept_and_a_strange_one_replaced(run):
    async def body(server):
        kept = await server.get("/livez", headers={"X-Request-Id": "abc-1"})
        assert kept.headers["X-Request-Id"] == "abc-1"
        strange = await server.get("/livez", headers={"X-Request-Id": 'a" level=error'})
        assert strange.headers["X-Request-Id"].startswith("req-")

    run(body)


def test_an_internal_error_says_nothing_of_its_inside(run, caplog):
    async def body(server):
        server.engine.refusal = RuntimeError("secret at 0x7f00")
        answer = await server.complete()
        assert answer.status == 500
        assert answer.error["message"] == "internal error"
        assert b"secret" not in answer.body

    run(body)
    assert "secret at 0x7f00" in caplog.text
