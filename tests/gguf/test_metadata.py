"""Getters name the key and what was wanted."""

import pytest

from streamer.errors import GGUFError
from streamer.gguf.metadata import Metadata


@pytest.fixture
def metadata(p, load) -> Metadata:
    keys = [
        p.key("int", p.U32, 7),
        p.key("float", p.F32, 0.5),
        p.key("nan", p.F32, float("nan")),
        p.key("flag", p.BOOL, 1),
        p.key("text", p.STRING, "ü"),
        p.key("ints", p.ARRAY, (p.I32, [2, 1, 2])),
        p.key("flags", p.ARRAY, (p.BOOL, [0, 1])),
        p.key("floats", p.ARRAY, (p.F32, [0.5])),
        p.key("strings", p.ARRAY, (p.STRING, ["a", "b"])),
        p.key("nested", p.ARRAY, (p.ARRAY, [(p.U8, [1])])),
    ]
    return load(p.Header(keys=keys)).metadata


def test_getters_return_what_is_there(metadata):
    assert metadata.get_int("int") == 7
    assert metadata.get_float("float") == 0.5
    assert metadata.get_float("int") == 7.0
    assert metadata.get_bool("flag") is True
    assert metadata.get_str("text") == "ü"
    assert metadata.get_strings("strings") == ["a", "b"]
    assert metadata.get_array("ints").tolist() == [2, 1, 2]
    assert metadata.get_per_layer("ints", 3) == (2, 1, 2)
    assert metadata.get_per_layer("int", 3) == (7, 7, 7)
    assert metadata.get_per_layer("flags", 2) == (0, 1)


def test_defaults_stand_in_for_absent_keys_only(metadata):
    assert metadata.get_int("absent", 3) == 3
    assert metadata.get_str("absent", None) is None
    assert metadata.get_per_layer("absent", 2, 5) == (5, 5)
    with pytest.raises(GGUFError):
        metadata.get_int("text", 3)


@pytest.mark.parametrize(
    ("getter", "key"),
    [
        ("get_int", "float"),
        ("get_int", "flag"),
        ("get_int", "ints"),
        ("get_float", "text"),
        ("get_float", "flag"),
        ("get_float", "nan"),
        ("get_bool", "int"),
        ("get_str", "int"),
        ("get_str", "strings"),
        ("get_strings", "text"),
        ("get_strings", "ints"),
        ("get_strings", "nested"),
        ("get_array", "int"),
        ("get_array", "strings"),
        ("get_int", "absent"),
        ("get_strings", "absent"),
    ],
)
def test_a_wrong_type_or_missing_key_is_refused_by_name(metadata, getter, key):
    with pytest.raises(GGUFError) as caught:
        getattr(metadata, getter)(key)
    assert caught.value.subject == key


@pytest.mark.parametrize(("key", "n_layers"), [("ints", 4), ("floats", 1), ("strings", 1), ("text", 1)])
def test_per_layer_values_must_be_integers_for_every_layer(metadata, key, n_layers):
    with pytest.raises(GGUFError):
        metadata.get_per_layer(key, n_layers)


def test_lengths_and_membership_make_no_lists(metadata):
    assert metadata.length("strings") == 2
    assert metadata.length("text") is None
    assert "strings" in metadata
    assert metadata._values["strings"]._made is None
    assert metadata["strings"] is metadata["strings"]


def test_it_is_a_mapping(metadata):
    assert dict(metadata)["int"] == 7
    assert metadata.get("absent") is None
    assert len(metadata) == 10


def test_plain_values_work_too():
    plain = Metadata("fake", {"list": ["a"], "int": 3})
    assert plain.get_strings("list") == ["a"]
    assert plain.get_int("int") == 3
