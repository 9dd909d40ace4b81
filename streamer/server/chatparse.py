"""A chat answer's text into what is thought, what is said and what is called, while it arrives. Pure."""

from streamer.server.chatrun import CallDelta, ChatDelta
from streamer.text.reasoning import ReasoningSplitter
from streamer.text.tools import ToolCall, ToolCallParser


class ChatParser:
    """One a sequence. Without a splitter nothing is thought, without a tool parser nothing is called."""

    def __init__(self, splitter: ReasoningSplitter | None, tools: ToolCallParser | None) -> None:
        self._splitter, self._tools = splitter, tools
        self._n_calls = 0

    def push(self, text: str) -> ChatDelta:
        reasoning, said = ("", text) if self._splitter is None else self._splitter.push(text)
        return self._delta(reasoning, said)

    def finish(self) -> ChatDelta:
        """What was held back, once no more comes."""
        reasoning, said = ("", "") if self._splitter is None else self._splitter.finish()
        delta = self._delta(reasoning, said)
        if self._tools is None:
            return delta
        content, calls = self._tools.finish()
        return ChatDelta(delta.content + content, delta.reasoning, delta.calls + self._numbered(calls))

    def _delta(self, reasoning: str, said: str) -> ChatDelta:
        if self._tools is None or not said:
            return ChatDelta(said, reasoning)
        content, calls = self._tools.push(said)
        return ChatDelta(content, reasoning, self._numbered(calls))

    def _numbered(self, calls: list[ToolCall]) -> tuple[CallDelta, ...]:
        first = self._n_calls
        self._n_calls += len(calls)
        return tuple(CallDelta(first + i, call.arguments, call.id, call.name) for i, call in enumerate(calls))
