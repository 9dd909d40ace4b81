"""Case 13: files that are no model are readable, but not as a model."""

import pytest

from streamer.errors import GGUFError
from streamer.gguf.kinds import kind_of, require_model


def test_a_vocabulary_is_readable_but_no_model(p, load):
    tokens = p.key("tokenizer.ggml.tokens", p.ARRAY, (p.STRING, ["a", "b"]))
    directory = load(p.Header(keys=[p.ARCHITECTURE, tokens]))
    assert directory.metadata.get_strings("tokenizer.ggml.tokens") == ["a", "b"]
    with pytest.raises(GGUFError, match="vocabulary-only"):
        require_model(directory)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"general.architecture": "clip"}, "mmproj"),
        ({"general.architecture": "llama", "general.type": "mmproj"}, "mmproj"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "adapter"),
        ({"general.architecture": "llama", "adapter.type": "lora"}, "adapter"),
        ({"general.architecture": "controlvector"}, "control vector"),
        ({"general.type": "imatrix"}, "importance matrix"),
        ({"general.architecture": "llama", "general.type": "vocab"}, "vocabulary"),
    ],
)
def test_other_kinds_are_refused_as_what_they_are(p, load, keys, said):
    packed = [p.key(name, p.STRING, value) for name, value in keys.items()]
    directory = load(p.Header(keys=packed, tensors=[p.tensor("v.weight")], data=bytes(32)))
    with pytest.raises(GGUFError, match=said):
        require_model(directory)


def test_an_adapter_is_known_by_its_tensors(p, load):
    tensors = [p.tensor("blk.0.attn_q.weight.lora_a")]
    directory = load(p.Header(keys=[p.ARCHITECTURE], tensors=tensors, data=bytes(32)))
    assert "adapter" in kind_of(directory)


@pytest.mark.parametrize("type", [None, "model"])
def test_a_model_is_a_model(p, load, type):
    keys = [p.ARCHITECTURE] + ([p.key("general.type", p.STRING, type)] if type else [])
    require_model(load(p.Header(keys=keys, tensors=[p.tensor("w")], data=bytes(32))))


def test_a_model_without_architecture_is_refused_by_key(p, load):
    directory = load(p.Header(tensors=[p.tensor("w")], data=bytes(32)))
    with pytest.raises(GGUFError, match=r"general\.architecture"):
        require_model(directory)
    wrong = load(
        p.Header(keys=[p.key("general.architecture", p.U32, 7)], tensors=[p.tensor("w")], data=bytes(32))
    )
    with pytest.raises(GGUFError, match=r"general\.architecture"):
        require_model(wrong)
