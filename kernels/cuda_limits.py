"""How much a CUDA executor makes room for, and what a step reads: sizes and table addresses. Values."""

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property

from streamer.kernels.cuda_tables import TableLayout

LOGIT_ROWS = 64  # rows of logits in device memory at once; more are computed in turns
DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # batch sizes with a graph
PREFILL_SIZES = (
    16,
    32,
    64,
    128,
)  # rows of steps with a graph that hold prompts; longer ones hide their launches
FEW_SPANS = 4  # sequences in a short prefill's smaller graph


@dataclass(frozen=True)
class StepKind:
    """Steps that share a table layout and, unless eager, a graph: how much they have room for."""

    n_rows: int
    n_spans: int
    n_logits: int
    decode: bool  # every span has one row
    eager: bool = False

    def holds(self, n_rows: int, n_spans: int, n_logits: int, *, decode: bool) -> bool:
        return (
            n_rows <= self.n_rows
            and n_spans <= self.n_spans
            and n_logits <= self.n_logits
            and (decode or not self.decode)
        )


@dataclass(frozen=True)
class Limits:
    max_rows: int  # of one step: a prefill chunk and the running sequences
    max_sequences: int
    max_pages: int  # of one sequence

    @property
    def most_spans(self) -> int:
        """Spans of a step that may have a graph."""
        return min(self.max_sequences, LOGIT_ROWS)

    @cached_property
    def graphs(self) -> tuple[StepKind, ...]:
        """Kinds with a graph, cheapest first: decode by batch size, then short prefill and mixed steps."""
        most = self.most_spans
        sizes = (*(x for x in DECODE_SIZES if x < most), most)
        decode = [StepKind(n, n, n, decode=True) for n in sizes]
        spans = sorted({min(FEW_SPANS, most), most})
        prefill = [
            StepKind(rows, n, n, decode=False)
            for rows in PREFILL_SIZES
            if rows <= self.max_rows
            for n in spans
        ]
        return (*decode, *prefill)

    @property
    def first_graphs(self) -> tuple[StepKind, ...]:
        """What the first requests use. The others are captured when there is nothing else to do."""
        few = min(FEW_SPANS, self.most_spans)
        return tuple(k for k in self.graphs if k.n_spans <= few)

    @property
    def eager(self) -> StepKind:
        """Everything else: launched one by one."""
        return StepKind(self.max_rows, self.max_sequences, self.max_rows, decode=False, eager=True)

    @property
    def kinds(self) -> tuple[StepKind, ...]:
        return (*self.graphs, self.eager)

    def choose(
        self,
        n_rows: int,
        n_spans: int,
        n_logits: int,
        *,
        decode: bool,
        among: Container[StepKind] | None = None,
    ) -> StepKind:
        """The cheapest kind that holds such a step (of these with a graph, or of all that may have one)."""
        kinds = self.graphs if among is None else (k for k in self.graphs if k in among)
        fits = (k for k in kinds if k.holds(n_rows, n_spans, n_logits, decode=decode))
        return next(fits, self.eager)


@dataclass(frozen=True)
class StepShape:
    """The step being launched or captured, as far as launches depend on it."""

    base: int  # device address of the tables
    layout: TableLayout
    n_rows: int
    n_decode: int  # entries of decode_rows
    n_attention_tiles: int
    n_conv_tiles: int
    n_spans: int
    n_logits: int
    single_rows: bool
    sampled: bool  # launch what draws need; greedy rows alone do not
    n_top: int
    want_hidden: bool

    def table(self, name: str, index: int = 0) -> int:
        """Device address of entry `index` (4-byte entries) of a table."""
        return self.base + self.layout.offsets[name] + 4 * index
