"""A request on its way: the ids it has, how far they are computed, what it holds. Mutable, owned by the
engine's thread.

Three counters tell where a sequence stands. `n_computed`: positions whose step has been launched (their keys
and values are in the cache for every later step, because steps run in order). `n_known`: ids that have been
read. `in_flight`: ids sampled by launched steps and not yet read. `goal` = n_known + in_flight is how many
positions must be computed before the next id can be sampled.
"""

from collections.abc import Sequence as AbstractSequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamer.cache.pages import ROOT, PageName, page_names
from streamer.engine.penalties import WHOLE, Penalties
from streamer.engine.refusals import PromptTooLong
from streamer.engine.request import Request, TokenLogprobs
from streamer.kernels.ops import Float32s, Int32s

NOWHERE = -1


@dataclass(frozen=True)
class Mask:
    """What a constraint says after the ids so far."""

    is_finished: bool  # nothing may follow: the sequence ends
    bits: bytes | None  # packed little-endian uint32 over the vocabulary; None: everything is allowed


@dataclass
class Times:
    """On the engine's clock, seconds; None until it happened."""

    submitted_s: float
    admitted_s: float | None = None
    prompt_done_s: float | None = None
    first_token_s: float | None = None


class Sequence:
    """See the module. `owner` is whoever gets the events; the scheduler never looks at it."""

    __slots__ = (
        "arrival",
        "bypassed",
        "cached_tokens",
        "exhausted",
        "finished",
        "generated",
        "goal",
        "hidden_sum",
        "in_flight",
        "is_embedding",
        "late",
        "mask",
        "max_new",
        "n_computed",
        "n_pages",
        "n_prompt",
        "n_registered",
        "n_scored",
        "n_tokens_sent",
        "names",
        "owner",
        "page_table",
        "paused_since_s",
        "penalties",
        "prompt",
        "prompt_event_sent",
        "prompt_logprobs",
        "request",
        "slot",
        "snapshot_at",
        "span_pages",
        "steps_in_flight",
        "times",
        "uploaded_at_start",
    )

    def __init__(
        self, request: Request, prompt: Int32s, arrival: int, max_new: int, owner: Any, now_s: float
    ) -> None:
        self.request, self.prompt, self.arrival, self.owner = request, prompt, arrival, owner
        self.n_prompt = len(prompt)
        self.max_new = max_new  # ids it may generate, cut to the context
        self.generated: list[int] = []  # known ids after the prompt
        self.goal = self.n_prompt
        self.n_computed = 0
        self.in_flight = 0
        self.steps_in_flight = 0
        self.exhausted = False  # every id it may generate is known or in flight: nothing left to schedule
        self.finished = False
        self.is_embedding = request.embed is not None
        self.late = request.constraint is not None or Penalties.wanted(request.sampling)
        self.penalties: Penalties | None = None
        self.mask: Future[Mask] | None = None  # of the next id, being computed by a mask worker
        self.slot = NOWHERE
        self.page_table: Int32s = np.empty(0, np.int32)  # (capacity,) page ids, the first n_pages are valid
        self.n_pages = 0
        self.span_pages: Int32s = (
            self.page_table
        )  # (n_pages,) what spans carry; never written once handed out
        self.names: list[PageName] = []  # of the full pages of the known ids
        self.n_registered = 0  # leading pages whose names the pool knows (or has refused)
        self.n_scored = 0  # leading rows whose log-probability (echo) or hidden state (embedding) is launched
        self.snapshot_at: tuple[
            int, ...
        ] = ()  # positions where a chunk must end so that a snapshot can be taken
        self.bypassed = 0
        self.paused_since_s: float | None = None  # its reader is slow
        self.cached_tokens = 0
        self.prompt_event_sent = False
        self.prompt_logprobs: list[TokenLogprobs | None] = [None] if request.prompt_logprobs else []
        self.hidden_sum: Float32s | None = None  # (n_embd,)
        self.n_tokens_sent = 0
        self.uploaded_at_start = 0
        self.times = Times(now_s)

    @property
    def n_known(self) -> int:
        return self.n_prompt + len(self.generated)

    @property
    def is_running(self) -> bool:
        return self.slot != NOWHERE

    @property
    def knows_mask(self) -> bool:
        """Its next id can be sampled as far as a constraint is concerned."""
        return self.mask is None or self.mask.done()

    @property
    def rank(self) -> tuple[int, int]:
        """Lower is served first and preempted last."""
        return self.request.priority, self.arrival

    @property
    def scores_prompt(self) -> bool:
        return self.request.prompt_logprobs

    @property
    def wants_every_row(self) -> bool:
        """Rows served from the cache give nothing back, so these cannot use it (until they are scored)."""
        return self.scores_prompt or self.request.embed == "mean"

    def ids_between(self, start: int, stop: int) -> Int32s:
        """(stop - start,) known ids of these positions."""
        if stop <= self.n_prompt:
            return self.prompt[start:stop]
        tail = np.array(self.generated[max(0, start - self.n_prompt) : stop - self.n_prompt], np.int32)
        return np.concatenate([self.prompt[start:], tail]) if start < self.n_prompt else tail

    def name_pages(self, page_size: int) -> None:
        """Bring `names` up to the known ids."""
        start, stop = len(self.names) * page_size, self.n_known // page_size * page_size
        if stop > start:
            parent = self.names[-1] if self.names else ROOT
            self.names += page_names(self.ids_between(start, stop), page_size, parent)

    def take_pages(self, pages: AbstractSequence[int], capacity: int) -> None:
        """Start a page table with `pages`: a new array, as launched steps may still look at the old one."""
        self.page_table = np.empty(capacity, np.int32)
        self.page_table[: len(pages)] = pages
        self.n_pages = len(pages)
        self.span_pages = self.page_table[: self.n_pages]

    def add_page(self, page: int) -> None:
        self.page_table[self.n_pages] = page
        self.n_pages += 1
        self.span_pages = self.page_table[: self.n_pages]

    def launched(self, n_rows: int) -> None:
        """A step with the next `n_rows` positions is on its way; the last of them samples when the goal is
        reached.
        """
        self.n_computed += n_rows
        self.steps_in_flight += 1
        if self.n_computed == self.goal:
            if self.is_embedding or self.max_new == 0:
                self.exhausted = True
                return
            self.goal += 1
            self.in_flight += 1
            if self.goal - self.n_prompt >= self.max_new:
                self.exhausted = True

    def __repr__(self) -> str:
        where = "finished" if self.finished else f"slot={self.slot}" if self.is_running else "waiting"
        return (
            f"Sequence({self.request.id}, {where}, prompt={self.n_prompt}, generated={len(self.generated)}, "
            f"computed={self.n_computed}, in_flight={self.in_flight})"
        )


def new_sequence(request: Request, capacity: int, arrival: int, owner: Any, now_s: float) -> Sequence:
    """The sequence of a request that has just come in. `capacity`: positions a sequence can have computed.

    The last id it generates needs no position: prompt and answer may be one longer than `capacity`.
    PromptTooLong; ValueError for an empty prompt.
    """
    prompt = np.asarray(request.prompt_ids, np.int32)
    if not len(prompt):
        raise ValueError("a prompt has at least one id")
    if len(prompt) > capacity:
        raise PromptTooLong(len(prompt), capacity)
    max_new = 0 if request.embed else min(request.max_tokens, capacity + 1 - len(prompt))
    sequence = Sequence(request, prompt, arrival, max_new, owner, now_s)
    if Penalties.wanted(request.sampling):
        n = request.sampling.repeat_last_n
        sequence.penalties = Penalties(request.sampling, prompt[0 if n == WHOLE else -n :].tolist())
    return sequence
