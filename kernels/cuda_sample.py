"""Launchers of sample.cu, and where a step's results lie in device memory."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamer.kernels.cuda_array import DeviceArray
from streamer.kernels.cuda_limits import LOGIT_ROWS, StepShape
from streamer.kernels.launch import KernelSource
from streamer.kernels.ops import StepResult

SLICE = 4096  # ids a block of sample_prepare looks at (sample.cu)
STATISTICS_NBYTES = 32  # sizeof(SliceStatistics)
HISTOGRAM_NBYTES = 256 * 12  # sizeof(Histogram)
MAX_TOP = 20
_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


@dataclass(frozen=True)
class ResultLayout:
    """Results of up to n rows, 4 bytes an entry, in one block: what is read back of a step."""

    n: int

    def offset(self, name: str) -> int:
        """Bytes from the start; `top_ids` and `top_logprobs` follow the fixed part."""
        order = ("ids", "logprobs", "targets", "finite", "sums", "top_ids", "top_logprobs")
        widths = (1, 1, 1, 1, 1, MAX_TOP, MAX_TOP)
        return 4 * self.n * sum(widths[: order.index(name)])

    @property
    def fixed_nbytes(self) -> int:
        return self.offset("top_ids")

    @property
    def nbytes(self) -> int:
        return self.offset("top_logprobs") + 4 * self.n * MAX_TOP

    def read(self, memory: memoryview, n_rows: int, n_top: int) -> StepResult:
        """The first n_rows as a result of its own (copies)."""

        def column(name: str, kind: type[np.generic], width: int = 1) -> npt.NDArray[np.generic]:
            count = n_rows * width
            return np.frombuffer(memory, kind, count, self.offset(name)).copy()

        return StepResult(
            ids=column("ids", np.int32).astype(np.int32, copy=False),
            logprobs=column("logprobs", np.float32).astype(np.float32, copy=False),
            target_logprobs=column("targets", np.float32).astype(np.float32, copy=False),
            top_ids=column("top_ids", np.int32, n_top).reshape(n_rows, n_top).astype(np.int32, copy=False),
            top_logprobs=column("top_logprobs", np.float32, n_top)
            .reshape(n_rows, n_top)
            .astype(np.float32, copy=False),
            finite=column("finite", np.int32) != 0,
        )


@dataclass(frozen=True)
class SampleScratch:
    """Offsets of what sampling needs in device memory, for LOGIT_ROWS rows."""

    n_vocab: int

    @property
    def pitch(self) -> int:
        """Floats between rows of logits."""
        return -(-self.n_vocab // 64) * 64

    @property
    def n_slices(self) -> int:
        return -(-self.n_vocab // SLICE)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of logits, work, slice statistics, histograms."""
        plane = 4 * LOGIT_ROWS * self.pitch
        return plane, plane, LOGIT_ROWS * self.n_slices * STATISTICS_NBYTES, LOGIT_ROWS * HISTOGRAM_NBYTES

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


class CudaSampler:
    """Samples up to LOGIT_ROWS rows of logits at a time."""

    def __init__(self, store: KernelSource, scratch: SampleScratch, address: int, *, n_valid: int) -> None:
        """`address`: scratch.nbytes of device memory whose histograms are zero."""
        self.scratch, self._n_valid = scratch, n_valid
        starts = [address]
        for size in scratch.sizes[:-1]:
            starts.append(starts[-1] + size)
        self.logits_address, self._work, self._slices, self.histograms = starts
        self._prepare = store.kernel("sample.cu", "sample_prepare", [_P] * 10 + [_I] * 4)
        self._histogram = store.kernel("sample.cu", "sample_histogram", [_P] * 4 + [_I] * 2)
        self._pick = store.kernel("sample.cu", "sample_pick", [_P] * 17 + [_I] * 3)
        self._top = store.kernel("sample.cu", "sample_top", [_P] * 4 + [_I] * 3)
        self._resolve = store.kernel("sample.cu", "resolve_ids", [_P] * 4 + [_I])
        self._gather = store.kernel("sample.cu", "gather_rows", [_P] * 3 + [_I] * 2)
        self._softcap = store.kernel("sample.cu", "softcap_logits", [_P, _I, _I, _F])

    def logits(self, n_rows: int) -> DeviceArray:
        return DeviceArray(self.logits_address, n_rows, self.scratch.n_vocab, "f32", self.scratch.pitch)

    def resolve(self, step: StepShape, last_ids: int, resolved: int, *, stream: int) -> None:
        """Ids to embed: the batch's, or the last sampled of the row's slot where it says -1."""
        self._resolve(
            (1, 1, 1), 256, step.table("token_ids"), step.table("row_slot"), last_ids, resolved,
            step.n_rows, stream=stream
        )  # fmt: skip

    def gather(self, x: DeviceArray, rows: int, out: DeviceArray, *, stream: int) -> None:
        grid = (-(-x.columns // 1024), out.rows, 1)
        self._gather(grid, 256, x.address, rows, out.address, x.columns, x.row_stride, stream=stream)

    def softcap(self, n_rows: int, cap: float, *, stream: int) -> None:
        s = self.scratch
        grid = (-(-s.n_vocab // 256), n_rows, 1)
        self._softcap(grid, 256, self.logits_address, s.pitch, s.n_vocab, cap, stream=stream)

    def sample(
        self,
        step: StepShape,
        first: int,
        n: int,
        last_ids: int,
        results: int,
        layout: ResultLayout,
        *,
        stream: int,
    ) -> None:
        """Logit rows first .. first + n of the step, whose logits are in place; results at their rows."""
        s = self.scratch

        def at(name: str) -> int:
            return step.table(name, first)

        temperature = at("temperature")
        self._prepare(
            (s.n_slices, n, 1), 256,
            self.logits_address, self._work, self._slices, temperature, at("adjust_start"),
            step.table("adjust_ids"), step.table("adjust_divide"), step.table("adjust_add"),
            at("mask_of_row"), step.table("masks"),
            s.pitch, s.n_vocab, self._n_valid, step.layout.shape.mask_words,
            stream=stream,
        )  # fmt: skip
        if step.sampled:
            self._histogram(
                (s.n_slices, n, 1), 256,
                self._work, self._slices, temperature, self.histograms, s.pitch, s.n_vocab,
                stream=stream,
            )  # fmt: skip
        out = {
            name: results + layout.offset(name) + 4 * first
            for name in ("ids", "logprobs", "targets", "finite", "sums")
        }
        self._pick(
            (n, 1, 1), 1024,
            self.logits_address, self._work, self._slices, self.histograms, temperature, at("top_k"),
            at("top_p"), at("min_p"), at("uniform"), at("slots"), at("target_ids"), last_ids,
            out["ids"], out["logprobs"],
            out["targets"], out["finite"], out["sums"], s.pitch, s.n_vocab, s.n_slices,
            stream=stream,
        )  # fmt: skip

    def top(self, first: int, n: int, n_top: int, results: int, layout: ResultLayout, *, stream: int) -> None:
        """The n_top most likely ids of each row; after `sample` of the same rows."""
        at = 4 * first * n_top
        self._top(
            (n, 1, 1), 1024,
            self.logits_address, results + layout.offset("sums") + 4 * first,
            results + layout.offset("top_ids") + at,
            results + layout.offset("top_logprobs") + at, self.scratch.pitch, self._n_valid, n_top,
            stream=stream,
        )  # fmt: skip
