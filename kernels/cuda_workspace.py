"""The one buffer an executor computes in: where each part lies, and its size before anything is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass

from streamer.device.base import Buffer, Device
from streamer.kernels.cuda_limits import LOGIT_ROWS, Limits, StepKind
from streamer.kernels.cuda_sample import ResultLayout, SampleScratch
from streamer.kernels.cuda_tables import TableLayout

ALIGNMENT = 256


@dataclass(frozen=True)
class WorkspaceSizes:
    """Bytes of every part, in order. Parts marked zeroed must start as zeros."""

    residual: int
    hidden: int
    resolved_ids: int
    tables: int
    results: int
    attention_partial: int
    attention_counters: int  # zeroed
    last_ids: int  # zeroed
    sampling: int  # zeroed (its histograms)
    arena: int

    @property
    def nbytes(self) -> int:
        return sum(aligned(size) for size in vars(self).values())

    def offsets(self) -> dict[str, int]:
        at, offsets = 0, {}
        for name, size in vars(self).items():
            offsets[name] = at
            at += aligned(size)
        return offsets


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def workspace_sizes(
    *,
    n_embd: int,
    n_vocab: int,
    n_slots: int,
    limits: Limits,
    layouts: Mapping[StepKind, TableLayout],
    attention: tuple[int, int],
    arena: int,
) -> WorkspaceSizes:
    """`attention`: bytes of partial results and counters; `arena`: bytes of a sublayer's temporaries."""
    return WorkspaceSizes(
        residual=4 * limits.max_rows * n_embd,
        hidden=4 * LOGIT_ROWS * n_embd,
        resolved_ids=4 * limits.max_rows,
        tables=max(layout.nbytes for layout in layouts.values()),
        results=max(ResultLayout(layout.shape.n_logits).nbytes for layout in layouts.values()),
        attention_partial=attention[0],
        attention_counters=attention[1],
        last_ids=4 * n_slots,
        sampling=SampleScratch(n_vocab).nbytes,
        arena=arena,
    )


class Workspace:
    """The allocated buffer with the address of every part. Owns it until `close`."""

    def __init__(self, device: Device, sizes: WorkspaceSizes, n_embd: int) -> None:
        self.sizes, self.n_embd = sizes, n_embd
        self.buffer: Buffer = device.allocate(sizes.nbytes, what="workspace")
        self._offsets = sizes.offsets()
        stream = device.create_stream("workspace")
        try:
            for part in ("attention_counters", "last_ids", "sampling"):
                nbytes = getattr(sizes, part)
                if nbytes:
                    device.fill(self.buffer, self._offsets[part], nbytes, 0, stream=stream)
            stream.sync()
        finally:
            stream.close()

    def _address(self, part: str) -> int:
        return self.buffer.handle + self._offsets[part]

    @property
    def residual(self) -> int:
        return self._address("residual")

    @property
    def hidden(self) -> int:
        return self._address("hidden")

    @property
    def resolved_ids(self) -> int:
        return self._address("resolved_ids")

    @property
    def tables(self) -> int:
        return self._address("tables")

    @property
    def results(self) -> int:
        return self._address("results")

    @property
    def attention_partial(self) -> int:
        return self._address("attention_partial")

    @property
    def attention_counters(self) -> int:
        return self._address("attention_counters")

    @property
    def last_ids(self) -> int:
        return self._address("last_ids")

    @property
    def sampling(self) -> int:
        return self._address("sampling")

    @property
    def arena(self) -> int:
        return self._address("arena")

    def close(self) -> None:
        self.buffer.close()
