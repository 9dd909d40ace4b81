"""Whole models on a CUDA device, through plan, load, layouts, cache and graphs as the daemon does it."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamer.config import cache_directory
from streamer.device.cuda import CudaDevice
from streamer.kernels.ops import Batch, SamplingBatch, Span, StepResult
from streamer.load.pipeline import load
from streamer.residency.ledger import Ledger
from streamer.runtime.cuda import CudaPreparation
from streamer.runtime.planning import RuntimeOptions, plan_model, read_model
from streamer.transfer.choose import TransferOptions, open_transfer

DATA = Path(__file__).parents[2] / "data"
N_TOP = 20


class CudaRunner:
    """A model on the device; sequences are slots with pages of their own."""

    def __init__(
        self, device: CudaDevice, path: Path, *, n_ctx: int = 256, n_slots: int = 8, max_rows: int = 256
    ) -> None:
        directory, self.architecture = read_model(str(path))
        options = RuntimeOptions(n_ctx=n_ctx, max_sequences=n_slots, batch_tokens=max_rows)
        model = plan_model(
            directory, self.architecture, options, kind="cuda", free_bytes=device.memory_info().free
        )
        transfer = open_transfer(device, TransferOptions(), cores=4)
        self.preparation = CudaPreparation(device, model, cache_directory() / "kernels")
        ledger = Ledger(model.plan)
        self.weights = asyncio.run(
            load(
                model.plan,
                directory,
                device,
                transfer,
                ledger,
                verify=True,
                finisher=self.preparation.finisher,
            )
        )
        transfer.close()
        self.executor, self._closers = self.preparation.bind(self.weights, lambda: None)
        self.preparation.close()
        per = -(-n_ctx // self.architecture.cache_layout().page_size)
        assert per * n_slots <= model.plan.n_pages
        self.pages = (
            np.random.default_rng(3).permutation(per * n_slots).astype(np.int32).reshape(n_slots, per)
        )

    def step(self, parts: Sequence[tuple[int, Sequence[int], int]], *, every_row: bool = True) -> StepResult:
        """Parts (slot, ids, position); top ids of every row, or of each part's last."""
        spans, ids, positions, wanted, slots = [], [], [], [], []
        page = self.architecture.cache_layout().page_size
        for slot, part, position in parts:
            offset, n = len(ids), len(part)
            spans.append(Span(slot, offset, n, position, self.pages[slot, : -(-(position + n) // page)]))
            ids += list(part)
            positions += range(position, position + n)
            rows = range(offset, offset + n) if every_row else [offset + n - 1]
            wanted += rows
            slots += [*[-1] * (len(rows) - 1), slot]
        i = np.int32
        batch = Batch(np.array(ids, i), np.array(positions, i), tuple(spans), np.array(wanted, i))
        return self.executor.step(batch, greedy(len(wanted), slots)).result()

    def prompt(self, ids: Sequence[int], *, slot: int = 0, chunk: int | None = None) -> StepResult:
        """Every row's results of a prompt from a fresh state, computed in chunks."""
        self.executor.reset_state(slot)
        chunk = chunk or len(ids)
        return join([self.step([(slot, ids[i : i + chunk], i)]) for i in range(0, len(ids), chunk)])

    def close(self) -> None:
        while self._closers:
            self._closers.pop()()
        self.weights.close()


def join(results: Sequence[StepResult]) -> StepResult:
    def column(name: str) -> Any:
        return np.concatenate([getattr(r, name) for r in results])

    return StepResult(
        *(column(n) for n in ("ids", "logprobs", "target_logprobs", "top_ids", "top_logprobs", "finite"))
    )


def greedy(n: int, slots: Sequence[int]) -> SamplingBatch:
    i, f = np.zeros(0, np.int32), np.zeros(0, np.float32)
    zeros = np.zeros(n, np.float32)
    return SamplingBatch(
        temperature=zeros,
        top_k=np.zeros(n, np.int32),
        top_p=np.ones(n, np.float32),
        min_p=zeros,
        uniform=zeros,
        slots=np.array(slots, np.int32),
        target_ids=np.full(n, -1, np.int32),
        adjust_rows=i,
        adjust_ids=i,
        adjust_divide=f,
        adjust_add=f,
        n_top=N_TOP,
    )


@pytest.fixture
def open_model(device: CudaDevice) -> Iterator[Callable[..., CudaRunner]]:
    """`open_model(path, ...)`; everything is closed at the end."""
    opened: list[CudaRunner] = []

    def open_(path: Path, **options: Any) -> CudaRunner:
        opened.append(CudaRunner(device, path, **options))
        return opened[-1]

    yield open_
    for runner in opened:
        runner.close()


@pytest.fixture
def golden() -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """(model file, golden values) of a tiny model by architecture."""
    return lambda name: (DATA / f"tiny-{name}.gguf", json.loads((DATA / f"tiny-{name}.json").read_text()))
