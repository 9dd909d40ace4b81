"""Whole models from a file without the pipeline: tensors' bytes are read and prepared one by one."""

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamer.cache.storage import PagedCache, allocate_cache
from streamer.device.host import HostDevice
from streamer.gguf.quants import dequantize
from streamer.gguf.reader import read_directory
from streamer.kernels.host_executor import HostExecutor
from streamer.kernels.host_weights import HostWeights
from streamer.kernels.ops import Batch, SamplingBatch, Span, StepResult
from streamer.models.registry import Architecture, describe

DATA = Path(__file__).parents[1] / "data"


def sampling_of(n: int, *, slots: Sequence[int] | None = None, n_top: int = 0) -> SamplingBatch:
    """Greedy."""
    empty = np.zeros(0, np.int32)
    return SamplingBatch(
        temperature=np.zeros(n, np.float32),
        top_k=np.zeros(n, np.int32),
        top_p=np.ones(n, np.float32),
        min_p=np.zeros(n, np.float32),
        uniform=np.zeros(n, np.float32),
        slots=np.array(slots if slots is not None else [-1] * n, np.int32),
        target_ids=np.full(n, -1, np.int32),
        adjust_rows=empty,
        adjust_ids=empty,
        adjust_divide=empty.astype(np.float32),
        adjust_add=empty.astype(np.float32),
        n_top=n_top,
    )


@dataclass
class Rows:
    """Some rows of one sequence to compute."""

    slot: int
    ids: Sequence[int]
    position: int = 0
    logits: bool | str = True  # True: all rows, "last": the last one only, False: none


class Runner:
    """A model on the host device with a small cache; `pages[slot]` are that sequence's pages."""

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int = 128,
        n_slots: int = 4,
        scatter: bool = False,
        change: Callable[[Any], Any] = lambda model: model,
        poison: int | None = None,
    ) -> None:
        directory = read_directory(str(path))
        self.architecture: Architecture = describe(directory)
        self.device = HostDevice(poison=poison)
        self.directory = directory
        infos = [directory.tensors[spec.name] for spec in self.architecture.specs()]
        self.weights = HostWeights(self.device, infos)
        for info in infos:
            file = np.memmap(directory.shards[info.shard].path, np.uint8, "r")
            self.weights.prepare(info.name, file[info.offset : info.offset + info.nbytes])
        layout = self.architecture.cache_layout()
        per = -(-n_ctx // layout.page_size)
        self.cache: PagedCache = allocate_cache(self.device, layout, per * n_slots, n_slots, "f32")
        order = np.arange(per * n_slots, dtype=np.int32)
        if scatter:
            order = np.random.default_rng(5).permutation(order)
        self.pages = order.reshape(n_slots, per)
        model = change(self.architecture.bind(self.weights.weights))
        self.executor = HostExecutor(_Recorder(model), self.cache, n_valid=self.architecture.n_valid_ids)

    def step(self, *parts: Rows, sampling: SamplingBatch | None = None) -> tuple[np.ndarray, StepResult]:
        """Raw logits (n_logit_rows, n_vocab) and the sampled result."""
        spans, ids, positions, wanted, slots = [], [], [], [], []
        for part in parts:
            offset, n = len(ids), len(part.ids)
            spans.append(Span(part.slot, offset, n, part.position, self.pages[part.slot]))
            ids += list(part.ids)
            positions += range(part.position, part.position + n)
            rows = (
                range(offset, offset + n)
                if part.logits is True
                else ([offset + n - 1] if part.logits else [])
            )
            wanted += rows
            slots += [-1] * (len(rows) - 1) + [part.slot] if rows else []
        batch = Batch(
            np.array(ids, np.int32), np.array(positions, np.int32), tuple(spans), np.array(wanted, np.int32)
        )
        result = self.executor.step(batch, sampling or sampling_of(len(wanted), slots=slots)).result()
        return self.executor._model.last, result  # type: ignore[attr-defined]

    def hidden(self, ids: Sequence[int]) -> np.ndarray:
        """(n, n_embd) normed hidden states of a whole prompt."""
        n = len(ids)
        everything = np.arange(n, dtype=np.int32)
        span = Span(0, 0, n, 0, self.pages[0])
        batch = Batch(np.array(ids, np.int32), everything, (span,), everything, want_hidden=True)
        hidden = self.executor.step(batch, sampling_of(n)).result().hidden
        assert hidden is not None
        return hidden

    def file_values(self, name: str) -> np.ndarray:
        info = self.directory.tensors[name]
        file = np.memmap(self.directory.shards[info.shard].path, np.uint8, "r")
        return dequantize(info.type, file[info.offset : info.offset + info.nbytes], info.shape)

    def logits(self, ids: Sequence[int], *, slot: int = 0, chunk: int | None = None) -> np.ndarray:
        """(n, n_vocab) logits of a whole prompt from a fresh state, in chunks."""
        self.executor.reset_state(slot)
        chunk = chunk or len(ids)
        parts = [self.step(Rows(slot, ids[i : i + chunk], i))[0].copy() for i in range(0, len(ids), chunk)]
        return np.concatenate(parts)

    def close(self) -> None:
        self.executor.close()
        self.cache.close()
        self.weights.close()
        self.device.close()


class _Recorder:
    """A model that remembers its last logits."""

    def __init__(self, model: Any) -> None:
        self._inner, self.n_vocab = model, model.n_vocab
        self.last: np.ndarray

    def forward(self, ops: Any) -> np.ndarray:
        self.last = self._inner.forward(ops)
        return self.last


@pytest.fixture
def open_model() -> Iterator[Callable[..., Runner]]:
    """`open_model(path, n_ctx=..)`; everything is closed at the end."""
    opened: list[Runner] = []

    def open_(path: Path, **options: Any) -> Runner:
        runner = Runner(path, **options)
        opened.append(runner)
        return runner

    yield open_
    for runner in opened:
        runner.close()


@pytest.fixture
def tiny() -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """(model file, golden values) of a tiny model by architecture."""
    return lambda name: (
        DATA / f"tiny-{name}.gguf",
        json.loads((DATA / f"tiny-{name}.json").read_text()),
    )


@pytest.fixture
def rows() -> type[Rows]:
    return Rows


def _load_helper(name: str) -> Any:
    """A module beside this file (tests are no package)."""
    spec = importlib.util.spec_from_file_location(f"models_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_SMALL, _REFERENCE = _load_helper("small_models"), _load_helper("reference_model")


@pytest.fixture
def small_model() -> Any:
    """`small_model(architecture, seed=0, key__with__dots=value)`: a SmallModel; a key of None is left out."""
    return _SMALL.SmallModel


@pytest.fixture
def reference_of() -> Callable[[Any], Any]:
    """The float64 reference of a SmallModel."""
    return lambda model: _REFERENCE.ReferenceModel(model.architecture, model.metadata, model.float64)


@pytest.fixture
def same(
    tmp_path: Path, open_model: Callable[..., Runner], reference_of: Callable[[Any], Any]
) -> Callable[..., np.ndarray]:
    """`same(small_model, ids, chunk=None)`: the host's logits equal the reference's; returns them.

    Tolerance 2e-5 of the logits' spread: float32 sums of some hundred terms against float64.
    """

    def check(model: Any, ids: Sequence[int], *, chunk: int | None = None) -> np.ndarray:
        runner = open_model(model.write(tmp_path / f"{model.architecture}-{id(model)}.gguf"))
        got, want = runner.logits(ids, chunk=chunk), reference_of(model).logits(ids)
        assert np.abs(got - want).max() <= 2e-5 * max(1.0, want.std())
        return got

    return check
