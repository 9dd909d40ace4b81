"""Directories and specs made of values, no file needed: the plan is pure."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from streamer.gguf.directory import Directory, Shard, TensorInfo
from streamer.gguf.metadata import Metadata
from streamer.gguf.quants import QuantType, nbytes_of
from streamer.plan.layouts import host_layout
from streamer.plan.make import make_plan
from streamer.plan.memory import CacheNeeds, PlanOptions
from streamer.plan.plan import Role, WeightSpec

NEEDS = CacheNeeds(kv_nbytes_per_token=1024, state_nbytes_per_sequence=0, page_size=32, training_context=4096)


@dataclass
class Model:
    """Specs in execution order with their tensors; what the file has may differ from what is asked."""

    n_layers: int = 2
    specs: list[WeightSpec] = field(default_factory=list)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    keys: dict[str, object] = field(default_factory=dict)
    offset: int = 4096

    def add(self, name, role, layer, shape, type=QuantType.F32, *, optional=False, in_file=True, asked=True):
        if asked:
            self.specs.append(WeightSpec(name, role, layer, shape, optional))
        if in_file:
            nbytes = nbytes_of(type, shape)
            self.tensors[name] = TensorInfo(name, shape, type, nbytes, 0, self.offset)
            self.offset += -(-nbytes // 32) * 32

    @property
    def directory(self) -> Directory:
        keys = {"general.architecture": "toy", "toy.block_count": self.n_layers} | self.keys
        shard = Shard("toy.gguf", self.offset, 0, 1)
        return Directory("toy.gguf", 3, 32, Metadata("toy.gguf", keys), self.tensors, (shard,))

    def plan(self, *, layouts=host_layout, cache=NEEDS, free_bytes=None, **options):
        return make_plan(
            self.directory,
            self.specs,
            layouts=layouts,
            cache=cache,
            options=PlanOptions(**options),
            free_bytes=free_bytes,
        )


def toy(n_layers=2, type=QuantType.Q8_0, tied=False) -> Model:
    model = Model(n_layers)
    model.add("token_embd.weight", Role.EMBEDDING, None, (64, 100), type)
    model.add("rope_freqs.weight", Role.TABLE, None, (8,))
    for layer in range(n_layers):
        model.add(f"blk.{layer}.attn_norm.weight", Role.NORM, layer, (64,))
        model.add(f"blk.{layer}.attn_q.weight", Role.ATTENTION, layer, (64, 64), type)
        model.add(f"blk.{layer}.attn_q.bias", Role.ATTENTION, layer, (64,), optional=True, in_file=False)
        model.add(f"blk.{layer}.ffn_up.weight", Role.FEED_FORWARD, layer, (64, 33), type)
    model.add("output_norm.weight", Role.NORM, None, (64,))
    if tied:
        model.specs.append(WeightSpec("token_embd.weight", Role.OUTPUT, None, (64, 100)))
    else:
        model.add("output.weight", Role.OUTPUT, None, (64, 100), type)
    return model


@pytest.fixture
def models() -> SimpleNamespace:
    return SimpleNamespace(toy=toy, Model=Model, NEEDS=NEEDS)
