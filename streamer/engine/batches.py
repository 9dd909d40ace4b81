"""A StepPlan becomes arrays: the Batch, its SamplingBatch, and the notes needed to read the result.

Building a batch moves the sequences' counters: from here on its rows count as launched.
"""

from dataclasses import dataclass

import numpy as np

from streamer.engine.sampler import LogitRow, SamplerTable
from streamer.engine.scheduler import StepPlan
from streamer.engine.sequence import Sequence
from streamer.kernels.ops import Batch, Int32s, SamplingBatch, Span


@dataclass(frozen=True)
class Chunk:
    """Prefill rows of one sequence in a step, and which of the step's logit rows are theirs."""

    sequence: Sequence
    start: int  # position of the first row
    end: int
    is_last: bool  # reaches the goal: the prompt (and what was generated before a preemption) is computed
    samples: bool  # its last logit row gives an id
    logit_offset: int
    logit_positions: range  # positions of the rows whose logits or hidden states come back


def build_batch(
    plan: StepPlan, table: SamplerTable, page_size: int
) -> tuple[Batch, SamplingBatch, list[Chunk]]:
    ids, positions, slots, spans = _decode_rows(plan.decode)
    decode_slots, decode_positions = np.array(slots, np.int32), np.array(positions, np.int32)
    n_decode = len(plan.decode)
    if not plan.prefill:
        batch = Batch(
            np.array(ids, np.int32), decode_positions, tuple(spans), np.arange(n_decode, dtype=np.int32)
        )
        return batch, table.batch(plan.decode, decode_slots, decode_positions, []), []
    id_parts, position_parts = [np.array(ids, np.int32)], [decode_positions]
    logit_parts = [np.arange(n_decode, dtype=np.int32)]
    chunks: list[Chunk] = []
    row, n_logits = n_decode, n_decode
    for sequence, n_rows in plan.prefill:
        chunk = _chunk(sequence, n_rows, n_logits)
        pages = sequence.span_pages[: -(-chunk.end // page_size)]
        spans.append(Span(sequence.slot, row, n_rows, chunk.start, pages))
        id_parts.append(sequence.ids_between(chunk.start, chunk.end))
        position_parts.append(np.arange(chunk.start, chunk.end, dtype=np.int32))
        wanted = chunk.logit_positions
        first = row + wanted.start - chunk.start
        logit_parts.append(np.arange(first, first + len(wanted), dtype=np.int32))
        chunks.append(chunk)
        row += n_rows
        n_logits += len(wanted)
    batch = Batch(
        np.concatenate(id_parts),
        np.concatenate(position_parts),
        tuple(spans),
        np.concatenate(logit_parts),
        plan.is_hidden,
    )
    others = [logit_row for chunk in chunks for logit_row in _logit_rows(chunk)]
    sampling = table.batch(plan.decode, decode_slots, decode_positions, others)
    for chunk in chunks:
        _launch(chunk)
    return batch, sampling, chunks


def _decode_rows(decode: list[Sequence]) -> tuple[list[int], list[int], list[int], list[Span]]:
    """The loop that runs for every token: plain lists and locals, no calls but the span's. Moves the
    counters.
    """
    ids, positions, slots, spans = [], [], [], []
    for row, s in enumerate(decode):
        position, slot = s.n_computed, s.slot
        ids.append(-1 if s.in_flight else s.generated[-1])
        positions.append(position)
        slots.append(slot)
        spans.append(Span(slot, row, 1, position, s.span_pages))
        s.n_computed = position + 1
        s.goal += 1
        s.in_flight += 1
        s.steps_in_flight += 1
        if s.goal - s.n_prompt >= s.max_new:
            s.exhausted = True
    return ids, positions, slots, spans


def _chunk(s: Sequence, n_rows: int, logit_offset: int) -> Chunk:
    start, end = s.n_computed, s.n_computed + n_rows
    is_last = end == s.goal
    samples = is_last and s.max_new > 0 and not s.is_embedding
    last = end - 1
    if s.wants_every_row and s.n_scored < s.n_prompt:
        # the prompt's last row is worth a logit only when an id is sampled from it (there is no next id to
        # score)
        stop = end if s.is_embedding or samples else min(end, s.n_prompt - 1)
        wanted = range(min(max(start, s.n_scored), stop), stop)
    elif samples or (is_last and s.is_embedding):
        wanted = range(last, end)
    else:
        wanted = range(end, end)
    return Chunk(s, start, end, is_last, samples, logit_offset, wanted)


def _logit_rows(chunk: Chunk) -> list[LogitRow]:
    s = chunk.sequence
    targets: Int32s | list[int]
    if s.scores_prompt:
        targets = s.prompt[chunk.logit_positions.start + 1 : chunk.logit_positions.stop + 1]
    else:
        targets = []
    last = chunk.end - 1
    return [
        LogitRow(s, p, chunk.samples and p == last, int(targets[i]) if i < len(targets) else -1)
        for i, p in enumerate(chunk.logit_positions)
    ]


def _launch(chunk: Chunk) -> None:
    s = chunk.sequence
    s.n_scored = max(s.n_scored, min(chunk.end, s.n_prompt))
    s.launched(chunk.end - chunk.start)
