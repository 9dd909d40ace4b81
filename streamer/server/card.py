"""What is said about a loaded model, from its header and plan. Pure."""

import time

import gguf

from streamer.gguf.directory import Directory
from streamer.models.registry import Architecture
from streamer.plan.plan import Plan
from streamer.server.state import ModelCard


def make_card(
    model_id: str, root: str, directory: Directory, architecture: Architecture, plan: Plan
) -> ModelCard:
    return ModelCard(
        id=model_id,
        root=root,
        created=int(time.time()),
        architecture=architecture.name,
        n_ctx=plan.n_ctx,
        n_ctx_train=architecture.n_ctx_train,
        n_params=sum(tensor.n_elements for tensor in directory.tensors.values()),
        n_vocab=architecture.n_vocab,
        n_embd=architecture.n_embd,
        size=directory.nbytes,
        ftype=_file_type(directory),
        max_sequences=plan.max_sequences,
    )


def _file_type(directory: Directory) -> str:
    """`general.file_type` by its name: Q4_1, Q8_0; empty when the file does not say."""
    value = directory.metadata.get("general.file_type")
    if not isinstance(value, int):
        return ""
    try:
        return str(gguf.LlamaFileType(value).name).removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return str(value)
