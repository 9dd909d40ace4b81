"""A conversation's answer as it grows.

Text pieces through the output parser into content, reasoning and tool calls.
"""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamer.engine.request import FinishEvent
from streamer.server.api.results import Entry, Usage, details_object, usage_of
from streamer.server.pieces import Piece
from streamer.server.sequences import End, Prepared, Progress, SubmittingEngine, Text, run_sequences


@dataclass(frozen=True)
class CallDelta:
    """A piece of a tool call. `id` and `name` come with its first piece only."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ChatDelta:
    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class OutputParser(Protocol):
    """Splits an answer's text: one a sequence."""

    def push(self, text: str) -> ChatDelta: ...
    def finish(self) -> ChatDelta: ...


@dataclass(frozen=True)
class ChatText:
    index: int
    delta: ChatDelta
    entries: tuple[Entry, ...]


@dataclass
class ChatAnswer:
    """All of one choice, collected."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    n_reasoning: int = 0  # tokens
    end: End | None = None

    def add(self, delta: ChatDelta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.n_reasoning += bool(delta.reasoning)
        for call in delta.calls:
            if call.id is not None:
                function = {"name": call.name, "arguments": ""}
                self.calls.append({"id": call.id, "type": "function", "function": function})
            self.calls[call.index]["function"]["arguments"] += call.arguments

    @property
    def finish(self) -> str:
        assert self.end is not None
        return "tool_calls" if self.calls and self.end.finish == "stop" else self.end.finish


class ChatRun:
    """Runs a prepared conversation; iterate `items`, then read `answers`, `usage` and `details`."""

    def __init__(
        self, engine: SubmittingEngine, prepared: Sequence[Prepared], parsers: Sequence[OutputParser]
    ) -> None:
        self._engine, self._prepared, self._parsers = engine, prepared, parsers
        self.answers = [ChatAnswer() for _ in prepared]

    async def items(self) -> AsyncGenerator[Progress | ChatText | End, None]:
        async with contextlib.aclosing(run_sequences(self._engine, self._prepared)) as items:
            async for item in items:
                if isinstance(item, Text):
                    yield self._text(item.index, self._parsers[item.index].push(item.piece.text), item.piece)
                elif isinstance(item, End):
                    last = self._text(item.index, self._parsers[item.index].finish(), Piece())
                    if last.delta:
                        yield last
                    self.answers[item.index].end = item
                    yield item
                elif isinstance(item, Progress):
                    yield item

    def _text(self, index: int, delta: ChatDelta, piece: Piece) -> ChatText:
        answer = self.answers[index]
        answer.add(delta)
        answer.entries.extend(piece.entries)
        return ChatText(index, delta, piece.entries)

    async def collect(self) -> None:
        async with contextlib.aclosing(self.items()) as items:
            async for _ in items:
                pass

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt, known before anything has run."""
        return len(self._prepared[0].request.prompt_ids)

    @property
    def finishes(self) -> list[FinishEvent]:
        return [a.end.event for a in self.answers if a.end is not None]

    @property
    def usage(self) -> Usage:
        usage = usage_of(self.finishes, len(self._prepared))
        n_reasoning = sum(a.n_reasoning for a in self.answers)
        return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, n_reasoning)

    @property
    def details(self) -> dict[str, Any]:
        return details_object([(a.end.event, a.finish) for a in self.answers if a.end is not None])
