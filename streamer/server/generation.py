"""From calls to sequences that the engine can run.

Encode, check against vocabulary and context, seed, constrain.
"""

import dataclasses
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from streamer.engine.request import Constraint, PromptEvent, Request, SamplingParameters
from streamer.errors import ClientError
from streamer.server.api.body import refuse
from streamer.server.api.calls import ChatCall, CompletionCall, EmbeddingCall, Generation
from streamer.server.api.errors import context_error
from streamer.server.chatrun import ChatRun
from streamer.server.logs import REQUEST_ID, log_event
from streamer.server.pieces import Piece, make_entry
from streamer.server.sequences import Prepared
from streamer.server.state import Backend, ServerState
from streamer.server.textwork import ChatPrompt

logger = logging.getLogger("ggufd")
_NO_SAMPLING = SamplingParameters(temperature=0.0)


@asynccontextmanager
async def admitted(state: ServerState) -> AsyncIterator[Backend]:
    """The backend for one inference request, counted so that a drain waits for its last byte."""
    backend = state.ready_backend()
    state.running += 1
    try:
        yield backend
    finally:
        state.leave()


async def prepare_completion(state: ServerState, backend: Backend, call: CompletionCall) -> list[Prepared]:
    """Prompt by prompt, `n` sequences each."""
    generation = call.generation
    check_generation(backend, generation)
    prepared: list[Prepared] = []
    for prompt in call.prompts:
        ids = await encode_prompt(backend, prompt, "prompt")
        check_context(backend, len(ids), "prompt")
        _note_prompt(state, backend, ids)
        shown = (
            (prompt if isinstance(prompt, str) else backend.text.tokenizer.decode(ids, special=True))
            if call.echo
            else ""
        )
        for _ in range(generation.n):
            constraint = await backend.text.constraint(generation.format) if generation.format else None
            request = _request(state, backend, generation, ids, len(prepared), constraint)
            text = backend.text.token_text(
                generation.stop, with_logprobs=generation.sampling.n_logprobs is not None
            )
            if not call.echo:
                prepared.append(Prepared(request, text))
                continue
            wants_scores = generation.sampling.n_logprobs is not None
            text.n_before = len(shown)
            echoed = _Echo(backend, tuple(ids), shown, wants_scores)
            prepared.append(
                Prepared(dataclasses.replace(request, prompt_logprobs=wants_scores), text, echoed)
            )
    return prepared


@dataclasses.dataclass(frozen=True)
class _Echo:
    """The prompt said back before the first token, with its log-probabilities when they were asked for."""

    backend: Backend
    ids: tuple[int, ...]
    text: str
    wants_scores: bool

    def __call__(self, event: PromptEvent) -> Piece:
        if not self.wants_scores:
            return Piece(self.text)
        vocabulary, entries = self.backend.text.tokenizer, []
        shown = self.backend.text.prompt_text(self.ids, self.text)
        offset = 0
        for token_id, logprobs in zip(self.ids, event.logprobs, strict=True):
            entries.append(make_entry(vocabulary, token_id, logprobs, offset))
            offset += len(shown.push(token_id))
        return Piece(self.text, tuple(entries))


async def prepare_chat(state: ServerState, backend: Backend, call: ChatCall) -> ChatRun:
    generation = call.generation
    check_generation(backend, generation)
    prompt = await backend.text.encode_chat(call, backend.card.n_ctx)
    ids = prompt.ids
    if not ids:
        refuse("the chat template makes an empty prompt of these messages", "messages")
    check_context(backend, len(ids))
    _note_prompt(state, backend, ids)
    prepared, parsers = [], []
    for i in range(generation.n):
        constraint = await _chat_constraint(backend, call, prompt)
        request = _request(state, backend, generation, ids, i, constraint)
        wants_scores = generation.sampling.n_logprobs is not None
        text = backend.text.token_text(generation.stop, with_logprobs=wants_scores, chat=True)
        prepared.append(Prepared(request, text))
        parsers.append(backend.text.parser(call, prompt))
    return ChatRun(backend.engine, prepared, parsers)


async def _chat_constraint(backend: Backend, call: ChatCall, prompt: ChatPrompt) -> Constraint | None:
    """A demanded tool call constrains more than a response format; both at once contradict each other."""
    if call.tool_choice not in ("none", "auto"):
        if call.generation.format is not None:
            refuse(
                "response_format cannot be combined with a tool_choice that demands a call", "response_format"
            )
        return await backend.text.call_constraint(call, prompt)
    wanted = call.generation.format
    return None if wanted is None else await backend.text.constraint(wanted, prompt)


async def prepare_embeddings(state: ServerState, backend: Backend, call: EmbeddingCall) -> list[Prepared]:
    if call.dimensions not in (None, backend.card.n_embd):
        refuse(f"dimensions must be {backend.card.n_embd} for this model", "dimensions")
    prepared = []
    for i, prompt in enumerate(call.inputs):
        ids = await encode_prompt(backend, prompt, "input")
        check_context(backend, len(ids), "input")
        generation = Generation(sampling=_NO_SAMPLING, seeded=True, max_tokens=0)
        request = _request(state, backend, generation, ids, i, None)
        prepared.append(Prepared(dataclasses.replace(request, embed=call.pooling), None))
    return prepared


def _note_prompt(state: ServerState, backend: Backend, ids: Sequence[int]) -> None:
    """What the model is shown, in the log of whoever has asked for it."""
    if state.limits.log_prompts:
        log_event(logger, logging.INFO, "prompt", text=backend.text.tokenizer.decode(ids, special=True))


async def encode_prompt(backend: Backend, prompt: str | Sequence[int | str], param: str) -> list[int]:
    """A raw prompt is the client's own framing: names of control tokens in it are those tokens, as in
    llama-server. `param`: the member it came in.
    """
    parts = [prompt] if isinstance(prompt, str) else prompt
    texts = [part for part in parts if isinstance(part, str)]
    backend.text.check_size(sum(map(len, texts)), backend.card.n_ctx, param)
    n_vocab = backend.text.tokenizer.n_tokens
    ids: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, str):
            ids += await backend.text.encode(part, add_special=i == 0, parse_special=True)
        elif part >= n_vocab:
            refuse(f"{param}: token ids must be below {n_vocab}", param)
        else:
            ids.append(part)
    if not ids:
        refuse(f"{param} has no tokens", param)
    return ids


def check_context(backend: Backend, n_prompt: int, param: str = "messages") -> None:
    if n_prompt > backend.card.n_ctx:
        raise context_error(n_prompt, backend.card.n_ctx, param)


def check_generation(backend: Backend, generation: Generation) -> None:
    n_vocab = backend.text.tokenizer.n_tokens
    for token_id, _ in generation.sampling.logit_bias:
        if token_id >= n_vocab:
            refuse(f"logit_bias: token id {token_id} is outside the vocabulary of {n_vocab}", "logit_bias")


def _request(
    state: ServerState,
    backend: Backend,
    generation: Generation,
    ids: Sequence[int],
    index: int,
    constraint: Constraint | None,
) -> Request:
    """`index` tells the request's sequences apart: seeds differ by it, reproducibly when a seed was given."""
    seed = (generation.sampling.seed + index) % (1 << 64) if generation.seeded else random.getrandbits(64)
    tokenizer, card = backend.text.tokenizer, backend.card
    room = card.n_ctx + 1 - len(ids)
    wanted = room if generation.max_tokens is None else min(generation.max_tokens, room)
    return Request(
        id=f"{REQUEST_ID.get()}-{index}",
        prompt_ids=ids,
        sampling=dataclasses.replace(generation.sampling, seed=seed),
        max_tokens=wanted,
        end_ids=frozenset() if generation.ignore_eos else tokenizer.end_ids,
        constraint=constraint,
        priority=generation.priority,
        deadline_s=_deadline(state, generation),
        use_prefix_cache=generation.use_prefix_cache,
    )


def _deadline(state: ServerState, generation: Generation) -> float | None:
    """On time.monotonic, the engine's clock.

    The client's timeout or the configured one, whichever is shorter.
    """
    limits = [x for x in (generation.timeout_s, state.limits.request_timeout_s) if x is not None]
    return time.monotonic() + min(limits) if limits else None


def check_backpressure(state: ServerState, backend: Backend, n_sequences: int) -> None:
    """429 when the queue has no room for all sequences of a request: either all run or none. 400 when it
    could never have.
    """
    most = state.limits.max_queue + backend.card.max_sequences
    if n_sequences > most:
        refuse(f"the request asks for {n_sequences} sequences; this server takes at most {most} at once")
    waiting = backend.engine.statistics().waiting
    if waiting and waiting + n_sequences > state.limits.max_queue:
        raise ClientError(429, "too many requests are waiting", type="rate_limit_error", retry_after_s=1)
