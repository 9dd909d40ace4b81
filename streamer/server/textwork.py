"""Text work of requests, off the event loop: prompts to ids, conversations to ids, constraints, detokenizers.

Small texts are encoded where they are; everything that may take over a millisecond goes to a small pool of
threads, so that probes are answered meanwhile.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from streamer.engine.request import Constraint
from streamer.server.api.calls import ChatCall, OutputFormat
from streamer.server.chatrun import OutputParser
from streamer.server.pieces import TokenText
from streamer.text.detokenizer import Detokenizer, StopMatcher
from streamer.text.tokenizer import Tokenizer

T = TypeVar("T")
INLINE_CHARACTERS = 256  # encoded on the loop: under 0.2 ms


class ChatFormat(Protocol):
    """The model's way of writing conversations (template, tools, reasoning).

    Blocking calls; run in threads.
    """

    def encode(self, call: ChatCall) -> list[int]: ...
    def render(self, call: ChatCall) -> str: ...
    def parser(self, call: ChatCall) -> OutputParser: ...
    def constraint(self, call: ChatCall) -> Constraint | None: ...
    @property
    def source(self) -> str: ...


class TextWork:
    """Tokenizer, chat format and constraints of one model behind coroutines."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: ChatFormat,
        constrain: Callable[[OutputFormat], Constraint],
        *,
        n_vocab: int,
        threads: int = 2,
    ) -> None:
        self.tokenizer, self.chat, self.n_vocab = tokenizer, chat, n_vocab
        self._constrain = constrain
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="text")

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    async def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        def encode() -> list[int]:
            return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

        return encode() if len(text) <= INLINE_CHARACTERS else await self.run(encode)

    async def encode_chat(self, call: ChatCall) -> list[int]:
        """Render and encode; control tokens in contents stay text.

        ClientError 400 when the template refuses.
        """
        return await self.run(self.chat.encode, call)

    async def constraint(self, wanted: OutputFormat) -> Constraint:
        """One for one sequence. ClientError 400 when the schema or grammar cannot be used."""
        return await self.run(self._constrain, wanted)

    async def chat_constraint(self, call: ChatCall) -> Constraint | None:
        return await self.run(self.chat.constraint, call)

    def token_text(self, stops: tuple[str, ...], *, with_logprobs: bool) -> TokenText:
        return TokenText(Detokenizer(self.tokenizer), self.tokenizer, StopMatcher(stops), with_logprobs)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
