"""What is fuzzed: functions of bytes that raise only when the product is at fault.

A refusal (GGUFError, ClientError, a template's own failure) is a right answer; any other exception, a result
that breaks a promise, or time without end is a find.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from streamer.engine.request import TokenEvent
from streamer.errors import ClientError, GGUFError
from streamer.gguf.reader import read_directory
from streamer.models.registry import describe
from streamer.server.api.anthropic import read_anthropic
from streamer.server.api.body import decode_object
from streamer.server.api.chat import read_chat
from streamer.server.api.completions import read_completion
from streamer.server.api.embeddings import read_embedding
from streamer.server.api.llamacpp import read_detokenize, read_native_completion, read_tokenize
from streamer.server.api.responses import read_response
from streamer.server.chatparse import ChatParser
from streamer.server.pieces import TokenText
from streamer.server.sse import data_frame
from streamer.text.detokenizer import Detokenizer, StopMatcher
from streamer.text.reasoning import ReasoningSplitter
from streamer.text.template_worker import Renderer
from streamer.text.tokenizer import Tokenizer, build_tokenizer
from streamer.text.tools import ToolCallParser, choose_form
from streamer.text.vocabulary import read_vocabulary

MOST_TEXT = 4096


class Bytes:
    """Choices taken from the front of the input; zeros once it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, n: int) -> bytes:
        taken = self._data[self._at : self._at + n]
        self._at += n
        return taken

    def byte(self) -> int:
        return (self.take(1) or b"\0")[0]

    def number(self) -> int:
        return int(struct.unpack("<q", self.take(8).ljust(8, b"\0"))[0])

    def text(self) -> str:
        return self.take(self.byte() % 24).decode("utf-8", "replace")

    def rest(self) -> bytes:
        return self._data[self._at :]

    @property
    def is_empty(self) -> bool:
        return self._at >= len(self._data)


def header(data: bytes) -> None:
    """A file of these bytes: a directory whose tensors lie inside it, or GGUFError; so for a model."""
    descriptor = os.memfd_create("fuzz")
    try:
        os.write(descriptor, data)
        path = f"/proc/self/fd/{descriptor}"
        try:
            directory = read_directory(path)
        except GGUFError as refusal:
            _one_line(refusal)
            return
        for tensor in directory.tensors.values():
            assert tensor.offset + tensor.nbytes <= len(data)
            assert tensor.offset % directory.alignment == 0
        for key in directory.metadata:
            directory.metadata.get(key)
        try:
            describe(directory)
            read_vocabulary(directory.metadata, path)
        except GGUFError as refusal:
            _one_line(refusal)
    finally:
        os.close(descriptor)


def _one_line(refusal: GGUFError) -> None:
    assert "\n" not in str(refusal)


KEYS = (
    "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id",
    "eot_token_id", "padding_token_id", "unknown_token_id", "add_bos_token", "add_eos_token",
    "add_space_prefix",
)  # fmt: skip
WORDS = (
    "gpt2",
    "llama",
    "bert",
    "default",
    "qwen2",
    "llama-bpe",
    "<s>",
    "</s>",
    "<|im_end|>",
    "<0x0A>",
    "▁",
    "Ġ",
)


def vocabulary(data: bytes) -> None:
    """Any values under the tokenizer's keys: a tokenizer that loses no text, or GGUFError."""
    source = Bytes(data)
    metadata = {f"tokenizer.ggml.{name}": value for name, value in _values(source)}
    text = source.rest()[:MOST_TEXT].decode("utf-8", "replace")
    try:
        tokenizer = build_tokenizer(metadata, path="fuzz")
    except GGUFError as refusal:
        _one_line(refusal)
        return
    try:
        ids = tokenizer.encode(text)
        again = "".join(map(tokenizer.decode, [ids]))
        assert isinstance(again, str)
        for token_id in ids:
            tokenizer.token_bytes(token_id)
    finally:
        tokenizer.close()


def _values(source: Bytes) -> Iterator[tuple[str, Any]]:
    for _ in range(source.byte() % 16):
        name = KEYS[source.byte() % len(KEYS)]
        yield name, _value(source, source.byte() % 7)


def _value(source: Bytes, kind: int) -> Any:
    n = source.byte() % 48
    match kind:
        case 0:
            return source.number()
        case 1:
            return bool(source.byte() & 1)
        case 2:
            return WORDS[source.byte() % len(WORDS)]
        case 3:
            return [WORDS[b % len(WORDS)] if b < 128 else chr(b) for b in source.take(n)]
        case 4:
            return [source.text() for _ in range(n)]
        case 5:
            return np.frombuffer(source.take(n), np.int8).astype(np.int32)
        case _:
            return np.frombuffer(source.take(4 * n).ljust(4 * n, b"\0"), np.float32)


def template(data: bytes) -> None:
    """A template's text: an answer of the documented shape, whatever it does."""
    variables = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}],
        "tools": None,
        "add_generation_prompt": True,
        "bos_token": "<s>",
    }
    answer = Renderer({"t": data[:MOST_TEXT].decode("utf-8", "replace")}).answer("t", variables)
    assert set(answer) in ({"text"}, {"error", "kind"})
    json.dumps([answer])  # as it travels


READERS: tuple[Callable[[dict[str, Any]], Any], ...] = (
    read_chat, read_completion, read_anthropic, read_response, read_embedding, read_tokenize, read_detokenize,
    read_native_completion,
)  # fmt: skip


def request(data: bytes) -> None:
    """A body, read by every API: a call, or ClientError 400 whose text can be sent."""
    try:
        body = decode_object(data)
    except ClientError as refusal:
        _sendable(refusal)
        return
    for read in READERS:
        try:
            read(dict(body))
        except ClientError as refusal:
            _sendable(refusal)


def _sendable(refusal: ClientError) -> None:
    assert refusal.status == 400, refusal
    assert len(refusal.message) < 2000
    data_frame({"error": refusal.message}).decode()


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    """Bytes that begin and continue characters, letters, the words that calls and thoughts are made of."""
    letters = [
        *"abcdefghij <>/{}[]():,.\"'_=|",
        "tool_call",
        "name",
        "arguments",
        "think",
        "\n",
        "f",
        "x",
        "▁",
    ]
    tokens = ["<unk>", "<s>", "</s>", "<|im_end|>", *(f"<0x{b:02X}>" for b in range(128, 256)), *letters]
    types = [2, 3, 3, 3, *[6] * 128, *[1] * len(letters)]
    metadata = {"model": "llama", "tokens": tokens, "token_type": np.array(types, np.int32)}
    metadata["scores"] = np.zeros(len(tokens), np.float32)
    return build_tokenizer({f"tokenizer.ggml.{k}": v for k, v in metadata.items()}, path="fuzz")


TAGS = ("", "<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<function=")
TOOLS = (
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}},
)


def stream(data: bytes) -> None:
    """Ids to text to events: pieces join to the whole, no stop string leaks, every frame is UTF-8 JSON."""
    source = Bytes(data)
    tokenizer = _tokenizer()
    n_vocab = len(tokenizer.ids_by_text)
    stops = tuple(filter(None, (source.text() for _ in range(source.byte() % 4))))
    form = choose_form(TAGS[source.byte() % len(TAGS)])
    ids = [b % n_vocab for b in source.rest()[:512]]
    shown = TokenText(Detokenizer(tokenizer), tokenizer, StopMatcher(stops), with_logprobs=False)
    parser = ChatParser(ReasoningSplitter(), ToolCallParser(form, TOOLS))
    said, deltas = [], []
    for at in range(0, len(ids), 3):
        piece = shown.push([TokenEvent(i) for i in ids[at : at + 3]])
        said.append(piece.text)
        deltas.append(parser.push(piece.text))
    last = shown.finish()
    said.append(last.text)
    deltas += [parser.push(last.text), parser.finish()]
    _check_stream(tokenizer, ids, stops, "".join(said))
    for delta in deltas:
        frame = data_frame({"content": delta.content, "reasoning": delta.reasoning}).decode("utf-8", "strict")
        assert frame.startswith("data: ")
        assert "\n" not in frame[:-2]
        for call in delta.calls:
            assert isinstance(json.loads(call.arguments), dict)


def _check_stream(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...], said: str) -> None:
    """The text ends before the stop string that is complete first; of two at once the longer counts."""
    whole = tokenizer_text(tokenizer, ids)
    for end in range(1, len(whole) + 1):
        found = max((s for s in stops if whole.endswith(s, 0, end)), key=len, default=None)
        if found is not None:
            assert said == whole[: end - len(found)]
            return
    assert said == whole


def tokenizer_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    raw = b"".join(tokenizer.token_bytes(i) for i in ids if not tokenizer.is_control(i))
    return raw.decode("utf-8", "replace")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "header": header,
    "vocabulary": vocabulary,
    "template": template,
    "request": request,
    "stream": stream,
}
