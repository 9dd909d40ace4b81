"""How the prefill rows of a step are shared out. Pure."""

from collections.abc import Sequence as AbstractSequence

from streamer.engine.sequence import Sequence


def divide_rows(
    begun: AbstractSequence[Sequence], rows: int, logit_rows: int, page_size: int
) -> list[tuple[Sequence, int]]:
    """(sequence, rows) of a step's chunks: half the rows to the best rank, then the shortest remainders.

    What the others leave goes to the best rank again. `logit_rows`: how many rows may have logits.
    """
    if not begun or rows < 1:
        return []
    oldest, *others = sorted(begun, key=lambda s: s.rank)
    others.sort(key=lambda s: (s.goal - s.n_computed, s.rank))
    remainder = oldest.goal - oldest.n_computed
    first = min(remainder, -(-rows // 2) if others else rows)
    left = rows - first
    wants = []
    for s in others:
        wants.append(min(s.goal - s.n_computed, left))
        left -= wants[-1]
    wants.insert(0, min(remainder, first + left))
    chunks = []
    for s, want in zip((oldest, *others), wants, strict=True):
        n_rows, n_logits = _cut(s, want, logit_rows, page_size)
        if n_rows:
            chunks.append((s, n_rows))
            logit_rows -= n_logits
    return chunks


def _cut(s: Sequence, n_rows: int, logit_rows: int, page_size: int) -> tuple[int, int]:
    """(rows, logit rows) of a chunk: ends at snapshots and page boundaries, within the logit rows."""
    end = s.n_computed + n_rows
    end = next((boundary for boundary in s.snapshot_at if s.n_computed < boundary < end), end)
    aligned = end // page_size * page_size
    if end < s.goal and aligned > s.n_computed:
        end = aligned
    first_wanted = max(s.n_computed, s.n_scored)
    if s.wants_every_row and end - first_wanted > logit_rows:
        end = first_wanted + logit_rows
    elif end == s.goal and logit_rows < 1:
        end -= 1
    n_logits = max(0, end - first_wanted) if s.wants_every_row else int(end == s.goal)
    return end - s.n_computed, n_logits
