"""Cases 1-14, 16, 25 and 30 through a whole `ggufd serve`: refused in one line, or loaded and answering.

The reader's own tests go through many more instances of each kind; here the whole process is what refuses.
"""

import os
import socket
import struct
import time
from pathlib import Path

import pytest
from case_builder import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    I64,
    STRING,
    TOKENS,
    U8,
    U16,
    U32,
    U64,
    Change,
    File,
    Tensor,
    array,
    nested,
    scalar,
    scripted,
    text,
)  # fmt: skip
from case_daemon import message, patient

BIG = 1 << 63
ALIGNMENT, PRE_MODEL = "general.alignment", "tokenizer.ggml.model"
SCALARS = (U8, U16, I32, F32, BOOL, U64, I64, F64)
A_TEXT = array(STRING, [text("a")])
LAST = "blk.0.ffn_norm.weight"
KV = "llama.attention.head_count_kv"


def only_key(file: File, kind: int, raw: bytes) -> None:
    """A file of nothing but this key."""
    file.keys, file.tensors, file.data = [("x", kind, raw)], [], b""


def moved(name: str, offset: int) -> Change:
    return lambda f: setattr(f.tensor(name), "offset", offset)


def typed(name: str, kind: int) -> Change:
    return lambda f: setattr(f.tensor(name), "type", kind)


def shaped(name: str, *dims: int) -> Change:
    return lambda f: setattr(f.tensor(name), "dims", dims)


def cut(n: int) -> Change:
    return lambda f: setattr(f, "data", f.data[:-n])


def vocabulary(f: File) -> None:
    f.tensors, f.data = [], b""


#  case: (id, change, words the one line must hold)
REFUSED: list[tuple[str, Change, tuple[str, ...]]] = [
    ("1 the 49 bytes", lambda f: only_key(f, ARRAY, array(U8, [], BIG)), ("x",)),
    *[
        (f"1 {kind}", lambda f, k=kind: f.first_key("x.y", ARRAY, array(k, [], BIG >> 1)), ("x.y",))
        for kind in (U16, I32, F32, BOOL, STRING, ARRAY, U64, F64)
    ],
    ("1 wraps to little", lambda f: f.first_key("x.y", ARRAY, array(U64, [], (1 << 61) + 1)), ("x.y",)),
    ("1 strings", lambda f: f.first_key("x.y", ARRAY, array(STRING, [text("a")], 1 << 40)), ("x.y",)),
    ("1 too many keys", lambda f: setattr(f, "n_keys", BIG), ()),
    ("1 too many tensors", lambda f: setattr(f, "n_tensors", BIG), ()),
    ("2 3000 deep", lambda f: f.first_key("x.y", ARRAY, nested(3000)), ("x.y",)),
    ("2 100000 deep at the end", lambda f: f.key("x.y", ARRAY, nested(100_000)), ("x.y",)),
    ("3 key length", lambda f: f.first_key(b"", U8, struct.pack("<Q", 1 << 48)), ()),
    ("3 string length", lambda f: f.first_key("x.y", STRING, struct.pack("<Q", 1 << 48)), ("x.y",)),
    ("3 scalar past the end", lambda f: only_key(f, U64, b"\0\0\0"), ("x",)),
    ("3 key not UTF-8", lambda f: f.first_key(b"x\xff", U8, b"\0"), ()),
    ("3 value not UTF-8", lambda f: f.first_key("x.y", STRING, text(b"\xc3\x28")), ("x.y",)),
    ("3 element not UTF-8", lambda f: f.first_key("x.y", ARRAY, array(STRING, [text(b"\x80")])), ("x.y",)),
    ("3 tensor name", lambda f: setattr(f.tensor(LAST), "name", b"blk.\xff"), ()),
    ("3 unknown value type", lambda f: f.first_key("x.y", 13, b""), ("x.y", "13")),
    *[
        (f"4 {n}", lambda f, n=n: f.first_key(ALIGNMENT, U32, scalar(U32, n)), ("alignment", str(n)))
        for n in (0, 24, 1 << 31 | 1)
    ],
    *[
        (f"4 {kind}", lambda f, k=kind: f.first_key(ALIGNMENT, k, scalar(k, 32)), ("alignment", "u32"))
        for kind in (U8, I32, U64, I64)
    ],
    ("4 text", lambda f: f.first_key(ALIGNMENT, STRING, text("32")), ("alignment",)),
    ("4 float", lambda f: f.first_key(ALIGNMENT, F32, scalar(F32, 32)), ("alignment",)),
    ("4 array", lambda f: f.first_key(ALIGNMENT, ARRAY, array(U32, [])), ("alignment",)),
    ("5 zero dimension", shaped(LAST, 0), (LAST,)),
    ("5 inner zero", shaped("output.weight", 64, 0), ("output.weight",)),
    ("5 no dimension", shaped(LAST), (LAST,)),
    ("5 five dimensions", shaped(LAST, 64, 1, 1, 1, 1), (LAST,)),
    ("6 product wraps", shaped("output.weight", 1 << 32, 1 << 32), ("output.weight",)),
    ("6 product wraps to 64", shaped("output.weight", 1 << 62, 4, 64), ("output.weight",)),
    ("6 bytes wrap", shaped("output.weight", 1 << 62), ("output.weight",)),
    ("7 past the end", moved(LAST, 1 << 20), (LAST,)),
    ("7 unaligned", moved(LAST, 4), (LAST,)),
    ("7 wraps", moved(LAST, (1 << 64) - 32), (LAST,)),
    ("7 overlaps", moved(LAST, 0), (LAST,)),
    ("8 1000 short", cut(1000), ("blk.0.ffn_down.weight", "bytes lack")),
    ("8 1 short", cut(1), (LAST,)),
    ("9 type 31", typed("output.weight", 31), ("output.weight", "31")),
    ("9 type 4", typed("output.weight", 4), ("output.weight", "4")),
    ("9 type 99", typed("output.weight", 99), ("output.weight", "99")),
    ("9 type 2^32-1", typed("output.weight", (1 << 32) - 1), ("output.weight",)),
    ("9 row of 64 in blocks of 256", typed("output.weight", 12), ("output.weight",)),
    ("10 tensor twice", lambda f: f.tensors.append(Tensor(LAST, (64,), 0, len(f.data))), (LAST,)),
    ("10 key twice", lambda f: f.first_key("llama.block_count", U32, scalar(U32, 1)), ("llama.block_count",)),
    ("11 version 1", lambda f: setattr(f, "version", 1), ("version 1",)),
    ("11 version 99", lambda f: setattr(f, "version", 99), ("99",)),
    ("11 version 0", lambda f: setattr(f, "version", 0), ("0",)),
    ("11 big-endian", lambda f: setattr(f, "version", 3 << 24), ("endian",)),
    ("12 other magic", lambda f: setattr(f, "magic", b"GGML"), ()),
    ("13 vocabulary", vocabulary, ("vocabulary",)),
    ("13 projector", lambda f: f.key("general.architecture", STRING, text("clip")), ("projector",)),
    ("13 projector by type", lambda f: f.key("general.type", STRING, text("mmproj")), ("projector",)),
    ("13 adapter", lambda f: f.key("general.type", STRING, text("adapter")), ("adapter",)),
    ("14 shard missing", lambda f: f.key("split.count", U16, scalar(U16, 2)), ()),
    ("19 unknown scaling", lambda f: f.key("llama.rope.scaling.type", STRING, text("x")), ("scaling",)),
    ("25 unknown pre", lambda f: bpe(f, "nobody-knows"), ("tokenizer.ggml.pre", "nobody-knows")),
    ("25 unknown model", lambda f: f.key(PRE_MODEL, STRING, text("bert")), (PRE_MODEL,)),
    ("25 ids out of range", lambda f: f.key("tokenizer.ggml.eos_token_id", U32, scalar(U32, 9999)), ("eos",)),
    ("25 endless token", lambda f: longer_tokens(f, 1_000_000), ("tokenizer.ggml.tokens", "1000000")),
    ("0 causal is text", lambda f: f.key("llama.attention.causal", STRING, text("no")), ("causal",)),
    ("0 a layer too many", lambda f: f.key(KV, ARRAY, array(U8, [b"\4"] * 1_000_000)), (KV, "1000000")),
    ("0 tensor of another model", lambda f: stray(f, "output_norm.bias"), ("output_norm.bias",)),
    ("0 names in two lines", lambda f: stray(f, "blk.0.x\n\x1b[2J"), (r"blk.0.x\n\x1b",)),
    ("0 a long name", lambda f: f.key("general.architecture", STRING, text("x" * 1_000_000)), ("xxx...",)),
    ("0 unknown architecture", lambda f: f.key("general.architecture", STRING, text("mamba9")), ("mamba9",)),
    ("0 no tensor of a layer", lambda f: f.without("blk.0.attn_q.weight"), ("blk.0.attn_q.weight",)),
    ("0 more layers than tensors", lambda f: f.key("llama.block_count", U32, scalar(U32, 4000)), ("blk.",)),
]  # fmt: skip


def longer_tokens(f: File, n: int) -> None:
    f.key("tokenizer.ggml.tokens", ARRAY, array(STRING, [text(t) for t in (*TOKENS[:-1], "a" * n)]))


def stray(f: File, name: str) -> None:
    """A tensor that nothing asks for."""
    f.tensors.append(Tensor(name, (8,), 0, len(f.data)))
    f.data += bytes(32)


def bpe(f: File, pre: str | None = None) -> None:
    f.key("tokenizer.ggml.model", STRING, text("gpt2")).without("tokenizer.ggml.scores")
    f.key("tokenizer.ggml.merges", ARRAY, array(STRING, []))
    plain = [t if len(t) == 1 and t != " " else f"t{i}" for i, t in enumerate(TOKENS)]
    f.key("tokenizer.ggml.tokens", ARRAY, array(STRING, [text(t) for t in plain]))
    types = [3 if 1 <= i <= 3 else 1 for i in range(len(plain))]
    f.key("tokenizer.ggml.token_type", ARRAY, array(I32, [scalar(I32, t) for t in types]))
    if pre is not None:
        f.key("tokenizer.ggml.pre", STRING, text(pre))


def wider(alignment: int) -> Change:
    def change(f: File) -> None:
        f.first_key(ALIGNMENT, U32, scalar(U32, alignment))
        f.alignment = alignment
        data = b""
        sizes = [4 * int(t.dims[0]) * (t.dims[1] if len(t.dims) > 1 else 1) for t in f.tensors]
        for tensor, nbytes in zip(f.tensors, sizes, strict=True):
            data += bytes(-len(data) % alignment)
            begin = tensor.offset
            tensor.offset = len(data)
            data += f.data[begin : begin + nbytes]
        f.data = data

    return change


LOADED: list[tuple[str, Change]] = [
    ("1 every type", lambda f: [f.first_key(f"x.{k}", ARRAY, array(k, [scalar(k, 1)] * 3)) for k in SCALARS]),
    ("1 empty arrays", lambda f: f.first_key("x.y", ARRAY, array(STRING, []))),
    ("2 nested once", lambda f: f.first_key("x.y", ARRAY, array(ARRAY, [array(U8, [b"\1"]), A_TEXT]))),
    ("2 nested thrice", lambda f: f.first_key("x.y", ARRAY, nested(3))),
    ("3 every language", lambda f: f.first_key("x.ключ", STRING, text("鍵 \U0001f511 \0"))),
    ("4 alignment 64", wider(64)),
    ("4 alignment 4096", wider(4096)),
    ("5 trailing ones", shaped(LAST, 64, 1, 1, 1)),
    ("7 any order", lambda f: f.tensors.reverse()),
    ("8 longer than needed", lambda f: setattr(f, "data", f.data + bytes(4096))),
    ("11 version 2", lambda f: setattr(f, "version", 2)),
    ("0 vision tower", lambda f: stray(f, "v.blk.0.attn_q.weight")),
    ("13 type model", lambda f: f.key("general.type", STRING, text("model"))),
    ("25 no pre", bpe),
    ("25 long token", lambda f: longer_tokens(f, 4000)),
    ("25 known pre", lambda f: bpe(f, "qwen2")),
    ("26 broken template", lambda f: f.key("tokenizer.chat_template", STRING, text("{% for"))),
]  # fmt: skip


def refused(launch, model: object, *options: str, words: tuple[str, ...] = (), names: object = None) -> str:
    """`serve` refuses: the line, which names the model's file or `names`."""
    began = time.monotonic()
    daemon = launch(model, *options, ready=False, change="count_allocations")
    assert daemon.wait() == 65, daemon.text
    assert time.monotonic() - began < patient(2.0)
    told = daemon.text.strip().splitlines()
    assert [x for x in told if not x.startswith("time=")] == told[-1:]  # no traceback, no allocation
    line = told[-1]
    assert line.startswith(f"ggufd: {names or model}"), line
    assert all(word in line for word in words), line
    assert not any(x.startswith("READY") for x in daemon.told)
    assert not os.path.exists(daemon.path)
    return str(line)


@pytest.mark.parametrize(("change", "words"), [x[1:] for x in REFUSED], ids=[f"case {x[0]}" for x in REFUSED])
def test_refused(launch, tmp_path: Path, change: Change, words: tuple[str, ...]) -> None:
    file = scripted()
    change(file)
    refused(launch, file.write(tmp_path / "m.gguf"), words=words)


@pytest.mark.parametrize("change", [x[1] for x in LOADED], ids=[f"case {x[0]}" for x in LOADED])
def test_loaded(launch, tmp_path: Path, change: Change) -> None:
    file = scripted()
    change(file)
    daemon = launch(file.write(tmp_path / "m.gguf"), "--verify")
    a = TOKENS.index("a")
    status, answer = daemon.complete(prompt=[a], max_tokens=4, temperature=0)
    assert (status, answer["choices"][0]["text"]) == (200, "bcde")
    assert daemon.get("/readyz")[1]["verified"]


def test_memory_stays_bounded_whatever_a_header_claims(nursery, tmp_path: Path) -> None:
    for i, (name, change, _) in enumerate(REFUSED):
        if name.split()[0] in ("1", "2", "3", "6"):
            file = scripted()
            change(file)
            model = file.write(tmp_path / f"{i}.gguf")
            pid = nursery.fork(["inspect", str(model)], tmp_path / "log")
            done = nursery.wait(pid, 20)
            assert done["code"] == 65, name  # the same checks, the same code, without a daemon
            assert done["peak_kib"] < nursery.own_kib + 64 * 1024, name


def test_inspect_takes_what_serve_takes(nursery, tmp_path: Path) -> None:
    for i, (name, change) in enumerate(LOADED):
        file = scripted()
        change(file)
        model = file.write(tmp_path / f"{i}.gguf")
        pid = nursery.fork(["inspect", str(model), "--device", "host"], tmp_path / "log")
        assert nursery.wait(pid, 20)["code"] == 0, (name, (tmp_path / "log").read_text())


def special(place: Path, kind: str) -> Path:
    path = place / kind
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "empty":
            path.write_bytes(b"")
        case "magic":
            path.write_bytes(b"GGUF")
        case "loop":
            path.symlink_to(path)
        case "dangling":
            path.symlink_to(place / "nowhere")
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        case "device":
            path = Path("/dev/zero")
    return path


@pytest.mark.parametrize(
    "kind", ["empty", "magic", "directory", "fifo", "loop", "dangling", "socket", "device"]
)
def test_case_12_what_is_no_model_file(launch, tmp_path: Path, kind: str) -> None:
    refused(launch, special(tmp_path, kind))


def test_case_14_a_split_set_loads_by_its_first_shard_and_names_a_missing_one(launch, tmp_path: Path) -> None:
    shards = split(scripted(), 3)
    paths = [tmp_path / f"m-{i + 1:05d}-of-00003.gguf" for i in range(3)]
    for shard, path in zip(shards, paths, strict=True):
        shard.write(path)
    daemon = launch(paths[0], "--verify")
    status, answer = daemon.complete(prompt=[TOKENS.index("a")], max_tokens=3, temperature=0)
    assert (status, answer["choices"][0]["text"]) == (200, "bcd")
    paths[1].unlink()
    refused(launch, paths[0], names=paths[1])
    shards[1].write(paths[1])
    assert paths[0].name in refused(launch, paths[1])


def split(file: File, count: int) -> list[File]:
    """The tensors dealt out over shards, the keys in the first."""
    shards = []
    for i in range(count):
        shard = File(keys=list(file.keys) if i == 0 else [])
        for name, value in (("no", i), ("count", count), ("tensors.count", len(file.tensors))):
            kind = U16 if name != "tensors.count" else I32
            shard.key(f"split.{name}", kind, scalar(kind, value))
        for tensor in file.tensors[i::count]:
            nbytes = 4 * tensor.dims[0] * (tensor.dims[1] if len(tensor.dims) > 1 else 1)
            offset = len(shard.data)
            shard.data += file.data[tensor.offset : tensor.offset + nbytes]
            shard.tensors.append(Tensor(tensor.name, tensor.dims, 0, offset))
        shards.append(shard)
    return shards


def test_case_16_a_tensor_beyond_four_gibibytes_of_a_sparse_file(launch, tmp_path: Path) -> None:
    file = scripted()
    last = file.tensors[-1]
    tail = file.data[last.offset :]
    last.offset, head = (4 << 30) + 96, file.build()[: -len(tail)]
    begin = len(head) - (len(file.data) - len(tail))
    path = tmp_path / "sparse.gguf"
    path.write_bytes(head)
    with path.open("r+b") as writing:
        writing.seek(begin + last.offset)
        writing.write(tail)
    daemon = launch(path, "--verify")
    assert daemon.get("/readyz")[1]["verified"]
    assert (
        daemon.complete(prompt=[TOKENS.index("a")], max_tokens=3, temperature=0)[1]["choices"][0]["text"]
        == "bcd"
    )


def test_case_30_a_nan_in_a_norm(launch, tmp_path: Path) -> None:
    """Refused by name under --verify. Without it no answer ever holds NaN, and the process lives on."""
    path = scripted(norm=float("nan")).write(tmp_path / "m.gguf")
    refused(launch, path, "--verify", words=("output_norm.weight",))
    daemon = launch(path)
    for members in ({}, {"logprobs": 5}, {"echo": True, "logprobs": 1}, {"temperature": 1.0}):
        status, answer = daemon.complete(prompt=[TOKENS.index("a")], max_tokens=3, **members)
        assert status == 500
        assert answer["error"]["message"] == "the generation failed"
    body = b'{"prompt": [8], "stream": true, "max_tokens": 3}'
    assert b"NaN" not in daemon.raw(message("POST", "/v1/completions", body))
    assert daemon.get("/readyz")[0] == 200


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_case_30_one_bad_number_in_any_norm(launch, tmp_path: Path, name: str, value: float) -> None:
    file = scripted()
    at = file.tensor(name).offset + 4 * 63
    file.data = file.data[:at] + struct.pack("<f", value) + file.data[at + 4 :]
    refused(launch, file.write(tmp_path / "m.gguf"), "--verify", words=(name, "63"))


def test_case_30_numbers_at_the_border_load(launch, tmp_path: Path) -> None:
    launch(scripted(norm=3.0e38).write(tmp_path / "big.gguf"), "--verify", ready=False).wait_told("READY=1")
