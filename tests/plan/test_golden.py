"""The plan of whole models, as the registry describes them."""

from pathlib import Path

import pytest

from streamer.gguf.reader import read_directory
from streamer.models.registry import describe
from streamer.plan.layouts import LAYOUTS
from streamer.plan.make import make_plan
from streamer.plan.memory import CacheNeeds, PlanOptions
from streamer.plan.render import experts_of, render_plan

TINY = sorted((Path(__file__).parents[1] / "data").glob("tiny-*.gguf"))


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_every_tensor_of_a_golden_file_is_planned_once(path, kind):
    directory = read_directory(path)
    architecture = describe(directory)
    layout = architecture.cache_layout()
    cache = CacheNeeds(
        kv_nbytes_per_token=layout.kv_nbytes_per_token(2),
        state_nbytes_per_sequence=layout.state_nbytes_per_sequence,
        page_size=layout.page_size,
        training_context=architecture.n_ctx_train,
    )
    plan = make_plan(
        directory,
        architecture.specs(),
        layouts=LAYOUTS[kind],
        cache=cache,
        options=PlanOptions(max_sequences=2),
        free_bytes=1 << 30,
    )
    assert sorted(weight.name for weight in plan.weights) == sorted(directory.tensors)
    assert plan.nbytes == directory.nbytes
    assert plan.skipped == ()
    assert plan.n_layers == 4 if "gemma3" not in path.stem else plan.n_layers > 0
    assert plan.segments[0].name == "embedding"
    assert plan.segments[-1].name == "output"
    assert bool(experts_of(plan)) == ("moe" in path.stem)
    assert directory.architecture in render_plan(directory, plan)
