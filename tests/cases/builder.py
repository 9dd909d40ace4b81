"""A model file packed by hand, so that every field can lie: a scripted llama of one layer.

The next token is a function of the last one: `chain[i]` is followed by `chain[i + 1]`.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = dict(zip((U8, I8, U16, I16, U32, I32, F32, BOOL, U64, I64, F64), "BbHhIif?Qqd", strict=True))
N = 64  # n_embd and rows of the logits
LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJ.!"
TOKENS = ("<unk>", "<s>", "</s>", "<|im_end|>", *(f"<0x{b:02X}>" for b in (0xF0, 0x9F, 0x98, 0x80)), *LETTERS)
TYPES = (2, 3, 3, 3, 6, 6, 6, 6, *[1] * len(LETTERS))
END = 2


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: float) -> bytes:
    return struct.pack("<" + CODES[kind], value)


def array(element: int, items: Sequence[bytes], length: int | None = None) -> bytes:
    return struct.pack("<IQ", element, len(items) if length is None else length) + b"".join(items)


def nested(depth: int) -> bytes:
    """An array of an array of ... of one u8, without the outer type."""
    return struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQB", U8, 1, 7)


@dataclass
class Tensor:
    name: str | bytes
    dims: tuple[int, ...]
    type: int = 0
    offset: int = 0

    def pack(self) -> bytes:
        head = text(self.name) + struct.pack(f"<I{len(self.dims)}Q", len(self.dims), *self.dims)
        return head + struct.pack("<IQ", self.type, self.offset)


@dataclass
class File:
    """`keys`: name -> (type, raw value). Change anything, then `write`."""

    keys: list[tuple[str | bytes, int, bytes]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    n_keys: int | None = None
    n_tensors: int | None = None
    alignment: int = 32
    after: bytes = b""  # more tensor records

    def key(self, name: str | bytes, kind: int, raw: bytes) -> "File":
        """Set or add a key."""
        self.keys = [k for k in self.keys if k[0] != name] + [(name, kind, raw)]
        return self

    def without(self, *names: str) -> "File":
        self.keys = [k for k in self.keys if k[0] not in names]
        self.tensors = [t for t in self.tensors if t.name not in names]
        return self

    def first_key(self, name: str | bytes, kind: int, raw: bytes) -> "File":
        self.keys.insert(0, (name, kind, raw))
        return self

    def tensor(self, name: str) -> Tensor:
        return next(t for t in self.tensors if t.name == name)

    def build(self) -> bytes:
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        head = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_keys)
        head += b"".join(text(name) + struct.pack("<I", kind) + raw for name, kind, raw in self.keys)
        head += b"".join(t.pack() for t in self.tensors) + self.after
        return head + bytes(-len(head) % self.alignment) + self.data if self.data else head

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path


Change = Callable[[File], object]


def scripted(
    chain: Sequence[int] = (), *, n_ctx: int = 256, norm: float = 1.0, endless: bool = False
) -> File:
    """`a` is followed by `b`, ..., `h` by the end (or by `a` again), unless another chain is given."""
    chain = chain or [*(TOKENS.index(c) for c in "abcdefgh"), END]
    if endless:
        chain = [token for token in chain if token != END]
    follow = dict(zip(chain, [*chain[1:], chain[0] if endless else END], strict=True))
    output = np.zeros((N, N), np.float32)  # (logit row, embedding)
    for last in range(N):
        output[follow.get(last, END), last] = 1.0
    file = File()
    _keys(file, n_ctx)
    eye, zero, ones = np.eye(N, dtype=np.float32), np.zeros((N, N), np.float32), np.full(N, norm, np.float32)
    named = {"token_embd": eye, "output_norm": ones, "output": output}
    named |= {f"blk.0.{x}": eye for x in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")}
    named |= {f"blk.0.{x}": zero for x in ("attn_output", "ffn_down")}
    named |= {f"blk.0.{x}": np.ones(N, np.float32) for x in ("attn_norm", "ffn_norm")}
    for name, values in named.items():
        file.tensors.append(Tensor(f"{name}.weight", values.shape[::-1], 0, len(file.data)))
        file.data += values.tobytes()
    return file


def _keys(file: File, n_ctx: int) -> None:
    file.key("general.architecture", STRING, text("llama"))
    counts = {"context_length": n_ctx, "embedding_length": N, "block_count": 1, "feed_forward_length": N}
    counts |= {"attention.head_count": 4, "rope.dimension_count": 16}
    for name, value in counts.items():
        file.key(f"llama.{name}", U32, scalar(U32, value))
    file.key("llama.attention.layer_norm_rms_epsilon", F32, scalar(F32, 1e-5))
    file.key("tokenizer.ggml.model", STRING, text("llama"))
    file.key("tokenizer.ggml.tokens", ARRAY, array(STRING, [text(t) for t in TOKENS]))
    file.key("tokenizer.ggml.token_type", ARRAY, array(I32, [scalar(I32, t) for t in TYPES]))
    scores = [scalar(F32, -float(i)) for i in range(len(TOKENS))]
    file.key("tokenizer.ggml.scores", ARRAY, array(F32, scores))
    file.key("tokenizer.ggml.bos_token_id", U32, scalar(U32, 1))
    file.key("tokenizer.ggml.eos_token_id", U32, scalar(U32, 2))
