"""One walk over a model's weights serves twice: specs for the plan, and later the resident weights.

An architecture's `build` function asks a `WeightSource` for each weight in execution order, with the shape it
must have. Over a directory alone the source records a `WeightSpec` each; over resident weights it hands them
out. So specs and forward cannot drift apart.
"""

from collections.abc import Mapping, Sequence

from streamer.errors import GGUFError
from streamer.gguf.directory import Directory
from streamer.kernels.ops import Linear, Norm, Weight
from streamer.plan.plan import Role, WeightSpec


class WeightSource:
    """`resident` None: a walk for specs; the weights handed out have no handle: never compute with them.

    GGUFError names a tensor that is missing or has another shape than the metadata says.
    """

    def __init__(self, directory: Directory, resident: Mapping[str, Weight] | None = None) -> None:
        self.directory = directory
        self._resident = resident
        self.specs: list[WeightSpec] = []

    def has(self, name: str) -> bool:
        return name in self.directory.tensors

    def take(self, name: str, shape: Sequence[int], role: Role, layer: int | None = None) -> Weight:
        """The weight `name`, which must have `shape` (GGUF order)."""
        info = self.directory.tensors.get(name)
        if info is None:
            raise GGUFError(self.directory.path, name, "missing")
        if _trimmed(info.shape) != _trimmed(shape):
            raise GGUFError(
                self.directory.path, name, f"has shape {list(info.shape)} instead of {list(shape)}"
            )
        wanted = tuple(shape)  # without or with the trailing ones that the format leaves to the writer
        self.specs.append(WeightSpec(name, role, layer, wanted))
        if self._resident is not None:
            return self._resident[name]
        return Weight(name, info.type, wanted, None)

    def norm(self, name: str, n: int, epsilon: float, layer: int | None, role: Role = Role.NORM) -> Norm:
        return Norm(self.take(name, (n,), role, layer), epsilon)

    def linears(
        self, names: Sequence[str], n_in: int, n_outs: Sequence[int], role: Role, layer: int | None
    ) -> tuple[Linear, ...]:
        """Projections of one input, `NAME.weight` and `NAME.bias` where the file has it.

        The weights come before the biases, so that they lie side by side and a backend can make one product.
        """
        weights = [
            self.take(f"{name}.weight", (n_in, n_out), role, layer)
            for name, n_out in zip(names, n_outs, strict=True)
        ]
        biases = [
            self.take(f"{name}.bias", (n_out,), role, layer) if self.has(f"{name}.bias") else None
            for name, n_out in zip(names, n_outs, strict=True)
        ]
        return tuple(Linear(weight, bias) for weight, bias in zip(weights, biases, strict=True))

    def linear(self, name: str, n_in: int, n_out: int, role: Role, layer: int | None) -> Linear:
        return self.linears((name,), n_in, (n_out,), role, layer)[0]


def _trimmed(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape without trailing ones: converters write [n] and [n, 1] for the same thing."""
    kept = list(shape)
    while len(kept) > 1 and kept[-1] == 1:
        kept.pop()
    return tuple(kept)
