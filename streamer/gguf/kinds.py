"""What a GGUF file is besides a model: a vocabulary, a projector, an adapter is no model."""

from streamer.errors import GGUFError
from streamer.gguf.directory import Directory

# general.type, or general.architecture of files that have none
_KINDS = {
    "vocab": "a vocabulary-only file",
    "mmproj": "a multimodal projector (mmproj)",
    "projector": "a multimodal projector (mmproj)",
    "clip": "a multimodal projector (mmproj)",
    "adapter": "an adapter (LoRA)",
    "controlvector": "a control vector",
    "imatrix": "an importance matrix",
    "dataset": "a data set",
}


def kind_of(directory: Directory) -> str:
    """`model`, or in words what the file is instead."""
    metadata = directory.metadata
    for key in ("general.type", "general.architecture"):
        value = metadata.get(key) if metadata.length(key) is None else None
        if isinstance(value, str) and value in _KINDS:
            return _KINDS[value]
    if "adapter.type" in metadata or any(name.endswith((".lora_a", ".lora_b")) for name in directory.tensors):
        return _KINDS["adapter"]
    return "model" if directory.tensors else _KINDS["vocab"]


def require_model(directory: Directory) -> None:
    """GGUFError saying what the file is, unless it is a model with an architecture."""
    kind = kind_of(directory)
    if kind != "model":
        raise GGUFError(directory.path, "general.type", f"is {kind}, not a model")
    if not directory.metadata.get_str("general.architecture"):
        raise GGUFError(directory.path, "general.architecture", "is empty")
