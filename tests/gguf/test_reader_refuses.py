"""Files that lie, each kind with several instances (cases 1 to 14), and their twins that must load."""

import os
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import GGUFError
from streamer.gguf.values import StringArray


def test_array_length_over_the_file_is_refused(p, refuse):
    content = (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + p.text("k") + struct.pack("<IIQ", p.ARRAY, p.U8, 1 << 63)
    )
    assert len(content) == 49
    assert refuse(content).subject == "k"


@pytest.mark.parametrize("element", range(13))
@pytest.mark.parametrize("count", [1 << 20, 1 << 32, (1 << 61) + 1, (1 << 64) - 1])
def test_array_lengths_that_wrap_or_lie_are_refused_for_every_element_type(p, refuse, element, count):
    raw = struct.pack("<IQ", element, count)
    assert refuse(p.Header(keys=[p.raw_key("k", p.ARRAY, raw)])).subject == "k"
    assert refuse(p.Header(keys=[p.raw_key("k", p.ARRAY, raw), p.ARCHITECTURE])).subject == "k"


def test_deep_nesting_is_refused(p, refuse):
    raw = struct.pack("<IQ", p.ARRAY, 1) * 3000 + struct.pack("<IQ", p.U8, 0)
    assert "nested" in refuse(p.Header(keys=[p.raw_key("k", p.ARRAY, raw)])).reason


def test_wide_nesting_is_refused_in_bounded_work(p, refuse):
    raw = struct.pack("<IQ", p.ARRAY, 100_000) + struct.pack("<IQ", p.U8, 0) * 100_000
    assert "millions" in refuse(p.Header(keys=[p.raw_key("k", p.ARRAY, raw)])).reason


def test_shallow_nesting_is_skipped_correctly(p, load):
    nested = (p.ARRAY, [(p.U32, [1, 2]), (p.STRING, ["a", "ü"]), (p.ARRAY, [(p.U8, [])])])
    directory = load(p.Header(keys=[p.key("unused", p.ARRAY, nested), p.ARCHITECTURE]))
    assert directory.architecture == "llama"
    numbers, strings, inner = directory.metadata["unused"]
    assert numbers.tolist() == [1, 2]
    assert strings == ["a", "ü"]
    assert [list(x) for x in inner] == [[]]


def test_lengths_past_the_end_are_refused(p, refuse):
    long_key = struct.pack("<Q", 1 << 48) + b"abc"
    assert refuse(p.Header(keys=[long_key + bytes(20)])).subject == "key 0"
    long_value = p.raw_key("general.name", p.STRING, struct.pack("<Q", 1 << 48))
    assert refuse(p.Header(keys=[long_value])).subject == "general.name"
    wrapped = p.raw_key("general.name", p.STRING, struct.pack("<Q", (1 << 64) - 1))
    assert refuse(p.Header(keys=[wrapped])).subject == "general.name"
    in_array = p.raw_key("list", p.ARRAY, struct.pack("<IQQ", p.STRING, 1, 1 << 48))
    assert refuse(p.Header(keys=[in_array])).subject == "list"
    name = struct.pack("<Q", 1 << 48) + bytes(40)
    assert refuse(p.Header(keys=[p.ARCHITECTURE], tensors=[name])).subject == "tensor 0"


@pytest.mark.parametrize("left", range(8))
def test_a_string_array_that_ends_inside_a_length_is_refused(p, refuse, left):
    strings = struct.pack("<Q", 100) + bytes(100) + bytes(left)
    raw = struct.pack("<IQ", p.STRING, 2) + strings
    assert "past the end" in refuse(p.Header(keys=[p.raw_key("k", p.ARRAY, raw)])).reason


@pytest.mark.parametrize("element", [8, 9])
def test_more_elements_than_bytes_are_refused_at_once(p, refuse, element):
    raw = struct.pack("<IQ", element, 50) + bytes(100)
    assert "cannot fit" in refuse(p.Header(keys=[p.raw_key("k", p.ARRAY, raw)])).reason


@pytest.mark.parametrize("type", [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12])
def test_scalars_cut_off_by_the_end_are_refused(p, refuse, type):
    whole = p.Header(keys=[p.key("last", type, 1)]).build()
    assert refuse(whole[:-1]).subject == "last"


def test_unknown_value_types_are_refused(p, refuse):
    assert "type 13" in refuse(p.Header(keys=[p.raw_key("k", 13, bytes(16))])).reason
    raw = struct.pack("<IQ", 77, 1) + bytes(16)
    assert "type 77" in refuse(p.Header(keys=[p.raw_key("k", p.ARRAY, raw)])).reason


def test_booleans_other_than_0_and_1_are_refused(p, refuse, load):
    assert refuse(p.Header(keys=[p.raw_key("flag", p.BOOL, b"\x02")])).subject == "flag"
    assert refuse(p.Header(keys=[p.key("flags", p.ARRAY, (p.BOOL, [0, 1, 255]))])).subject == "flags"
    directory = load(p.Header(keys=[p.key("flag", p.BOOL, 1), p.key("flags", p.ARRAY, (p.BOOL, [0, 1]))]))
    assert directory.metadata["flag"] is True
    assert directory.metadata["flags"].tolist() == [False, True]


@pytest.mark.parametrize("raw", [b"\xff", b"ab\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xf8\x88\x80\x80\x80"])
def test_text_that_is_not_utf8_is_refused_everywhere(p, refuse, raw):
    assert "UTF-8" in refuse(p.Header(keys=[p.key(raw, p.U8, 0)])).reason
    assert "UTF-8" in refuse(p.Header(keys=[p.key("k", p.STRING, raw)])).reason
    assert "string 2" in refuse(p.Header(keys=[p.key("k", p.ARRAY, (p.STRING, ["a", "b", raw, "c"]))])).reason
    assert "UTF-8" in refuse(p.Header(keys=[p.ARCHITECTURE], tensors=[p.tensor(raw)], data=bytes(32))).reason


@pytest.mark.parametrize("block", [1, 16, 40, 1 << 20])
@given(
    strings=st.lists(st.sampled_from([b"", b"a" * 20, b"\xc3", b"\xbc", "ü😀".encode(), b"\x80"]), max_size=9)
)
def test_the_first_string_that_is_not_utf8_is_found_whatever_the_blocks(block, strings):
    def is_bad(raw):
        try:
            raw.decode()
        except UnicodeDecodeError:
            return True
        return False

    starts = np.cumsum([0, *[8 + len(s) for s in strings]])[:-1]
    packed = StringArray(b"".join(struct.pack("<Q", len(s)) + s for s in strings), starts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamer.gguf.values._BLOCK_NBYTES", block)
        assert packed.first_not_utf8() == next((i for i, s in enumerate(strings) if is_bad(s)), None)


def test_a_bad_string_at_the_end_of_many_is_found_in_bounded_time_and_memory(p, refuse):
    n = 300_000
    raw = struct.pack("<IQ", p.STRING, n) + p.text("a" * 40) * (n - 1) + p.text(b"\xff" * 40)
    content = p.Header(keys=[p.raw_key("k", p.ARRAY, raw)]).build()
    tracemalloc.start()
    try:
        error = refuse(content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error.reason == f"string {n - 1} is not UTF-8"
    assert peak < 3 * len(content)


def test_long_text_is_decoded_on_use_only(p, load):
    value = "😀" + "a" * (8 << 20)  # as a str four times its bytes
    content = p.Header(keys=[p.key("k", p.STRING, value), p.ARCHITECTURE]).build()
    tracemalloc.start()
    try:
        metadata = load(content).metadata
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(content)
    assert metadata["k"] == metadata.get_str("k") == value
    assert metadata.length("k") is None
    with pytest.raises(GGUFError, match="must be an integer, is a string"):
        metadata.get_int("k")


def test_text_of_no_model_is_refused_by_its_length(p, write, refuse):
    path = write(p.Header(keys=[p.raw_key("k", p.STRING, struct.pack("<Q", (64 << 20) + 1))]))
    os.truncate(path, 65 << 20)  # a hole: zeros are UTF-8
    assert "length 67108865" in refuse(path).reason
    bad = p.key("k", p.STRING, b"a" * (3 << 20) + b"\xe2\x82")
    assert f"byte {3 << 20}" in refuse(p.Header(keys=[bad])).reason


def test_a_character_split_over_two_strings_is_refused(p, refuse):
    split = [b"ok", b"\xc3", b"\xbc"]
    assert "string 1" in refuse(p.Header(keys=[p.key("k", p.ARRAY, (p.STRING, split))])).reason


def test_string_arrays_of_every_shape_load(p, load):
    lists = {
        "empty": [],
        "blank": ["", "", ""],
        "mixed": ["", "ü", "", "😀" * 40, "a" * 300],
        "end": ["x", ""],
    }
    directory = load(p.Header(keys=[p.key(k, p.ARRAY, (p.STRING, v)) for k, v in lists.items()]))
    assert {k: directory.metadata[k] for k in lists} == lists


def test_a_path_with_line_ends_and_escapes_is_written_out(p, write, refuse):
    for content in (b"", p.Header(keys=[p.key("k\n\x1b[2J", p.U8, 1)] * 2)):
        error = refuse(write(content, "a\nb\x1b[2J\r.gguf"))
        assert error.path.endswith("a\nb\x1b[2J\r.gguf")
        assert str(error).isprintable()
    assert str(refuse("no\nwhere\udcff")).startswith(r"no\nwhere\xff: file: ")


@pytest.mark.parametrize("value", [0, 1, 4, 24, 33, 48])
def test_alignment_that_is_no_power_of_two_is_refused(p, refuse, value):
    assert refuse(p.Header(keys=[p.key("general.alignment", p.U32, value)])).subject == "general.alignment"


@pytest.mark.parametrize(
    ("type", "value"),
    [
        *[(name, 32) for name in ("U8", "I8", "U16", "I16", "I32", "U64", "I64")],
        ("STRING", "32"),
        ("F32", 32.0),
        ("F64", 32.0),
        ("BOOL", 1),
        ("ARRAY", (4, [32])),
    ],
)
def test_alignment_of_the_wrong_type_is_refused(p, refuse, type, value):
    assert (
        refuse(p.Header(keys=[p.key("general.alignment", getattr(p, type), value)])).subject
        == "general.alignment"
    )


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_legal_alignments_load(p, load, alignment):
    keys = [p.key("general.alignment", p.U32, alignment)]
    tensors = [p.tensor("a"), p.tensor("b", offset=max(alignment, 32))]
    content = p.Header(keys=keys, tensors=tensors, data=bytes(alignment + 64), alignment=alignment)
    directory = load(content)
    assert directory.alignment == alignment
    assert directory.tensors["a"].offset % alignment == 0
    assert directory.tensors["b"].offset == directory.tensors["a"].offset + max(alignment, 32)


@pytest.mark.parametrize("shape", [(), (0,), (8, 0), (0, 8), (1, 1, 1, 1, 1), (8, 1, 1, 0)])
def test_zero_no_or_too_many_dimensions_are_refused(p, refuse, shape):
    error = refuse(p.Header(tensors=[p.tensor("weight", shape)], data=bytes(64)))
    assert error.subject == "weight"
    assert "dimension" in error.reason


def test_a_huge_number_of_dimensions_is_refused(p, refuse):
    raw = p.text("weight") + struct.pack("<I", 0xFFFFFFFF) + bytes(64)
    assert "4294967295 dimensions" in refuse(p.Header(tensors=[raw])).reason


@pytest.mark.parametrize(
    ("shape", "type"),
    [
        ((1 << 32, 1 << 32), 0),
        ((1 << 62, 4), 24),
        ((1 << 61, 1), 28),
        ((1 << 63, 2, 1 << 63, 2), 0),
        ((1 << 32, 1 << 31), 8),
        (((1 << 64) - 32, 1), 8),
    ],
)
def test_sizes_that_wrap_64_bits_are_refused(p, refuse, shape, type):
    error = refuse(p.Header(tensors=[p.tensor("weight", shape, type)], data=bytes(64)))
    assert (error.subject, "64 bits" in error.reason) == ("weight", True)


@pytest.mark.parametrize("offset", [1 << 20, 64, (1 << 64) - 32, (1 << 64) - 64, 1 << 63])
def test_offsets_past_the_end_are_refused(p, refuse, offset):
    error = refuse(p.Header(tensors=[p.tensor("weight", (8,), 0, offset)], data=bytes(64)))
    assert error.subject == "weight"
    assert "lack" in error.reason


@pytest.mark.parametrize("offset", [1, 4, 16, 31, 33])
def test_unaligned_offsets_are_refused(p, refuse, offset):
    error = refuse(p.Header(tensors=[p.tensor("weight", (8,), 0, offset)], data=bytes(128)))
    assert (error.subject, "multiple" in error.reason) == ("weight", True)


@pytest.mark.parametrize("offsets", [(0, 0), (0, 32), (32, 0), (64, 32)])
def test_overlapping_tensors_are_refused(p, refuse, offsets):
    tensors = [p.tensor(name, (16,), 0, offset) for name, offset in zip("ab", offsets, strict=True)]
    error = refuse(p.Header(tensors=tensors, data=bytes(256)))
    assert error.subject in ("a", "b")
    assert "overlaps" in error.reason


@pytest.mark.parametrize("offsets", [(0, 64), (64, 0), (0, 128)])
def test_tensors_side_by_side_in_any_order_load(p, load, offsets):
    tensors = [p.tensor(name, (16,), 0, offset) for name, offset in zip("ab", offsets, strict=True)]
    directory = load(p.Header(tensors=tensors, data=bytes(256)))
    assert list(directory.tensors) == ["a", "b"]


def test_a_file_cut_short_names_the_tensor_and_the_bytes_that_lack(p, refuse, load):
    tensors = [p.tensor("first", (256,)), p.tensor("second", (256,), 0, 1024)]
    whole = p.Header(tensors=tensors, data=bytes(2048)).build()
    load(whole)
    error = refuse(whole[:-1000])
    assert error.subject == "second"
    assert "1000 bytes lack" in error.reason


@pytest.mark.parametrize("type", [4, 5, 31, 32, 33, 36, 37, 38, 99, 0xFFFFFFFF])
def test_removed_and_unknown_tensor_types_are_refused(p, refuse, type):
    error = refuse(p.Header(tensors=[p.tensor("weight", (256,), type)], data=bytes(4096)))
    assert error.subject == "weight"
    assert str(type) in error.reason


@pytest.mark.parametrize(
    ("type", "row"), [(8, 31), (8, 33), (2, 1), (12, 128), (14, 255), (39, 16), (40, 32)]
)
def test_rows_that_are_no_multiple_of_the_quant_block_are_refused(p, refuse, type, row):
    error = refuse(p.Header(tensors=[p.tensor("weight", (row, 256), type)], data=bytes(1 << 20)))
    assert error.subject == "weight"
    assert str(type) in error.reason


def test_every_quant_type_loads_with_its_size(p, load):
    from streamer.gguf.quants import QuantType

    for type in QuantType:
        shape = (type.block_elements * 2, 3)
        directory = load(
            p.Header(tensors=[p.tensor("w", shape, int(type))], data=bytes(6 * type.block_nbytes))
        )
        assert directory.tensors["w"].type is type
        assert directory.tensors["w"].nbytes == 6 * type.block_nbytes


def test_twice_the_same_name_is_refused(p, refuse):
    tensors = [p.tensor("same"), p.tensor("other", offset=32), p.tensor("same", offset=64)]
    assert refuse(p.Header(tensors=tensors, data=bytes(96))).subject == "same"
    keys = [p.key("general.name", p.STRING, "a"), p.ARCHITECTURE, p.key("general.name", p.STRING, "a")]
    assert refuse(p.Header(keys=keys)).subject == "general.name"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (1, "version 1"),
        (99, "version 99"),
        (0, "version 0"),
        (4, "version 4"),
        (3 << 24, "big-endian"),
        (2 << 24, "big-endian"),
        (1 << 24, "big-endian"),
    ],
)
def test_other_versions_and_byte_orders_are_refused_by_name(p, refuse, version, said):
    error = refuse(p.Header(keys=[p.ARCHITECTURE], version=version))
    assert error.subject == "header"
    assert said in error.reason


def test_a_whole_big_endian_file_is_refused(refuse):
    assert "big-endian" in refuse(b"GGUF" + struct.pack(">IQQ", 3, 0, 0)).reason


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_load(p, load, version):
    directory = load(
        p.Header(keys=[p.ARCHITECTURE], tensors=[p.tensor("w")], data=bytes(32), version=version)
    )
    assert directory.version == version
    assert directory.tensors["w"].offset % 32 == 0


@pytest.mark.parametrize("content", [b"", b"G", b"GGU", b"GGUF", b"GGUF\3\0\0", b"GGUF\3\0\0\0" + bytes(15)])
def test_files_shorter_than_a_header_are_refused(refuse, content):
    assert refuse(content).subject == "header"


@pytest.mark.parametrize("content", [b"GGML" + bytes(100), b"PK\3\4" + bytes(100), bytes(100), b"{}"])
def test_other_formats_are_refused(refuse, content):
    assert "not a GGUF file" in refuse(content).reason


def test_paths_that_are_no_file_are_refused(refuse, tmp_path):
    assert "directory" in refuse(os.fspath(tmp_path)).reason
    assert refuse(os.fspath(tmp_path / "missing.gguf")).subject == "file"
    assert refuse("model\0.gguf").subject == "file"
    fifo = os.fspath(tmp_path / "pipe.gguf")
    os.mkfifo(fifo)
    assert "regular" in refuse(fifo).reason
    assert refuse("/dev/zero").subject == "file"


@pytest.mark.parametrize("claim", [1, 2, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_counts_over_what_the_file_holds_are_refused(p, refuse, claim):
    assert f"{claim} keys cannot fit" in refuse(p.Header(keys=[], n_keys=claim)).reason
    if claim > 1:  # one would fit in the bytes of the key
        assert (
            f"{claim} tensors cannot fit" in refuse(p.Header(keys=[p.ARCHITECTURE], n_tensors=claim)).reason
        )


def test_millions_of_tiny_values_are_refused_before_they_cost_time(p, refuse):
    count = 5_000_000
    raw = struct.pack("<IQ", p.STRING, count) + bytes(8 * count)
    assert "millions" in refuse(p.Header(keys=[p.raw_key("k", p.ARRAY, raw)])).reason
    assert "millions" in refuse(p.Header(n_keys=1_000_000).build() + bytes(13_000_000)).reason
    assert "millions" in refuse(p.Header(n_tensors=1_000_000).build() + bytes(32_000_000)).reason


def test_an_endless_header_in_a_sparse_file_is_refused(p, refuse, write):
    path = write(p.Header(keys=[p.raw_key("k", p.ARRAY, struct.pack("<IQ", p.U8, 1 << 35))]))
    os.truncate(path, 1 << 36)
    assert "larger than" in refuse(path).reason


def test_names_in_messages_are_escaped_and_cut(p, refuse):
    evil = "weight\n\x1b[2J" + "x" * 200
    message = str(refuse(p.Header(tensors=[p.tensor(evil, (0,))], data=bytes(32))))
    assert "\x1b" not in message
    assert len(message) < 400


def test_values_of_every_type_come_back(p, load):
    keys = [p.key(f"k{type}", type, 1) for type in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12)]
    keys += [p.key(f"a{type}", p.ARRAY, (type, [1, 0])) for type in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12)]
    metadata = load(p.Header(keys=[*keys, p.key("text", p.STRING, "ü")])).metadata
    assert all(metadata[f"k{type}"] == 1 for type in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12))
    for type in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12):
        array = metadata[f"a{type}"]
        assert isinstance(array, np.ndarray)
        assert array.tolist() == [1, 0]
        assert not array.flags.writeable
    assert metadata["text"] == "ü"
