"""Runs the sequences of one request on the engine and merges what they give.

Whatever happens, none is left running.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from streamer.engine.handle import NotServing, PromptTooLong, QueueFull
from streamer.engine.request import (
    EmbeddingEvent,
    Event,
    FinishEvent,
    FinishReason,
    PrefillEvent,
    PromptEvent,
    Request,
    TokenEvent,
)
from streamer.errors import ClientError
from streamer.server.api.errors import context_error
from streamer.server.api.results import FINISH_NAMES
from streamer.server.logs import log_event
from streamer.server.pieces import Piece, TokenText

logger = logging.getLogger("ggufd")


class Handle(Protocol):
    """engine.Handle: the events of one request."""

    def events(self) -> AsyncIterator[Event]: ...
    async def batch(self) -> list[Event]: ...
    def finish(self, reason: FinishReason) -> None: ...


class SubmittingEngine(Protocol):
    def submit_nowait(self, request: Request) -> Handle: ...


@dataclass(frozen=True)
class Prepared:
    """A sequence ready to run: ids for the engine, and how its ids become text (None for embeddings)."""

    request: Request
    text: TokenText | None
    echo: Callable[[PromptEvent], Piece] | None = None  # what is said before the first token


@dataclass(frozen=True)
class Progress:
    """How far a prompt is."""

    index: int
    processed: int
    total: int


@dataclass(frozen=True)
class Text:
    index: int
    piece: Piece


@dataclass(frozen=True)
class Vector:
    index: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class End:
    """A sequence's last item. `finish` is OpenAI's finish_reason; `stop` the stop string that was found."""

    index: int
    event: FinishEvent
    finish: str
    stop: str | None


Item = Progress | Text | Vector | End


async def run_sequences(
    engine: SubmittingEngine, sequences: Sequence[Prepared]
) -> AsyncGenerator[Item, None]:
    """Items of all sequences as they come, an End for each. ClientError when a sequence fails or cannot be
    queued.

    Close the iterator (contextlib.aclosing) or cancel: sequences still running are cancelled in the engine.
    """
    handles: list[Handle] = []
    try:
        for sequence in sequences:
            handles.append(_submit(engine, sequence.request))
        sources = [_items(i, h, s) for i, (h, s) in enumerate(zip(handles, sequences, strict=True))]
        # the common case pays for no queue
        async for item in sources[0] if len(sources) == 1 else _merged(sources):
            yield item
    finally:
        for handle in handles:
            handle.finish(FinishReason.CANCELLED)  # no effect on those that have ended


def _submit(engine: SubmittingEngine, request: Request) -> Handle:
    try:
        return engine.submit_nowait(request)
    except QueueFull:
        raise ClientError(
            429, "too many requests are waiting", type="rate_limit_error", retry_after_s=1
        ) from None
    except NotServing:
        raise ClientError(503, "the server takes no requests any more", retry_after_s=5) from None
    except PromptTooLong as error:
        raise context_error(error.n_prompt, error.n_ctx) from None


async def _items(index: int, handle: Handle, sequence: Prepared) -> AsyncIterator[Item]:
    """Tokens that have come meanwhile go out together: a loop that lags behind does less for each."""
    text = sequence.text
    while batch := await handle.batch():
        tokens = [event for event in batch if isinstance(event, TokenEvent)]
        if len(tokens) < len(batch):
            for item in _before_tokens(index, batch, sequence):
                yield item
        if tokens and text is not None and text.stopped is None:  # else sampled before the engine heard of it
            piece = text.push(tokens)
            if piece:
                yield Text(index, piece)
            if text.stopped is not None:
                handle.finish(FinishReason.STOP)
        last = batch[-1]
        if isinstance(last, FinishEvent):
            for item in _ending(index, last, text):
                yield item


def _before_tokens(index: int, batch: Sequence[Event], sequence: Prepared) -> Iterator[Item]:
    for event in batch:
        if isinstance(event, PromptEvent) and sequence.echo is not None:
            yield Text(index, sequence.echo(event))
        elif isinstance(event, PrefillEvent):
            yield Progress(index, event.processed, event.total)
        elif isinstance(event, EmbeddingEvent):
            yield Vector(index, event.values)


def _ending(index: int, event: FinishEvent, text: TokenText | None) -> list[Item]:
    if event.reason is FinishReason.ERROR:
        log_event(logger, logging.ERROR, "generation failed", error=event.error)
        raise ClientError(500, "the generation failed", type="server_error")
    if event.reason is FinishReason.CANCELLED:  # not by us: whoever asks for it reads no further
        raise ClientError(
            503, "the request was cut: the server stops, or its reader was too slow", retry_after_s=5
        )
    if event.reason is FinishReason.DEADLINE and event.n_generated == 0:
        raise ClientError(503, "the request's time ran out before its first token", retry_after_s=1)
    if text is None:
        return [End(index, event, FINISH_NAMES[event.reason], None)]
    last = text.finish()
    finish = "stop" if text.stopped is not None else FINISH_NAMES[event.reason]
    if text.stopped is not None:  # what was sampled until the engine heard of it is nobody's
        event = replace(event, n_generated=text.n_tokens)
    return (
        [Text(index, last), End(index, event, finish, text.stopped)]
        if last
        else [End(index, event, finish, text.stopped)]
    )


async def _merged(sources: list[AsyncIterator[Item]]) -> AsyncIterator[Item]:
    """Items of all sources in the order of their coming; the first failure ends all."""
    queue: asyncio.Queue[Item | BaseException | None] = asyncio.Queue(maxsize=64)

    async def pump(source: AsyncIterator[Item]) -> None:
        try:
            async for item in source:
                await queue.put(item)
            await queue.put(None)
        except ClientError as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        left = len(tasks)
        while left:
            arrived = await queue.get()
            if isinstance(arrived, BaseException):
                raise arrived
            if arrived is None:
                left -= 1
            else:
                yield arrived
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
