"""The tokenizer of a model: ids, bytes, control tokens. Built from metadata alone."""

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from streamer.errors import ClientError, GGUFError
from streamer.gguf.cursor import shown
from streamer.text.encoder import Encoder, EncoderSpec, Segment, bytes_of_token
from streamer.text.encoder_process import EncoderProcess
from streamer.text.vocabulary import Vocabulary, read_vocabulary

_BLOCK_IDS = 1 << 16
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_LOCAL = 20_000  # tokens and merges; building more here would hold the interpreter lock for over 20 ms


class Encodes(Protocol):
    """Encodes here or in another process."""

    def encode(self, segments: Sequence[Segment]) -> "array[int]": ...
    def close(self) -> None: ...


class Tokenizer:
    """Text to ids and back. Thread-safe. `encode` waits for its process: use a thread for long text."""

    def __init__(self, vocabulary: Vocabulary, encoder: Encodes) -> None:
        self.vocabulary = vocabulary
        self._encoder = encoder
        self._bytes: dict[int, bytes] = {}
        self.n_tokens = vocabulary.n_tokens
        self.bos_id = vocabulary.special_ids.get("bos")
        self.eos_id = vocabulary.special_ids.get("eos")
        self.eot_id = vocabulary.special_ids.get("eot")
        self.unk_id = vocabulary.special_ids.get("unk")
        self.add_bos, self.add_eos = vocabulary.add_bos, vocabulary.add_eos
        self.add_space_prefix = vocabulary.add_space_prefix
        self.end_ids = vocabulary.end_ids

    def __repr__(self) -> str:
        v = self.vocabulary
        return (
            f"Tokenizer(kind={v.kind}, pre={v.pre}, n_tokens={self.n_tokens}, end_ids={sorted(self.end_ids)})"
        )

    def close(self) -> None:
        """Ends the encoder's process, if any. Idempotent; also happens when nothing refers to it."""
        self._encoder.close()

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`. `add_special`: beginning (and end) token as the model wants it, never a second time.

        `parse_special`: names of control tokens in the text become those tokens; for trusted text only.
        """
        return self.encode_segments([(text, parse_special)], add_special=add_special)

    def encode_segments(self, segments: Sequence[Segment], *, add_special: bool = True) -> list[int]:
        """Ids of segments that are trusted (True) or not (False), in order; each is merged on its own."""
        found = self._encoder.encode([(_scalar_values(text), parse) for text, parse in segments])
        ids: list[int] = []
        for start in range(0, len(found), _BLOCK_IDS):  # not in one call, which would hold the lock
            ids += found[start : start + _BLOCK_IDS]
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_special and self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD. `special`: control tokens are shown by name.

        The space that `encode` put before an SPM text's first word is taken away. ClientError 400 for
        unknown ids.
        """
        shown = [i for i in ids if special or not self.is_control(i)]
        data = b"".join(map(self.token_bytes, shown))
        if self.add_space_prefix and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; a control token's are its name. ClientError 400 for an unknown id."""
        data = self._bytes.get(token_id)
        if data is None:
            text, kind = self.token_text(token_id), int(self.vocabulary.types[token_id])
            data = bytes_of_token(self.vocabulary.kind == "spm", text, kind)
            self._bytes[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        """The token as the file writes it."""
        return self.vocabulary.tokens[self._checked(token_id)]

    def is_control(self, token_id: int) -> bool:
        return self._checked(token_id) in self.vocabulary.control_ids

    @cached_property
    def ids_by_text(self) -> Mapping[str, int]:
        return {text: i for i, text in enumerate(self.vocabulary.tokens)}

    @cached_property
    def control_names(self) -> tuple[str, ...]:
        """What the names of control tokens look like in text, longest first."""
        names = {self.vocabulary.tokens[i] for i in self.vocabulary.control_ids} - {""}
        return tuple(sorted(names, key=lambda name: (-len(name), name)))

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.n_tokens:
            raise ClientError(400, f"token id {token_id} is outside the vocabulary of {self.n_tokens}")
        return token_id


def build_tokenizer(metadata: Mapping[str, object], *, path: str | None = None) -> Tokenizer:
    """The tokenizer that `tokenizer.ggml.*` describes. Raises GGUFError naming the key at fault.

    Blocks for up to a second or two of CPU, nearly all of it in another process when the vocabulary is big:
    the interpreter lock is held for tens of milliseconds at most.
    """
    path = path or str(getattr(metadata, "path", "model"))  # only for messages
    vocabulary = read_vocabulary(metadata, path)
    spec = encoder_spec(vocabulary)
    try:
        if len(spec.tokens) + len(spec.merges) <= _MAX_LOCAL:
            return Tokenizer(vocabulary, Encoder(spec))
        return Tokenizer(vocabulary, EncoderProcess(spec))
    except ValueError as error:
        raise GGUFError(
            path, "tokenizer.ggml.tokens", f"no encoder can be built: {shown(str(error), 200)}"
        ) from error


def encoder_spec(vocabulary: Vocabulary) -> EncoderSpec:
    scores = vocabulary.scores
    unk = vocabulary.special_ids.get("unk", -1)  # what no token spells; it must not end an answer
    return EncoderSpec(
        kind=vocabulary.kind,
        pre=vocabulary.pre,
        tokens=list(vocabulary.tokens),
        types=vocabulary.types.astype(np.uint8).tobytes(),
        scores=b"" if scores is None else scores.astype(np.float32).tobytes(),
        merges=list(vocabulary.merges),
        add_space_prefix=vocabulary.add_space_prefix,
        unk_id=-1 if unk in vocabulary.end_ids else unk,
    )


def _scalar_values(text: str) -> str:
    """The text without lone surrogates (JSON can spell them), which are no characters."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
