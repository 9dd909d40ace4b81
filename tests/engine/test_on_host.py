"""The engine over the real host executor and tiny models: greedy ids never depend on the schedule."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from streamer.cache.pages import PagePool
from streamer.cache.snapshots import SnapshotTable
from streamer.cache.storage import allocate_cache
from streamer.device.host import HostDevice
from streamer.engine.request import EmbeddingEvent, PromptEvent, SamplingParameters, TokenEvent
from streamer.engine.steps import EngineOptions, StepLoop
from streamer.gguf.reader import read_directory
from streamer.kernels.host_executor import HostExecutor
from streamer.kernels.host_weights import HostWeights
from streamer.models.registry import describe

DATA = Path(__file__).parents[1] / "data"
N_SNAPSHOTS = 3


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen35"])
def model(request):
    """(golden record, architecture, bound model, device): loaded once, without the pipeline."""
    directory = read_directory(str(DATA / f"tiny-{request.param}.gguf"))
    golden = json.loads((DATA / f"tiny-{request.param}.json").read_text())
    architecture, device = describe(directory), HostDevice()
    infos = [directory.tensors[spec.name] for spec in architecture.specs()]
    weights = HostWeights(device, infos)
    for info in infos:
        file = np.memmap(directory.shards[info.shard].path, np.uint8, "r")
        weights.prepare(info.name, file[info.offset : info.offset + info.nbytes])
    yield golden, architecture, architecture.bind(weights.weights), device
    weights.close()
    device.close()


@pytest.fixture
def serve(model, harness):
    """Run requests through a fresh engine; returns their owners."""
    _, architecture, bound, device = model
    layout = dataclasses.replace(architecture.cache_layout(), page_size=8)

    def run(requests, *, n_pages=64, turns_between=0, **changes):
        options = EngineOptions(
            max_sequences=4, n_ctx=200, max_rows=24, max_logit_rows=8, overlap=False, min_prefill_rows=4
        )
        options = dataclasses.replace(options, **changes)
        cache = allocate_cache(device, layout, n_pages, options.max_sequences + N_SNAPSHOTS)
        executor = HostExecutor(bound, cache, n_valid=architecture.n_valid_ids, threads=1)
        h = harness(options=options)
        slots = range(options.max_sequences, options.max_sequences + N_SNAPSHOTS)
        h.loop = StepLoop(
            executor,
            PagePool(n_pages, layout.page_size),
            options,
            snapshots=SnapshotTable(slots) if layout.recurrent else None,
            clock=h.clock,
            weight_h2d_bytes=lambda: 0,
        )
        for request in requests:
            h.submit(request)
            for _ in range(turns_between):
                h.turn()
        h.run()
        h.loop.check_integrity()
        executor.close()
        cache.close()
        return h

    return run


def prompts_of(golden, n):
    """Prompts of different lengths made of the golden ones, the later ones with a long common prefix."""
    longest = max((p["ids"] for p in golden["prompts"]), key=len)
    return [(longest * 3)[: 5 + 9 * i] for i in range(n)]


def test_the_first_id_is_the_golden_one(model, serve, request_of):
    golden = model[0]
    requests = [request_of(f"g{i}", p["ids"], 1) for i, p in enumerate(golden["prompts"])]
    h = serve(requests, max_sequences=4)
    for owner, prompt in zip(h.owners, golden["prompts"], strict=True):
        assert owner.ids == [prompt["top"][0][0]]


@pytest.mark.parametrize("changes", [{}, {"overlap": True, "max_rows": 7}, {"mixing": "alternate"}])
def test_batching_preemption_and_prefix_reuse_change_no_greedy_id(model, serve, request_of, changes):
    requests = [request_of(f"r{i}", ids, 30) for i, ids in enumerate(prompts_of(model[0], 6))]
    expected = [serve([r], max_rows=200).owners[0].ids for r in requests]
    h = serve(requests, n_pages=11, turns_between=1, **changes)
    assert h.loop.scheduler.n_preemptions > 0
    assert [owner.ids for owner in h.owners] == expected


def test_a_cached_prefix_gives_the_cold_answer(model, serve, request_of):
    ids = prompts_of(model[0], 6)[-1]
    first = request_of("first", ids, 8)
    second = request_of("second", [*ids, 5, 6], 8)
    cold = serve([second]).owners[0].ids
    h = serve([first, second], turns_between=20)
    assert h.owners[1].finish.cached_prompt_tokens > 0
    assert h.owners[1].ids == cold


def test_logprobs_do_not_depend_on_company(model, serve, request_of):
    """The band is float32 rounding: other row counts multiply in another order."""
    sampling = SamplingParameters(temperature=0, n_logprobs=3)
    request = request_of("a", prompts_of(model[0], 3)[-1], 6, sampling=sampling, prompt_logprobs=True)
    company = [request_of(f"c{i}", ids, 9) for i, ids in enumerate(prompts_of(model[0], 3))]
    alone, crowd = serve([request], max_rows=200, max_logit_rows=200), serve([*company, request])

    def values(owner):
        (prompt,) = [e for e in owner.events if isinstance(e, PromptEvent)]
        entries = [*prompt.logprobs[1:], *(e.logprobs for e in owner.events if isinstance(e, TokenEvent))]
        return [(entry.logprob, *(value for _, value in entry.top)) for entry in entries]

    np.testing.assert_allclose(values(alone.owners[0]), values(crowd.owners[-1]), atol=2e-4)


def test_embeddings_do_not_depend_on_chunks(model, serve, request_of):
    ids = prompts_of(model[0], 5)[-1]
    for how in ("mean", "last"):
        request = request_of("e", ids, 0, embed=how)
        vectors = []
        for changes in ({"max_rows": 200, "max_logit_rows": 200}, {"max_rows": 9}):
            (event,) = [
                e for e in serve([request], **changes).owners[0].events if isinstance(e, EmbeddingEvent)
            ]
            vectors.append(event.values)
        np.testing.assert_allclose(*vectors, atol=1e-4)
