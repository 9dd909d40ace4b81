"""Where each recurrent layer's conv and delta state lies in one buffer, for all slots. Pure.

Slots are sequence slots and, behind them, snapshot slots: the executor copies state between any two of them.
Each layer's states are contiguous over slots, which is what the operators address.
"""

from dataclasses import dataclass

from streamer.kernels.ops import CacheLayout, RecurrentLayer

ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class StateRegion:
    """One layer's place in the state buffer. Offsets and sizes in bytes, float32 elements."""

    recurrent: RecurrentLayer
    n_slots: int
    conv_offset: int  # (n_slots, conv_width - 1, conv_channels)
    delta_offset: int  # (n_slots, n_v_heads, v_dim, k_dim)

    @property
    def conv_shape(self) -> tuple[int, int, int]:
        return self.n_slots, self.recurrent.conv_width - 1, self.recurrent.conv_channels

    @property
    def delta_shape(self) -> tuple[int, int, int, int]:
        r = self.recurrent
        return self.n_slots, r.n_v_heads, r.v_dim, r.k_dim

    @property
    def conv_slot_nbytes(self) -> int:
        return 4 * self.conv_shape[1] * self.conv_shape[2]

    @property
    def delta_slot_nbytes(self) -> int:
        return self.recurrent.state_nbytes - self.conv_slot_nbytes


def aligned(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def state_regions(layout: CacheLayout, n_slots: int) -> tuple[tuple[StateRegion, ...], int]:
    """Every recurrent layer's region, and the bytes of the whole buffer."""
    regions, offset = [], 0
    for recurrent in layout.recurrent:
        region = StateRegion(recurrent, n_slots, offset, 0)
        delta_offset = offset + aligned(n_slots * region.conv_slot_nbytes)
        regions.append(StateRegion(recurrent, n_slots, offset, delta_offset))
        offset = delta_offset + aligned(n_slots * region.delta_slot_nbytes)
    return tuple(regions), offset
