"""What came back from a step becomes events; and the one place where a request ends.

Knows neither threads nor queues: events are appended to `outbox` with their owner, the engine carries them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamer.engine.batches import Chunk
from streamer.engine.masks import MaskWorkers
from streamer.engine.request import (
    EmbeddingEvent,
    Event,
    FinishEvent,
    FinishReason,
    PrefillEvent,
    PromptEvent,
    TokenEvent,
    TokenLogprobs,
)
from streamer.engine.scheduler import Scheduler
from streamer.engine.sequence import Sequence
from streamer.kernels.ops import PendingStep, StepResult

NOT_FINITE = "the model's output is not finite"


@dataclass(frozen=True)
class LaunchedStep:
    """A step on its way, and whose rows it has."""

    pending: PendingStep
    decode: list[Sequence]
    chunks: list[Chunk]
    is_hidden: bool
    launched_s: float

    @property
    def n_prefill(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    @property
    def phase(self) -> str:
        if self.is_hidden:
            return "embed"
        return ("mixed" if self.decode else "prefill") if self.chunks else "decode"


class Outcomes:
    """`backlog_limit`: unread events at which a request's sequence is paused (`paused`, for the loop to
    resume).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        masks: MaskWorkers,
        clock: Callable[[], float],
        weight_h2d_bytes: Callable[[], int],
        backlog_limit: int,
    ) -> None:
        self._scheduler, self._masks, self._clock = scheduler, masks, clock
        self._weight_h2d_bytes, self._backlog_limit = weight_h2d_bytes, backlog_limit
        self.outbox: list[tuple[Any, Event]] = []
        self.paused: list[Sequence] = []
        self.live_late: set[Sequence] = set()
        self.n_prompt_tokens = self.n_generated_tokens = self.n_cached_tokens = 0

    # ---- the life of a request ----

    def begin(self, sequence: Sequence) -> None:
        sequence.uploaded_at_start = self._weight_h2d_bytes()
        if sequence.late:
            self.live_late.add(sequence)

    def emit(self, sequence: Sequence, event: Event) -> None:
        owner = sequence.owner
        owner.sent += 1
        self.outbox.append((owner, event))
        if owner.sent - owner.taken >= self._backlog_limit and sequence.paused_since_s is None:
            sequence.paused_since_s = self._clock()
            owner.paused = True
            self.paused.append(sequence)

    def conclude(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None, *, end_ids: int = 0
    ) -> None:
        """The request's only end: nothing is held any more, its FinishEvent is out. Later calls do nothing.

        `end_ids`: ids sampled but not sent because they end the generation; they count as generated.
        """
        if sequence.finished:
            return
        sequence.finished = True
        self._scheduler.remove(sequence, distrust=error is NOT_FINITE)
        self.live_late.discard(sequence)
        if sequence.paused_since_s is not None:
            self.paused.remove(sequence)
        self._say_goodbye(sequence, reason, error, end_ids)

    def abandon(self, sequence: Sequence, error: str) -> None:
        """The engine is broken: the FinishEvent still goes out, what the sequence holds does not matter any
        more.
        """
        if not sequence.finished:
            sequence.finished = True
            self._say_goodbye(sequence, FinishReason.ERROR, error, 0)

    def _say_goodbye(self, s: Sequence, reason: FinishReason, error: str | None, end_ids: int) -> None:
        if s.request.constraint is not None:
            s.request.constraint.close()
        s.owner.sent += 1
        self.outbox.append((s.owner, self._finish_event(s, reason, error, end_ids)))

    def _finish_event(
        self, s: Sequence, reason: FinishReason, error: str | None, end_ids: int
    ) -> FinishEvent:
        t, now = s.times, self._clock()
        admitted = now if t.admitted_s is None else t.admitted_s
        prompt_done = now if t.prompt_done_s is None else t.prompt_done_s
        first = t.first_token_s
        return FinishEvent(
            reason=reason,
            queue_ms=1e3 * (admitted - t.submitted_s),
            prompt_ms=1e3 * (prompt_done - admitted),
            decode_ms=1e3 * (now - prompt_done),
            ttft_ms=1e3 * (first - t.submitted_s) if first is not None else 0.0,
            n_prompt=s.n_prompt,
            n_generated=len(s.generated) + end_ids,
            cached_prompt_tokens=s.cached_tokens,
            weight_h2d_bytes=self._weight_h2d_bytes() - s.uploaded_at_start,
            error=error,
        )

    # ---- reading a step ----

    def read(self, step: LaunchedStep, result: StepResult) -> None:
        """Hand every row's result to its sequence. Rows of sequences that have ended are dropped."""
        ids = result.ids.tolist()
        bad = None if result.finite.all() else ~result.finite
        for row, s in enumerate(step.decode):
            s.steps_in_flight -= 1
            if s.finished:
                continue
            s.in_flight -= 1
            if bad is not None and bad[row]:
                self.conclude(s, FinishReason.ERROR, NOT_FINITE)
            else:
                self._take_id(s, ids[row], row, result)
        for chunk in step.chunks:
            s = chunk.sequence
            s.steps_in_flight -= 1
            if s.finished:
                continue
            s.in_flight -= chunk.samples
            rows = slice(chunk.logit_offset, chunk.logit_offset + len(chunk.logit_positions))
            if bad is not None and bad[rows].any():
                self.conclude(s, FinishReason.ERROR, NOT_FINITE)
            else:
                self._take_chunk(chunk, rows, result)

    def _take_id(self, s: Sequence, id: int, row: int, result: StepResult) -> None:
        request = s.request
        if s.times.first_token_s is None:
            s.times.first_token_s = self._clock()
        self.n_generated_tokens += 1
        if id in request.end_ids:
            self.conclude(s, FinishReason.STOP, end_ids=1)
            return
        s.generated.append(id)
        wanted = request.sampling.n_logprobs
        self.emit(s, TokenEvent(id) if wanted is None else TokenEvent(id, _logprobs(result, row, wanted)))
        if s.penalties is not None:
            s.penalties.push(id)
        if request.constraint is not None:
            self._masks.advance(s, id)  # whether this was the last id, the constraint will say
        elif len(s.generated) >= s.max_new:
            self.conclude(s, FinishReason.LENGTH)
            return
        if (s.n_registered + 1) * self._scheduler.pool.page_size <= s.n_computed:
            self._scheduler.register_pages(s)

    def _take_chunk(self, chunk: Chunk, rows: slice, result: StepResult) -> None:
        s = chunk.sequence
        if s.scores_prompt:
            self._take_scores(chunk, rows, result)
        if s.is_embedding:
            self._take_hidden(chunk, rows, result)
        if not chunk.is_last:
            if not s.prompt_event_sent and s.paused_since_s is None:
                self.emit(s, PrefillEvent(min(chunk.end, s.n_prompt), s.n_prompt))
            return
        if not s.prompt_event_sent:
            self._prompt_done(s)
        if s.is_embedding:
            assert s.hidden_sum is not None
            divisor = s.n_prompt if s.request.embed == "mean" else 1
            self.emit(s, EmbeddingEvent(tuple((s.hidden_sum / np.float32(divisor)).tolist())))
            self.conclude(s, FinishReason.STOP)
        elif not s.max_new:
            self.conclude(s, FinishReason.LENGTH)
        elif chunk.samples:
            row = rows.stop - 1
            self._take_id(s, int(result.ids[row]), row, result)

    def _prompt_done(self, s: Sequence) -> None:
        s.prompt_event_sent = True
        s.times.prompt_done_s = self._clock()
        self.n_prompt_tokens += s.n_prompt
        self.n_cached_tokens += s.cached_tokens
        self.emit(s, PromptEvent(s.cached_tokens, tuple(s.prompt_logprobs) if s.scores_prompt else ()))

    def _take_scores(self, chunk: Chunk, rows: slice, result: StepResult) -> None:
        s, wanted = chunk.sequence, chunk.sequence.request.sampling.n_logprobs or 0
        for row, position in zip(range(rows.start, rows.stop), chunk.logit_positions, strict=True):
            if position + 1 < s.n_prompt:
                logprob = float(result.target_logprobs[row])
                s.prompt_logprobs.append(TokenLogprobs(logprob, _top(result, row, wanted)))

    def _take_hidden(self, chunk: Chunk, rows: slice, result: StepResult) -> None:
        s = chunk.sequence
        if rows.start == rows.stop:
            return
        assert result.hidden is not None, "an embedding step came back without hidden states"
        summed = result.hidden[rows].sum(axis=0, dtype=np.float64)  # (n_embd,)
        s.hidden_sum = (summed if s.hidden_sum is None else s.hidden_sum + summed).astype(np.float32)


def _logprobs(result: StepResult, row: int, n_top: int) -> TokenLogprobs:
    return TokenLogprobs(float(result.logprobs[row]), _top(result, row, n_top))


def _top(result: StepResult, row: int, n_top: int) -> tuple[tuple[int, float], ...]:
    if not n_top:
        return ()
    ids, logprobs = result.top_ids[row, :n_top].tolist(), result.top_logprobs[row, :n_top].tolist()
    return tuple(zip(ids, logprobs, strict=True))
