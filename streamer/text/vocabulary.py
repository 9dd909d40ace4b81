"""A vocabulary as the file's metadata states it, checked. Pure; names the key at fault in every refusal."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from streamer.errors import GGUFError
from streamer.gguf.cursor import quoted
from streamer.gguf.metadata import Metadata
from streamer.text.pretokenizers import PRETOKENIZERS

log = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_NO_ID = 0xFFFFFFFF  # some converters write "none" as -1 in an unsigned key

# What building an encoder may cost. The largest known vocabulary (gemma's, 262,144 tokens) has 11 million and
# 60 thousand.
MAX_SPM_WORK = 1 << 25  # sum of squared lengths: cutting a token everywhere copies it once a character
MAX_NAMED_CHARS = 1 << 20  # of tokens searched for in text: 70 bytes and 2 us a character, up to three times

# Tokens that end a turn or an answer whatever type the file gives them ...
_END_NAMES = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
    }
    | {"<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<|end_of_turn|>", "<end_of_utterance>", "<turn|>"}
    | {"<｜end▁of▁sentence｜>", "[e~["}
)
# ... and those that may be ordinary text (</s> is also HTML) unless the file says they are control tokens.
_CONTROL_END_NAMES = frozenset(
    {"</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"}
    | {"<|fim_pad|>", "<|fim_repo|>", "<|repo_name|>", "<|file_sep|>"}
)
_SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown"}
_UNUSED_SPECIAL_KEYS = ("padding", "seperator", "mask")
_SPM_DEFAULTS = {"bos": 1, "eos": 2, "unk": 0}


@dataclass(frozen=True)
class Vocabulary:
    """Everything the encoder, the detokenizer and the chat need to know of the tokens."""

    kind: str  # "bpe" (byte-level) | "spm"
    pre: str  # row of PRETOKENIZERS; "default" for spm
    tokens: Sequence[str]  # as the file writes them, by id
    types: np.ndarray  # (n_tokens,) uint8
    scores: np.ndarray | None  # (n_tokens,) float32, spm only
    merges: Sequence[str]  # "left right", by rank, bpe only
    special_ids: Mapping[str, int]  # bos, eos, eot, eom, unk where the file has them
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        return frozenset(np.flatnonzero((self.types == CONTROL) | (self.types == UNKNOWN)).tolist())

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids after which an answer is over: from metadata and by name."""
        ids = {self.special_ids[k] for k in ("eos", "eot", "eom") if k in self.special_ids}
        names = _END_NAMES | _CONTROL_END_NAMES
        named = {self.tokens[i]: i for i in sorted(self.control_ids) if self.tokens[i] in names}
        ids.update(named.values())
        harmony = {"<|call|>", "<|calls|>"} & named.keys() and {"<|return|>", "<|flush|>"} & named.keys()
        if harmony and "<|end|>" in named:  # there it ends a message, not the answer
            ids.discard(named["<|end|>"])
        return frozenset(ids)


class _Reader:
    """Typed access to the tokenizer's keys. `warnings` are said once nothing is refused any more."""

    def __init__(self, metadata: Mapping[str, object], path: str) -> None:
        self.metadata, self.path = metadata, path
        self.warnings: list[tuple[str, tuple[object, ...]]] = []

    def warn(self, message: str, *values: object) -> None:
        self.warnings.append((message, values))

    def refuse(self, key: str, reason: str) -> GGUFError:
        return GGUFError(self.path, f"tokenizer.ggml.{key}", reason)

    def get(self, key: str) -> object:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def length(self, key: str) -> int | None:
        """Of an array that is not made for it; None when absent or no array of a file."""
        metadata = self.metadata
        return metadata.length(f"tokenizer.ggml.{key}") if isinstance(metadata, Metadata) else None

    def scalar(self, key: str) -> object:
        if (length := self.length(key)) is not None:
            raise self.refuse(key, f"expected one value, found an array of {length}")
        return self.get(key)

    def string(self, key: str) -> str | None:
        value = self.scalar(key)
        if value is not None and not isinstance(value, str):
            raise self.refuse(key, f"expected a string, found {type(value).__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.scalar(key)
        if value is None:
            return default
        if not isinstance(value, bool | np.bool_):
            raise self.refuse(key, f"expected a boolean, found {type(value).__name__}")
        return bool(value)

    def strings(self, key: str) -> Sequence[str] | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, np.ndarray) and value.size == 0:
            return []
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.refuse(key, "expected an array of strings")
        if any(type(v) is not str for v in value):
            raise self.refuse(key, "expected an array of strings")
        return value

    def numbers(self, key: str, n: int) -> np.ndarray | None:
        length = self.length(key)
        if length is not None and length != n:
            raise self.refuse(key, f"has {length} entries for {n} tokens")
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, list) and not all(isinstance(item, int | float) for item in value):
            value = None  # as an array every text would take as much as the longest one
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise self.refuse(key, "expected an array of numbers")
        if len(array) != n:
            raise self.refuse(key, f"has {len(array)} entries for {n} tokens")
        return array

    def token_id(self, key: str, n: int) -> int | None:
        value = self.scalar(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise self.refuse(key, f"expected an integer, found {type(value).__name__}")
        if value in (-1, _NO_ID):
            return None
        if not 0 <= value < n:
            raise self.refuse(key, f"{int(value)} is outside the {n} tokens")
        return int(value)


def read_vocabulary(metadata: Mapping[str, object], path: str = "model") -> Vocabulary:
    """Checks and collects `tokenizer.ggml.*`. Raises GGUFError naming the key at fault."""
    reader = _Reader(metadata, path)
    kind = _kind(reader)
    pre = _pre(reader, kind)
    tokens = reader.strings("tokens")
    if not tokens:
        raise reader.refuse("tokens", "missing or empty")
    types = _types(reader, kind, tokens)
    _refuse_costly(reader, kind, tokens, types)
    special_ids = _special_ids(reader, kind, len(tokens))
    merges = _merges(reader, tokens, types) if kind == "bpe" else []
    scores = _scores(reader, len(tokens)) if kind == "spm" else None
    row = PRETOKENIZERS[pre]
    vocabulary = Vocabulary(
        kind=kind,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=scores,
        merges=merges,
        special_ids=special_ids,
        add_bos=_adds(reader, "bos", special_ids, default=kind == "spm" or row.add_bos),
        add_eos=_adds(reader, "eos", special_ids, default=False),
        add_space_prefix=reader.flag("add_space_prefix", kind == "spm") and kind == "spm",
    )
    for message, values in reader.warnings:
        log.warning(message, *values)
    return vocabulary


def _kind(reader: _Reader) -> str:
    kinds = {"gpt2": "bpe", "llama": "spm"}
    model = reader.string("model")
    if model is None:
        raise reader.refuse("model", "missing")
    if model not in kinds:
        raise reader.refuse("model", f"{quoted(model)} is not one of {', '.join(kinds)}")
    return kinds[model]


def _pre(reader: _Reader, kind: str) -> str:
    pre = reader.string("pre")
    if kind == "spm":  # it has no word splitter; files say "default" or nothing
        return "default"
    if pre is None:
        reader.warn("event=pretokenizer_missing key=tokenizer.ggml.pre using=default")
        return "default"
    if pre not in PRETOKENIZERS:
        raise reader.refuse("pre", f"unknown pre-tokenizer {quoted(pre)}")
    return pre


def _types(reader: _Reader, kind: str, tokens: Sequence[str]) -> np.ndarray:
    array = reader.numbers("token_type", len(tokens))
    if array is None:
        types = np.full(len(tokens), NORMAL, np.uint8)
        if kind == "spm":
            types[[i for i, t in enumerate(tokens) if _BYTE_TOKEN.match(t)]] = BYTE
    elif array.dtype.kind not in "iu" or (array.size and not 0 <= array.min() <= array.max() <= BYTE):
        raise reader.refuse("token_type", f"a type is outside 0..{BYTE}")
    else:
        types = array.astype(np.uint8)
    for i in np.flatnonzero(types == BYTE).tolist():
        if not _BYTE_TOKEN.match(tokens[i]):
            name = quoted(tokens[i], 40)
            raise reader.refuse("tokens", f"token {i} {name} is of type byte but is no <0xNN>")
    named = [i for i, t in enumerate(tokens) if t in _END_NAMES and types[i] != CONTROL]
    for i in named:
        reader.warn("event=end_token_not_control id=%d token=%r treated_as=control", i, tokens[i])
        types[i] = CONTROL
    return types


def _refuse_costly(reader: _Reader, kind: str, tokens: Sequence[str], types: np.ndarray) -> None:
    """Refuse tokens so long that building their encoder would take minutes or gigabytes."""
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    named = lengths[np.isin(types, (UNKNOWN, CONTROL, USER_DEFINED))].sum()
    if named > MAX_NAMED_CHARS:
        raise reader.refuse(
            "tokens", f"control and user-defined tokens have {named} characters, over {MAX_NAMED_CHARS}"
        )
    merged = np.where(np.isin(types, (NORMAL, USER_DEFINED)), lengths, 0)
    if kind == "spm" and (merged * merged).sum() > MAX_SPM_WORK:
        longest = int(merged.argmax())
        raise reader.refuse(
            "tokens",
            f"are too long to look for their merges (the longest, token {longest}, has {merged[longest]} "
            f"characters; the sum of squares may be {MAX_SPM_WORK})",
        )


def _special_ids(reader: _Reader, kind: str, n: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, key in _SPECIAL_KEYS.items():
        key = f"{key}_token_id"
        value = reader.token_id(key, n)
        if value is None and kind == "spm" and reader.get(key) is None:
            default = _SPM_DEFAULTS.get(name)
            value = default if default is not None and default < n else None
        if value is not None:
            found[name] = value
    for key in _UNUSED_SPECIAL_KEYS:
        try:
            reader.token_id(f"{key}_token_id", n)
        except GGUFError as error:
            reader.warn("event=special_token_ignored reason=%r", str(error))
    return found


def _adds(reader: _Reader, name: str, special_ids: Mapping[str, int], *, default: bool) -> bool:
    key = f"add_{name}_token"
    adds = reader.flag(key, default)
    if adds and name not in special_ids:
        if reader.get(key) is not None:
            raise reader.refuse(key, f"is true, but tokenizer.ggml.{name}_token_id is not set")
        return False
    return adds


def _scores(reader: _Reader, n: int) -> np.ndarray:
    scores = reader.numbers("scores", n)
    if scores is None:
        reader.warn("event=scores_missing key=tokenizer.ggml.scores using=0")
        return np.zeros(n, np.float32)
    scores = scores.astype(np.float32)
    if np.isnan(scores).any():
        raise reader.refuse("scores", f"token {int(np.isnan(scores).argmax())} has the score NaN")
    return scores


def _merges(reader: _Reader, tokens: Sequence[str], types: np.ndarray) -> Sequence[str]:
    merges = reader.strings("merges")
    if merges is None:
        if any(len(t) > 1 and types[i] == NORMAL for i, t in enumerate(tokens)):
            raise reader.refuse("merges", "missing")
        return []
    for i, merge in enumerate(merges):
        if not 0 < merge.find(" ", 1) < len(merge) - 1:
            raise reader.refuse("merges", f"entry {i} {quoted(merge, 40)} is not two tokens")
    return merges
