"""Conversations to prompts through the model's own template, in a sandbox in another process.

What a user wrote never becomes a control token, whatever the template does with it (see marking.py).
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamer.errors import ClientError
from streamer.text.encoder import Segment
from streamer.text.marking import Marks, NameFinder, choose_marks
from streamer.text.template_process import TemplateProcess
from streamer.text.tokenizer import Tokenizer
from streamer.text.tools import instructions, knows_tools

log = logging.getLogger(__name__)

_KEY = "tokenizer.chat_template"
_TOOL_TEMPLATE = "tool_use"
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "model"})
# What is used where a file has no template, as llama-server does.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class RenderedChat:
    """A prompt. `text` is what the template wrote; `segments` the same cut at its control tokens (True)."""

    text: str
    segments: tuple[Segment, ...]


class ChatTemplates:
    """The templates of one model. `render` is for the event loop; `encode` blocks and is for a thread."""

    def __init__(
        self, metadata: Mapping[str, object], tokenizer: Tokenizer, *, deadline_s: float = 5.0
    ) -> None:
        self.sources = template_sources(metadata)
        self.is_default = not self.sources
        if self.is_default:
            log.warning("event=chat_template_missing key=%s using=chatml", _KEY)
            self.sources = {"default": CHATML}
        self._tokenizer = tokenizer
        self._finder = NameFinder(tokenizer.control_names)
        self._process = TemplateProcess(self.sources, deadline_s=deadline_s)

    @property
    def source(self) -> str:
        """The text of the template used without tools."""
        return self.sources[self._choose(None, tools=False)]

    async def start(self) -> None:
        """Starts the rendering process. Call it before readiness, so that the first chat is not slow."""
        await self._process.start()

    def close(self) -> None:
        self._process.close()

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **kwargs: Any,
    ) -> RenderedChat:
        """The prompt for OpenAI-shaped `messages`. `template` names a variant; `kwargs` go to the template.

        ClientError 400 when the template does not compile, refuses (`raise_exception`, with its message),
        fails, or takes too long or too much memory.
        """
        name = self._choose(template, tools=bool(tools))
        if tools and not knows_tools(self.sources[name]):
            messages, tools = _instructed(messages, tools), None
        given: dict[str, Any] = {**kwargs, "messages": [self._message(m) for m in messages]}
        given["tools"] = list(tools) if tools else None
        try:
            marks = choose_marks(self._finder, given)
            forms = [given] if marks is None else [marks.lenient(given, self._finder), marks.strict(given)]
        except (RecursionError, ValueError) as error:
            raise ClientError(400, f"messages cannot be rendered: {error}", param="messages") from error
        fixed = {"add_generation_prompt": add_generation_prompt, **self._special_tokens()}
        answers = await self._process.render(name, [{**fixed, **form} for form in forms])
        texts = [_text(answer) for answer in answers]
        if marks is None:
            return self._rendered(texts[0], None)
        return self._rendered(self._safe(texts[0], texts[1], marks), marks)

    def encode(self, rendered: RenderedChat) -> list[int]:
        """Ids of the prompt; the beginning token once. Blocks: call it from a thread."""
        return self._tokenizer.encode_segments(rendered.segments)

    def _safe(self, lenient: str, strict: str, marks: Marks) -> str:
        """The form to use: the lenient one only if it shows the template's control tokens and no others."""
        if marks.restore(lenient) == marks.restore(strict):
            return strict
        names = [[t[a:b] for a, b in self._finder.find(t)] for t in (lenient, strict)]
        return lenient if names[0] == names[1] else strict

    def _rendered(self, text: str, marks: Marks | None) -> RenderedChat:
        restore = marks.restore if marks is not None else str
        segments: list[Segment] = []
        end = 0
        for start, stop in self._finder.find(text):
            if start > end:
                segments.append((restore(text[end:start]), False))
            segments.append((text[start:stop], True))
            end = stop
        if end < len(text):
            segments.append((restore(text[end:]), False))
        return RenderedChat(restore(text), tuple(segments))

    def _choose(self, asked: str | None, *, tools: bool) -> str:
        if asked is not None:
            if asked not in self.sources:
                raise ClientError(400, f"the model has no chat template {asked!r}", param="template")
            return asked
        if tools and _TOOL_TEMPLATE in self.sources:
            return _TOOL_TEMPLATE
        return "default" if "default" in self.sources else next(iter(self.sources))

    def _special_tokens(self) -> dict[str, str]:
        ids = {"bos_token": self._tokenizer.bos_id, "eos_token": self._tokenizer.eos_id}
        ids["unk_token"] = self._tokenizer.unk_id
        return {name: "" if i is None else self._tokenizer.token_text(i) for name, i in ids.items()}

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """One message as templates expect it: text content, arguments of calls as objects."""
        role = message.get("role")
        if not isinstance(role, str) or not 0 < len(role) <= 64:
            raise ClientError(400, "every message needs a role", param="messages")
        if role not in _ROLES and any(role in name for name in self._tokenizer.control_names):
            raise ClientError(400, f"{role!r} is not a role", param="messages")  # '<|' + role + '|>'
        changed: dict[str, Any] = {**message, "content": _content(message.get("content"))}
        if calls := message.get("tool_calls"):
            if not isinstance(calls, Sequence) or not all(isinstance(c, Mapping) for c in calls):
                raise ClientError(400, "tool_calls is not a list of objects", param="messages")
            changed["tool_calls"] = [_call(call) for call in calls]
        return changed


def template_sources(metadata: Mapping[str, object]) -> dict[str, str]:
    """Template texts: `tokenizer.chat_template` is "default", `tokenizer.chat_template.NAME` is NAME."""
    sources = {}
    for key in metadata:
        name = "default" if key == _KEY else key.removeprefix(_KEY + ".")
        if name != key:
            value = metadata[key]
            if isinstance(value, str) and value:
                sources[name] = value
    return sources


def _instructed(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The messages with the tools explained in the system message, for templates that know none."""
    text = instructions(tools)
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{_content(messages[0].get('content'))}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _text(answer: Mapping[str, str]) -> str:
    if "text" in answer:
        return answer["text"]
    prefix = {
        "compile": "the model's chat template does not compile: ",
        "failed": "the model's chat template failed: ",
        "raised": "",
    }[answer["kind"]]
    raise ClientError(400, prefix + answer["error"], param="messages")


def _content(content: Any) -> str:
    """Content as text: parts are joined by newlines; none is the empty text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ClientError(400, "content is neither a string nor a list of parts", param="messages")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise ClientError(400, "only text parts can be handled", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object where they are the text of one."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}
