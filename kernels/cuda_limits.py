"""How much a CUDA executor makes room for, and what a step reads: sizes and table addresses. Values."""

from dataclasses import dataclass

from streamer.kernels.cuda_tables import TableLayout

LOGIT_ROWS = 64  # rows of logits in device memory at once; more are computed in turns


@dataclass(frozen=True)
class Limits:
    max_rows: int  # of one step: a prefill chunk and the running sequences
    max_sequences: int
    max_pages: int  # of one sequence

    @property
    def buckets(self) -> tuple[int, ...]:
        """Decode batch sizes that have a graph of their own."""
        sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64]
        most = min(self.max_sequences, LOGIT_ROWS)
        return (*(x for x in sizes if x < most), most)

    def bucket(self, n_rows: int) -> int:
        """The smallest bucket that holds n_rows; 0: none does."""
        return next((b for b in self.buckets if b >= n_rows), 0)


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
