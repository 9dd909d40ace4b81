"""Text work of requests, off the event loop: prompts to ids, conversations to ids, constraints, detokenizers.

Small texts are encoded where they are; everything that may take over a millisecond goes to a small pool of
threads, so that probes are answered meanwhile.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from streamer.engine.request import Constraint
from streamer.server.api.calls import ChatCall, OutputFormat
from streamer.server.api.errors import context_error
from streamer.server.chatparse import ChatParser
from streamer.server.chatrun import OutputParser
from streamer.server.pieces import TokenText
from streamer.text import grammars
from streamer.text.chat_template import ChatTemplates, RenderedChat
from streamer.text.constraint import ConstraintFactory
from streamer.text.detokenizer import Detokenizer, StopMatcher
from streamer.text.reasoning import CLOSE, ReasoningSplitter, closes_thinking, opens_thinking, thinks
from streamer.text.tokenizer import Tokenizer, build_tokenizer
from streamer.text.tools import SHOWN_TOKENS, ToolCallParser, choose_form, instructions, knows_tools, spoken
from streamer.text.vocabulary import read_vocabulary

T = TypeVar("T")
INLINE_CHARACTERS = 256  # encoded on the loop: under 0.2 ms
N_COMPILERS = 8  # threads that wait for grammars; of costly ones the factory lets only some of these go on
LARGE_CHAT_CHARACTERS = 1 << 15  # from here on even the preparation of a rendering goes to a thread


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation. `opened`: the template ended inside a thought; `closed`: right behind one."""

    ids: list[int]
    opened: bool
    closed: bool


class TextWork:
    """Tokenizer, chat templates and constraints of one model behind coroutines."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: ChatTemplates,
        constraints: ConstraintFactory,
        *,
        threads: int = 2,
    ) -> None:
        self.tokenizer, self.templates, self._constraints = tokenizer, templates, constraints
        self._form = choose_form(templates.source)
        self._thinks = thinks(templates.source)
        self._knows_tools = any(knows_tools(source) for source in templates.sources.values())
        self._knows_calls = any("tool_calls" in source for source in templates.sources.values())
        by_text = tokenizer.ids_by_text
        self._shown = frozenset(by_text[text] for text in SHOWN_TOKENS if text in by_text)
        self._tags_are_control = CLOSE in by_text and tokenizer.is_control(by_text[CLOSE])
        self._longest_token = max(len(token.encode()) for token in tokenizer.vocabulary.tokens)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._compilers = ThreadPoolExecutor(N_COMPILERS, thread_name_prefix="grammar")

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    async def _compile(self, work: Callable[[], Constraint]) -> Constraint:
        """On threads of its own: a grammar may take seconds, and no prompt waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._compilers, work)

    # ---- prompts -------------------------------------------------------------------------------------------

    async def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        def encode() -> list[int]:
            return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

        return encode() if len(text) <= INLINE_CHARACTERS else await self.run(encode)

    async def render(self, call: ChatCall) -> RenderedChat:
        """The prompt's text. ClientError 400 when the template refuses, fails or takes too long."""
        messages, tools = call.messages, call.tools if call.tool_choice != "none" else ()
        if not self._knows_calls:
            messages = tuple(map(_calls_in_words, messages))
        if tools and not self._knows_tools:
            messages, tools = _told_in_words(messages, instructions(tools)), ()

        def rendering() -> Coroutine[Any, Any, RenderedChat]:
            return self.templates.render(messages, tools=tools or None, **call.template_kwargs)

        if _n_characters(messages) < LARGE_CHAT_CHARACTERS:
            return await rendering()
        return await self.run(lambda: asyncio.run(rendering()))

    def check_size(self, n_characters: int, n_ctx: int, param: str = "messages") -> None:
        """Refuse what cannot fit by its length alone, before it costs anything.

        The count is a lower bound, and the error says so.
        """
        at_least = n_characters // self._longest_token
        if at_least > n_ctx:
            raise context_error(at_least, n_ctx, param, is_least=True)

    async def encode_chat(self, call: ChatCall, n_ctx: int) -> ChatPrompt:
        """Render and encode; names of control tokens in contents stay text."""
        self.check_size(_n_characters(call.messages), n_ctx)
        rendered = await self.render(call)
        ids = await self.run(self.templates.encode, rendered)
        return ChatPrompt(ids, opens_thinking(rendered.text), closes_thinking(rendered.text))

    # ---- answers -------------------------------------------------------------------------------------------

    def token_text(self, stops: tuple[str, ...], *, with_logprobs: bool, chat: bool = False) -> TokenText:
        """`chat`: tags of thoughts and calls are shown to the parser even where they are control tokens."""
        detokenizer = Detokenizer(self.tokenizer, shown=self._shown if chat else ())
        return TokenText(detokenizer, self.tokenizer, StopMatcher(stops), with_logprobs)

    def prompt_text(self, ids: Sequence[int], text: str) -> Detokenizer:
        """For the place of every id in its prompt: control tokens show their names, but one that was put
        before the text.
        """
        first = self.tokenizer.token_text(ids[0])
        is_added = self.tokenizer.is_control(ids[0]) and not text.startswith(first)
        shown = {i for i in ids if self.tokenizer.is_control(i)} - ({ids[0]} if is_added else set())
        return Detokenizer(self.tokenizer, shown=shown, at_start=True)

    def parser(self, call: ChatCall, prompt: ChatPrompt) -> OutputParser:
        """A client's own grammar is of the whole answer: no thought that the prompt has opened goes on."""
        wanted = call.generation.format
        opened = prompt.opened and (wanted is None or wanted.grammar is None)
        splitter = ReasoningSplitter(opened=opened) if self._thinks else None
        wants_calls = bool(call.tools) and call.tool_choice != "none"
        return ChatParser(splitter, ToolCallParser(self._form, call.tools) if wants_calls else None)

    async def constraint(self, wanted: OutputFormat, prompt: ChatPrompt | None = None) -> Constraint:
        """One for one sequence. ClientError 400 when the schema or grammar cannot be used."""

        def compile_format() -> Constraint:
            grammar = _grammar(wanted)
            if prompt is not None and wanted.grammar is None:
                grammar = self._after_thought(grammar, prompt)
            return self._constraints.compile(grammar)

        return await self._compile(compile_format)

    def _after_thought(self, grammar: str, prompt: ChatPrompt) -> str:
        """What the model thinks first is free, as without a constraint."""
        if not self._thinks or prompt.closed:
            return grammar
        self._constraints.compile(grammar)  # behind a thought its limits would show in mid-answer only
        return grammars.after_thought(grammar, opened=prompt.opened, tags_are_control=self._tags_are_control)

    async def call_constraint(self, call: ChatCall, prompt: ChatPrompt) -> Constraint:
        """For a tool_choice that demands a call."""
        _, _, name = call.tool_choice.partition(":")

        def compile_calls() -> Constraint:
            grammar = grammars.tool_calls(
                self._form, call.tools, name=name or None, parallel=call.parallel_tool_calls
            )
            return self._constraints.compile(self._after_thought(grammar, prompt))

        return await self._compile(compile_calls)

    def warm(self) -> None:
        """Start the process that constraints are forked from; nobody waits for it but its first user."""
        self._compilers.submit(self._constraints.start)

    def close(self) -> None:
        self.templates.close()
        self._constraints.close()
        for pool in (self._pool, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)


def _n_characters(messages: tuple[dict[str, Any], ...]) -> int:
    return sum(len(message["content"] or "") for message in messages)


def _grammar(wanted: OutputFormat) -> str:
    if wanted.grammar is not None:
        return grammars.gbnf(wanted.grammar)
    return grammars.json_object() if wanted.json_object else grammars.json_schema(wanted.json_schema)


def _calls_in_words(message: dict[str, Any]) -> dict[str, Any]:
    """Earlier calls as the content they were, for templates that would leave them out."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    said = [message["content"]] if message["content"] else []
    return {**message, "content": "\n".join([*said, *(spoken(call["function"]) for call in calls)])}


def _told_in_words(messages: tuple[dict[str, Any], ...], text: str) -> tuple[dict[str, Any], ...]:
    """The tools in the system message, for templates that have no place for them."""
    if messages and messages[0]["role"] == "system":
        return ({**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:])
    return ({"role": "system", "content": text}, *messages)


# ---- building ----------------------------------------------------------------------------------------------


def check_text(metadata: Mapping[str, object], path: str) -> None:
    """Refuse a vocabulary that cannot work, before anything is allocated. Blocking. GGUFError."""
    read_vocabulary(metadata, path)


async def build_text(
    metadata: Mapping[str, object], path: str, n_vocab: int, *, template_timeout_s: float
) -> TextWork:
    """Tokenizer, template process and constraint process, built beside the upload. GGUFError."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
    try:
        tokenizer = await loop.run_in_executor(thread, lambda: build_tokenizer(metadata, path=path))
    finally:
        thread.shutdown(wait=False)  # called off, the start does not wait for what it no longer wants
    templates = ChatTemplates(metadata, tokenizer, deadline_s=template_timeout_s)
    constraints = ConstraintFactory(tokenizer, n_vocab)
    try:
        await templates.start()
    except BaseException:
        templates.close()
        constraints.close()
        raise
    work = TextWork(tokenizer, templates, constraints)
    work.warm()
    return work
