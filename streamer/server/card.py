"""What is said about a loaded model, from its header and plan. Pure."""

import time

from streamer.gguf.directory import Directory
from streamer.models.registry import Architecture
from streamer.plan.plan import Plan
from streamer.server.state import ModelCard

# general.file_type: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_NAMES = """F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K
IQ2_XXS IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 - - - TQ1_0 TQ2_0
MXFP4 NVFP4 Q1_0"""
FILE_TYPES: dict[int, str] = dict(enumerate(_NAMES.split()))


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
    return FILE_TYPES.get(value, str(value)) if isinstance(value, int) else ""
