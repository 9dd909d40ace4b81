"""Text to ids over the `tokenizers` library. Imported by the encoder's own process, so it imports little.

Building holds the interpreter lock for up to 0.6 s (the library builds its tables in one call), which is why
big vocabularies are encoded in a process of their own (encoder_process.py). Encoding releases it.
"""

import itertools
import marshal
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from streamer.text.pretokenizers import PRETOKENIZERS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
PIECE_CHARS = (
    1 << 17
)  # what one call of the library gets: bounds its memory (about 100 bytes a token) and its words
_SOFT_CUT = re.compile(r"[A-Za-z] (?=[A-Za-z])")  # every splitter of the table starts a word at such a space
_MAX_SPLIT_EXCEPTIONS = 64

_BLOCK_STRINGS = 1 << 15

Segment = tuple[str, bool]  # text, and whether the names of control tokens in it become those tokens


@dataclass(frozen=True)
class EncoderSpec:
    """What building needs, in types that marshal."""

    kind: str  # "bpe" | "spm"
    pre: str
    tokens: list[str]
    types: bytes  # one a token
    scores: bytes  # float32, one a token; spm
    merges: list[str]  # bpe
    add_space_prefix: bool
    unk_id: int  # -1: none

    def blocks(self) -> Iterator[bytes]:
        """The spec as bytes, in blocks small enough that none holds the interpreter lock for long."""
        head = (self.kind, self.pre, self.types, self.scores, self.add_space_prefix, self.unk_id)
        yield marshal.dumps(head)
        for strings in (self.tokens, self.merges):
            yield marshal.dumps(len(strings))
            for start in range(0, len(strings), _BLOCK_STRINGS):
                yield marshal.dumps(strings[start : start + _BLOCK_STRINGS])

    @staticmethod
    def load(file: BinaryIO) -> "EncoderSpec":
        """The spec whose blocks a file holds."""
        kind, pre, types, scores, add_space_prefix, unk_id = marshal.load(file)
        lists: list[list[str]] = []
        for _ in range(2):
            strings: list[str] = []
            n = marshal.load(file)
            while len(strings) < n:
                strings += marshal.load(file)
            lists.append(strings)
        return EncoderSpec(kind, pre, lists[0], types, scores, lists[1], add_space_prefix, unk_id)


class Encoder:
    """Encodes segments of one text. Thread-safe: nothing is changed after building."""

    def __init__(self, spec: EncoderSpec) -> None:
        types = spec.types
        names = _model_names(spec.tokens)
        self._prefix = spec.add_space_prefix
        # a renamed one is a repetition: its text is the first one's, of whatever type that is
        kept = [(t, k) for t, k, name in zip(spec.tokens, types, names, strict=True) if t == name]
        control = [t for t, k in kept if k in (CONTROL, UNKNOWN)]
        defined = [t for t, k in kept if k == USER_DEFINED]
        build = _spm_model if spec.kind == "spm" else _bpe_model
        parsing_model = build(spec, names)
        hidden = _without_control_characters(names, types)
        model = parsing_model if hidden == names else build(spec, hidden)
        self._plain = self._tokenizer(spec, model, defined)
        self._parsing = self._tokenizer(spec, parsing_model, defined + control)
        self._continuing = (
            self._tokenizer(spec, model, defined, prefix=False) if self._prefix else self._plain
        )
        if getattr(model, "ignore_merges", False) and self._reaches_control(control, spec):
            model.ignore_merges = parsing_model.ignore_merges = False
        self._spaced = [t for t in defined + control if _SOFT_CUT.search(t)]

    def close(self) -> None:
        """Nothing to end: it lives in this process."""

    def encode(self, segments: Sequence[Segment]) -> "array[int]":
        """Ids of the segments in order. Linear in the text's length; memory bounded beyond the ids."""
        ids = array("I")
        for text, parse_special in segments:
            for piece, continues in self._pieces(text):
                tokenizer = self._parsing if parse_special else self._plain
                if continues and self._prefix:
                    if piece.startswith(" "):
                        piece = piece[1:]  # the library's prefix puts it back
                    else:
                        tokenizer = self._continuing
                ids.extend(tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0].ids)
        return ids

    def _pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """Cuts long text where a word begins; inside a word only where none begins for 64 Ki characters."""
        start = 0
        while len(text) - start > PIECE_CHARS:
            cut = self._cut(text, start + PIECE_CHARS // 2, start + PIECE_CHARS)
            yield text[start:cut], start > 0
            start = cut
        if start < len(text):
            yield text[start:], start > 0

    def _cut(self, text: str, low: int, high: int) -> int:
        for match in _SOFT_CUT.finditer(text, low, high):
            cut = match.end() - 1
            if not any(text.find(t, max(0, cut - len(t)), cut + len(t)) >= 0 for t in self._spaced):
                return cut
        return high

    def _tokenizer(
        self, spec: EncoderSpec, model: models.BPE, added: list[str], *, prefix: bool = True
    ) -> Tokenizer:
        tokenizer = Tokenizer(model)
        if spec.kind == "spm":
            mark = normalizers.Replace(" ", "▁")
            if prefix and self._prefix:
                tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark])
            else:
                tokenizer.normalizer = mark
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_spm_splits(spec))
        else:
            splits = [
                pre_tokenizers.Split(Regex(pattern), "isolated")
                for pattern in PRETOKENIZERS[spec.pre].patterns
            ]
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in added])
        return tokenizer

    def _reaches_control(self, control: list[str], spec: EncoderSpec) -> bool:
        """Whether plain text can become a control token because it is a whole word of the vocabulary."""
        ids = {i for i, k in enumerate(spec.types) if k in (CONTROL, UNKNOWN)}
        return any(not ids.isdisjoint(self.encode([(t, False)])) for t in control)


def _model_names(tokens: list[str]) -> list[str]:
    """The tokens with empty and repeated ones renamed: those are never the result of encoding."""
    seen: set[str] = set()
    names = []
    for i, token in enumerate(tokens):
        name = token if token and token not in seen else f"\0{i}"
        seen.add(name)
        names.append(name)
    return names


def _without_control_characters(names: list[str], types: bytes) -> list[str]:
    """Control tokens of one character renamed: a model starts from characters and would give their ids."""
    return [
        f"\0{i}" if kind == CONTROL and len(name) == 1 else name
        for i, (name, kind) in enumerate(zip(names, types, strict=True))
    ]


def _bpe_model(spec: EncoderSpec, names: list[str]) -> models.BPE:
    vocab = {name: i for i, name in enumerate(names)}
    mergeable = {name for name, k in zip(names, spec.types, strict=True) if k not in (CONTROL, UNKNOWN, BYTE)}
    merges = []
    for merge in spec.merges:
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if left in mergeable and right in mergeable and left + right in mergeable:
            merges.append((left, right))
    return models.BPE(vocab, merges, ignore_merges=PRETOKENIZERS[spec.pre].ignore_merges)


def _spm_model(spec: EncoderSpec, names: list[str]) -> models.BPE:
    """SentencePiece's BPE: any two neighbours whose join is a token merge, the best score first.

    Each token is cut everywhere: the vocabulary's bound on squared lengths bounds time and memory.
    """
    # by itself, so that a merge refers to the tokens and keeps no copies of them
    parts = {name: name for name, k in zip(names, spec.types, strict=True) if k in (NORMAL, USER_DEFINED)}
    worst_first = array("f", spec.scores).tolist()
    merges: list[tuple[str, str]] = []
    for i in sorted(range(len(names)), key=worst_first.__getitem__, reverse=True):
        name = names[i]
        if name in parts:
            for cut in range(1, len(name)):
                left = parts.get(name[:cut])
                if left is not None:
                    right = parts.get(name[cut:])
                    if right is not None:
                        merges.append((left, right))
    vocab = {name: i for i, name in enumerate(names)}
    unk = names[spec.unk_id] if spec.unk_id >= 0 else None
    return models.BPE(vocab, merges, unk_token=unk, fuse_unk=False, byte_fallback=True)


def _spm_splits(spec: EncoderSpec) -> list[pre_tokenizers.PreTokenizer]:
    """Cuts that no merge can cross, so that the library merges and caches short words, not one long one.

    A space mark begins a word unless some token has it after the character before; a newline stands alone
    unless some token has it beside another character.
    """
    before_mark: set[str] = set()
    newline_joins = False
    for token, kind in zip(spec.tokens, spec.types, strict=True):
        if kind not in (NORMAL, USER_DEFINED) or len(token) < 2:
            continue
        if "▁" in token[1:]:
            before_mark.update(a for a, b in itertools.pairwise(token) if b == "▁" and a != "▁")
        newline_joins = newline_joins or ("\n" in token and token.strip("\n") != "")
    splits: list[pre_tokenizers.PreTokenizer] = []
    if not newline_joins:
        splits.append(pre_tokenizers.Split(Regex(r"\n+"), "isolated"))
    if len(before_mark) <= _MAX_SPLIT_EXCEPTIONS:
        exceptions = "".join(f"\\x{{{ord(c):x}}}" for c in sorted(before_mark))
        splits.append(pre_tokenizers.Split(Regex(rf"(?<=[^▁{exceptions}])▁"), "merged_with_next"))
    return splits


def bytes_of_token(spm: bool, text: str, kind: int) -> bytes:
    """The exact bytes a token stands for; a control or user-defined token's are its name."""
    if kind == BYTE:
        return bytes([int(text[3:5], 16)])
    if kind not in (0, NORMAL, UNUSED):
        return text.encode()
    if spm:
        return text.replace("▁", " ").encode()
    try:
        return bytes(map(_BYTE_OF.__getitem__, text))
    except KeyError:  # not written in the byte alphabet
        return text.encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's choice)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
