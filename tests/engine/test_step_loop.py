"""The step loop over a fake device: what each request gets, in every phase of its life."""

import pytest

from streamer.engine.request import (
    FinishReason,
)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mixing", ["mixed", "alternate"])
def test_a_single_request_gets_what_the_model_says(harness, request_of, alone, overlap, mixing):
    h = harness(overlap=overlap, mixing=mixing)
    request = request_of("a", 50, 20)
    owner = h.submit(request)
    h.run()
    assert owner.ids == alone(request, 20)
    assert owner.finish.reason is FinishReason.LENGTH
    assert (owner.finish.n_prompt, owner.finish.n_generated) == (50, 20)
    h.loop.check_integrity()


@pytest.mark.parametrize("overlap", [False, True])
def test_many_requests_get_what_each_would_get_alone(harness, request_of, alone, overlap):
    h = harness(overlap=overlap, n_pages=256)
    requests = [request_of(f"r{i}", 1 + 7 * i, 5 + 3 * i, temperature=i % 2, seed=i) for i in range(12)]
    owners = [h.submit(r) for r in requests]
    h.run()
    for request, owner in zip(requests, owners, strict=True):
        assert owner.ids == alone(request, request.max_tokens)
    h.loop.check_integrity()
