"""Whatever a valid header is changed into: a GGUFError or a correct directory, in bounded time and memory."""

import itertools
import struct
import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamer.errors import GGUFError
from streamer.gguf.quants import QuantType, nbytes_of
from streamer.gguf.reader import read_directory

SLACK_NBYTES = 256 << 10  # objects of our own (error, directory, first read): whatever the file says
INTERESTING = [
    0,
    1,
    7,
    8,
    31,
    32,
    255,
    1 << 16,
    1 << 31,
    (1 << 32) - 1,
    1 << 48,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
]


@pytest.fixture(scope="module")
def valid() -> bytes:
    """A header with every sort of value, three tensors and their data."""
    text = lambda s: struct.pack("<Q", len(s.encode())) + s.encode()  # noqa: E731
    keys = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.alignment") + struct.pack("<II", 4, 32),
        text("llama.block_count") + struct.pack("<II", 4, 2),
        text("llama.rope.freq_base") + struct.pack("<If", 6, 1e4),
        text("flag") + struct.pack("<IB", 7, 1),
        text("big") + struct.pack("<IQ", 10, 1 << 40),
        text("tokens") + struct.pack("<IIQ", 9, 8, 4) + text("a") + text("ü") + text("") + text("😀b"),
        text("scores") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3),
        text("nested")
        + struct.pack("<IIQ", 9, 9, 2)
        + struct.pack("<IQ2H", 2, 2, 5, 6)
        + struct.pack("<IQ", 4, 0),
    ]
    tensors = [
        text("token_embd.weight") + struct.pack("<IQQIQ", 2, 32, 4, 8, 0),
        text("blk.0.norm.weight") + struct.pack("<IQIQ", 1, 8, 0, 160),
        text("output.weight") + struct.pack("<IQQIQ", 2, 256, 1, 12, 192),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys + tensors)
    return head + bytes(-len(head) % 32) + bytes(192 + 144)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "model.gguf"


def check(target, content: bytes) -> None:
    """The property. A directory that is returned must be consistent with the file, lazily made values too."""
    target.write_bytes(content)
    tracemalloc.start()
    begin = time.thread_time()
    try:
        directory = read_directory(target)
        values = [directory.metadata[key] for key in directory.metadata]
    except GGUFError as error:
        refusal = error
    else:
        refusal = None
    finally:
        elapsed = time.thread_time() - begin
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert elapsed < 2  # of this thread: a busy machine does not count
        assert peak <= 8 * len(content) + SLACK_NBYTES
    if refusal is not None:
        assert len(str(refusal).splitlines()) == 1
        return
    assert len(values) == len(directory.metadata)
    spans = []
    for info in directory.tensors.values():
        assert isinstance(info.type, QuantType)
        assert info.nbytes == nbytes_of(info.type, info.shape)
        assert info.offset % directory.alignment == 0
        assert 0 < info.offset <= info.offset + info.nbytes <= len(content)
        spans.append((info.offset, info.offset + info.nbytes))
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_the_unchanged_header_loads(valid, target):
    check(target, valid)
    assert list(read_directory(target).tensors) == ["token_embd.weight", "blk.0.norm.weight", "output.weight"]
    assert read_directory(target).metadata["tokens"] == ["a", "ü", "", "😀b"]


@FUZZ
@given(st.data())
def test_flipped_bytes(valid, target, data):
    content = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    check(target, bytes(content))


@FUZZ
@given(st.data())
def test_lengths_replaced_by_interesting_numbers(valid, target, data):
    content = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 3))):
        width = data.draw(st.sampled_from([4, 8]))
        at = data.draw(st.integers(4, len(content) - width))
        number = data.draw(st.one_of(st.sampled_from(INTERESTING), st.integers(0, (1 << 64) - 1)))
        content[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    check(target, bytes(content))


def test_every_length_cut_off(valid, target):
    """Exhaustive where it is cheap: each prefix, with and without sparse zeros after it."""
    for length in range(0, len(valid), 3):
        check(target, valid[:length])
        check(target, valid[:length] + bytes(len(valid) - length))


@FUZZ
@given(st.data())
def test_spliced_pieces(valid, target, data):
    """A piece of the header removed, repeated, or moved somewhere else."""
    places = st.integers(0, len(valid))
    begin, end = sorted((data.draw(places), data.draw(places)))
    at = data.draw(places)
    piece = valid[begin:end]
    rest = valid[:begin] + valid[end:] if data.draw(st.booleans()) else valid
    check(target, rest[:at] + piece * data.draw(st.integers(1, 3)) + rest[at:])


@FUZZ
@given(st.binary(max_size=400), st.sampled_from([2, 3]), st.integers(0, 3), st.integers(0, 3))
def test_noise_behind_a_good_start(target, noise, version, n_tensors, n_keys):
    check(target, b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + noise)


@settings(FUZZ, max_examples=60)
@given(
    st.recursive(
        st.lists(st.integers(0, 255), max_size=4), lambda inner: st.lists(inner, max_size=3), max_leaves=12
    )
)
def test_honest_nesting_comes_back(target, tree):
    def packed(node):
        if not all(isinstance(item, list) for item in node) or not node:
            return struct.pack("<IQ", 0, len(node)) + bytes(node)
        return struct.pack("<IQ", 9, len(node)) + b"".join(map(packed, node))

    def plain(value):
        return [plain(item) for item in value] if isinstance(value, list) else value.tolist()

    key = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + packed(tree)
    target.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key)

    def depth(node):
        inner = [depth(item) for item in node if isinstance(item, list)]
        return 1 + max(inner, default=0)

    if depth(tree) > 8:
        with pytest.raises(GGUFError):
            read_directory(target)
    else:
        assert plain(read_directory(target).metadata["k"]) == tree
