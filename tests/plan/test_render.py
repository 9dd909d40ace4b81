"""What `inspect` shows, for people and for machines."""

import json
from dataclasses import replace

import pytest

from streamer.gguf.quants import QuantType
from streamer.plan.plan import Role
from streamer.plan.render import experts_of, plan_as_data, render_plan


@pytest.fixture
def experts(models):
    model = models.Model(n_layers=2, keys={"toy.expert_used_count": 2})
    for layer in range(2):
        model.add(f"blk.{layer}.ffn_gate_inp.weight", Role.EXPERTS, layer, (64, 8))
        model.add(f"blk.{layer}.ffn_up_exps.weight", Role.EXPERTS, layer, (64, 32, 8), QuantType.Q8_0)
        model.add(f"blk.{layer}.ffn_down_exps.weight", Role.EXPERTS, layer, (32, 64, 8), QuantType.Q4_0)
    return model


def test_the_data_is_json_and_complete(models):
    model = models.toy(3)
    plan = model.plan(free_bytes=10**9)
    data = json.loads(json.dumps(plan_as_data(model.directory, plan)))
    weights = [weight for segment in data["segments"] for weight in segment["weights"]]
    assert [weight["order"] for weight in weights] == list(range(data["n_tensors"]))
    assert sum(weight["nbytes"] for weight in weights) == data["nbytes"]
    assert sum(row["nbytes"] for row in data["types"].values()) == data["nbytes"]
    assert sum(data["memory"].values()) == 2 * data["memory"]["total"]
    assert data["fits"] is True
    assert data["kv_nbytes_per_sequence"] == 4096 * 1024


def test_alike_layers_are_one_line(models):
    model = models.toy(40)
    text = render_plan(model.directory, model.plan())
    assert "layers 0-39, each" in text
    assert len(text.splitlines()) < 25
    assert "Q8_0 x2, F32 x1" in text


def test_a_layer_that_differs_has_its_own_line(models):
    model = models.toy(5)
    tensor = model.tensors["blk.2.attn_q.weight"]
    model.tensors[tensor.name] = replace(tensor, type=QuantType.F16, nbytes=2 * 64 * 64)
    lines = render_plan(model.directory, model.plan()).splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("layer")] == [
        "layers 0-1, each",
        "layer 2",
        "layers 3-4, each",
    ]


def test_experts_are_counted_by_expert(experts):
    plan = experts.plan()
    assert [(e.layer, e.n_experts, e.nbytes_each) for e in experts_of(plan)] == [
        (0, 8, 64 * 34 + 64 * 18),
        (1, 8, 64 * 34 + 64 * 18),
    ]
    assert "experts: 2 layers with 8 experts of 3.33 kB, 2 used a token" in render_plan(
        experts.directory, plan
    )


def test_what_is_left_out_and_what_fits_is_said(models):
    model = models.toy()
    for i in range(6):
        model.add(f"mm.{i}.weight", Role.TABLE, None, (8,), asked=False)
    text = render_plan(model.directory, model.plan(free_bytes=10**9))
    assert "left out: 6 tensors (mm.0.weight" in text
    assert text.splitlines()[-3] == "fits in 1.00 GB"
    assert "fits" not in render_plan(model.directory, model.plan())
