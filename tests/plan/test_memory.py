"""The sum: what is counted, what does not fit, how it is said."""

import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamer.config import load_config
from streamer.errors import ConfigError, PlanError
from streamer.gguf.quants import QuantType
from streamer.plan.layouts import cuda_layout
from streamer.plan.memory import CacheNeeds, readable_nbytes


@pytest.mark.parametrize(
    ("asked", "trained", "expected"),
    [(None, 4096, 4096), (None, 40960, 8192), (512, 4096, 512), (9999, 4096, 4096)],
)
def test_the_context_is_what_was_asked_and_trained(models, asked, trained, expected):
    cache = replace(models.NEEDS, training_context=trained)
    assert models.toy().plan(cache=cache, n_ctx=asked).n_ctx == expected


def test_pages_are_for_every_sequence_at_full_context(models):
    plan = models.toy().plan(n_ctx=100, max_sequences=3)
    assert plan.n_pages == 3 * 4
    assert plan.memory.kv_cache == plan.n_pages * 32 * 1024


def test_pages_end_where_memory_ends(models):
    page_nbytes = 32 * 1024
    weights = models.toy().plan().memory.weights
    plan = models.toy().plan(n_ctx=64, max_sequences=8, free_bytes=weights + 5 * page_nbytes + 1)
    assert plan.n_pages == 5
    assert plan.fits
    plan = models.toy().plan(n_ctx=64, max_sequences=8, free_bytes=weights + 2 * page_nbytes)
    assert plan.n_pages == 2
    with pytest.raises(PlanError, match="one context of 64 tokens"):
        models.toy().plan(n_ctx=64, max_sequences=8, free_bytes=weights + 2 * page_nbytes - 1)


def test_recurrent_state_is_counted_by_sequence_and_snapshot(models):
    cache = replace(models.NEEDS, state_nbytes_per_sequence=1000)
    plan = models.toy().plan(cache=cache, max_sequences=5, state_snapshots=3)
    assert plan.memory.recurrent_state == 8000
    assert models.toy().plan(max_sequences=5, state_snapshots=3).memory.recurrent_state == 0


def test_a_model_without_kv_needs_no_pages_to_fit(models):
    cache = CacheNeeds(0, 1000, 32, 4096)
    free = models.toy().plan(cache=cache, max_sequences=1).memory.total
    assert models.toy().plan(cache=cache, max_sequences=1, free_bytes=free).fits
    with pytest.raises(PlanError):
        models.toy().plan(cache=cache, max_sequences=1, free_bytes=free - 1)


def test_the_refusal_spells_out_the_sum(models):
    cache = replace(models.NEEDS, state_nbytes_per_sequence=2_000_000)
    with pytest.raises(PlanError) as caught:
        models.toy().plan(
            cache=cache,
            max_sequences=2,
            workspace_nbytes=3_000_000,
            reserve_nbytes=1_000_000,
            free_bytes=5_000_000,
        )
    message = str(caught.value)
    assert caught.value.exit_code == 78
    for part in (
        "toy.gguf",
        "weights 28.2 kB",
        "KV cache 4.19 MB",
        "recurrent state 4.00 MB",
        "workspace 3.00 MB",
    ):
        assert part in message
    assert "reserve 1.00 MB" in message
    assert "= 12.2 MB, free 5.00 MB, lacking 7.2" in message
    assert len(message.splitlines()) == 1


def test_the_refusal_names_a_context_that_fits(models):
    free = models.toy().plan().memory.weights + 10 * 32 * 1024
    with pytest.raises(PlanError, match="--ctx 320 would fit"):
        models.toy().plan(max_sequences=1, free_bytes=free)
    assert models.toy().plan(max_sequences=1, n_ctx=320, free_bytes=free).fits


def test_the_context_that_is_named_is_one_the_option_takes(models):
    """The largest context that can be asked for, of a file that claims to be trained for far more."""
    needs = CacheNeeds(1, 0, page_size=32, training_context=1 << 40)
    with pytest.raises(PlanError) as caught:
        models.toy().plan(cache=needs, n_ctx=1 << 24, max_sequences=1, free_bytes=(1 << 24) - 1)
    named = re.search(r"--ctx (\d+) would fit", str(caught.value))[1]
    assert load_config({"ctx": named}, {}).ctx == int(named)


def test_layouts_that_are_no_file_bytes_need_a_landing_area(models):
    plan = models.toy().plan(layouts=cuda_layout)
    assert plan.memory.workspace == 100 * 68
    assert models.toy().plan(layouts=cuda_layout, landing_nbytes=5).memory.workspace == 5
    assert models.toy(type=QuantType.F16).plan(layouts=cuda_layout).memory.workspace == 0


@pytest.mark.parametrize("options", [{"n_ctx": 0}, {"n_ctx": -5}, {"max_sequences": 0}])
def test_options_that_cannot_work_are_refused(models, options):
    with pytest.raises(ConfigError):
        models.toy().plan(**options)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    free=st.integers(0, 40_000_000),
    kv=st.integers(0, 5000),
    state=st.integers(0, 100_000),
    n_ctx=st.integers(1, 5000),
    max_sequences=st.integers(1, 64),
    workspace=st.integers(0, 1_000_000),
)
def test_a_plan_that_is_returned_fits_and_holds_one_context(
    models, free, kv, state, n_ctx, max_sequences, workspace
):
    cache = CacheNeeds(kv, state, 32, 4096)
    options = {"n_ctx": n_ctx, "max_sequences": max_sequences, "workspace_nbytes": workspace}
    whole = models.toy().plan(cache=cache, **options)
    pages_per_sequence = -(-whole.n_ctx // 32)
    assert whole.n_pages == pages_per_sequence * max_sequences
    least = whole.memory.total - (whole.n_pages - pages_per_sequence) * 32 * kv
    try:
        plan = models.toy().plan(cache=cache, free_bytes=free, **options)
    except PlanError:
        assert least > free
        return
    assert plan.fits
    assert least <= free
    assert pages_per_sequence <= plan.n_pages <= whole.n_pages
    assert plan.memory.total == sum(
        (plan.memory.weights, plan.n_pages * 32 * kv, max_sequences * state, plan.memory.workspace)
    )


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (37_754_075_136, "37.8 GB"), (123_456_789, "123 MB")],
)
def test_sizes_are_readable(nbytes, text):
    assert readable_nbytes(nbytes) == text
