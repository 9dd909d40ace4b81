"""What is checked of a weight's numbers before anything is allocated (under --verify)."""

import numpy as np
import numpy.typing as npt

from streamer.errors import GGUFError
from streamer.gguf.quants import QuantType
from streamer.plan.plan import Plan, PlannedWeight, Role
from streamer.transfer.base import Source

#            type -> (word, mask of the exponent: all ones means infinity or NaN)
EXPONENTS: dict[QuantType, tuple[type[np.unsignedinteger], int]] = {
    QuantType.F32: (np.uint32, 0x7F800000),
    QuantType.F16: (np.uint16, 0x7C00),
    QuantType.BF16: (np.uint16, 0x7F80),
}


def first_not_finite(data: npt.NDArray[np.uint8], type: QuantType) -> int | None:
    """Index of the first NaN or infinity in `data` (bytes of F32, F16 or BF16 elements)."""
    word, mask = EXPONENTS[type]
    words = data.view(word)  # (n_elements,)
    bad = np.flatnonzero((words & word(mask)) == mask)
    return int(bad[0]) if bad.size else None


def check_norms(plan: Plan, sources: list[Source], paths: list[str]) -> None:
    """GGUFError naming the first norm or other vector (bias, decay) with a NaN or an infinity.

    Reads only those (kilobytes): the output's norm has another role, and a bias spreads a NaN as well.
    """
    for weight in plan.weights:
        is_vector = sum(n != 1 for n in weight.tensor.shape) <= 1
        if (weight.role is Role.NORM or is_vector) and weight.tensor.type in EXPONENTS:
            index = first_not_finite(_read(weight, sources[weight.tensor.shard]), weight.tensor.type)
            if index is not None:
                raise GGUFError(
                    paths[weight.tensor.shard], weight.name, f"element {index} is not a finite number"
                )


def _read(weight: PlannedWeight, source: Source) -> npt.NDArray[np.uint8]:
    data = np.empty(weight.tensor.nbytes, dtype=np.uint8)
    source.read_into(data.ctypes.data, weight.tensor.offset, data.nbytes)
    return data
