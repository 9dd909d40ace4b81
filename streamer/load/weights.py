"""What a load leaves behind: device memory by weight name, owned in one place."""

from collections.abc import Iterator
from dataclasses import dataclass

from streamer.device.base import Buffer
from streamer.plan.plan import Plan, PlannedWeight


@dataclass(frozen=True)
class ResidentWeight:
    """`buffer[offset : offset + planned.resident_nbytes]` in the layout the plan says."""

    planned: PlannedWeight
    buffer: Buffer
    offset: int

    @property
    def address(self) -> int:
        """Device address of byte 0."""
        return self.buffer.handle + self.offset


class ResidentWeights:
    """Owns the segments' buffers until `close`. Filled segment by segment while the load runs."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._buffers: dict[int, Buffer] = {}  # by segment
        self._indices = {weight.name: weight.index for weight in plan.weights}

    def add(self, segment: int, buffer: Buffer) -> None:
        assert segment not in self._buffers, segment
        self._buffers[segment] = buffer

    def place(self, planned: PlannedWeight) -> ResidentWeight:
        """Where a planned weight lies. KeyError while its segment is not allocated."""
        return ResidentWeight(planned, self._buffers[planned.segment], planned.destination_offset)

    def __getitem__(self, name: str) -> ResidentWeight:
        return self.place(self.plan.weights[self._indices[name]])

    def __contains__(self, name: object) -> bool:
        return name in self._indices

    def __iter__(self) -> Iterator[str]:
        """Names, execution order."""
        return iter(weight.name for weight in self.plan.weights)

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def nbytes(self) -> int:
        """Device bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def close(self) -> None:
        """Free all device memory; work that uses it has been waited for. Idempotent."""
        while self._buffers:
            self._buffers.popitem()[1].close()

    def __repr__(self) -> str:
        return f"ResidentWeights({len(self)} weights, {self.nbytes} bytes in {len(self._buffers)} segments)"
