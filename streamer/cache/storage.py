"""Device memory behind a cache layout: KV pages of every layer in one buffer, recurrent state in another."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamer.cache.recurrent import StateRegion, aligned, state_regions
from streamer.device.base import Buffer, Device
from streamer.kernels.ops import Array, CacheLayout, KVLayer

ELEMENT_NBYTES = {"f32": 4, "f16": 2, "bf16": 2, "fp8_e4m3": 1, "int8": 1}


@dataclass(frozen=True)
class KVRegion:
    """One layer's place in the KV buffer. Offsets in bytes."""

    kv: KVLayer
    keys_offset: int
    values_offset: int


def kv_regions(layout: CacheLayout, n_pages: int, element_type: str) -> tuple[tuple[KVRegion, ...], int]:
    """Every attention layer's region, and the bytes of the whole buffer. Pure."""
    regions, offset = [], 0
    for kv in layout.kv:
        rows = n_pages * kv.n_kv_heads * layout.page_size * ELEMENT_NBYTES[element_type]
        values_offset = offset + aligned(rows * kv.key_length)
        regions.append(KVRegion(kv, offset, values_offset))
        offset = values_offset + aligned(rows * kv.value_length)
    return tuple(regions), offset


class PagedCache:
    """A `CacheStorage`. Owns its two buffers; everything it hands out is invalid after `close`.

    On the host the views are numpy arrays whose memory order is (n_kv_heads, n_pages, ..): a sequence on
    consecutive pages is then one contiguous matrix a head. Elsewhere they are addresses, pages outermost.
    """

    def __init__(
        self, device: Device, layout: CacheLayout, n_pages: int, n_slots: int, element_type: str
    ) -> None:
        self.layout, self.n_pages, self.n_slots, self.element_type = layout, n_pages, n_slots, element_type
        self._on_host = device.capabilities.kind == "host"
        kv, kv_nbytes = kv_regions(layout, n_pages, element_type)
        state, state_nbytes = state_regions(layout, n_slots)
        self._kv = {region.kv.layer: region for region in kv}
        self._state = {region.recurrent.layer: region for region in state}
        self._kv_buffer = device.allocate(max(kv_nbytes, 1), what="KV cache")
        try:
            self._state_buffer = device.allocate(max(state_nbytes, 1), what="recurrent state")
        except BaseException:
            self._kv_buffer.close()
            raise
        self.nbytes = self._kv_buffer.nbytes + self._state_buffer.nbytes
        self._clear(device)

    def _clear(self, device: Device) -> None:
        """Zero state, and KV pages where a masked row is still multiplied (NaN times zero is NaN)."""
        stream = device.create_stream("cache")
        try:
            device.fill(self._state_buffer, 0, self._state_buffer.nbytes, 0, stream=stream)
            if not self._on_host:
                device.fill(self._kv_buffer, 0, self._kv_buffer.nbytes, 0, stream=stream)
            stream.sync()
        finally:
            stream.close()

    def keys(self, layer: int) -> Array:
        """(n_pages, n_kv_heads, page_size, key_length): numpy view on the host, address elsewhere."""
        region = self._kv[layer]
        return self._pages(region.keys_offset, region.kv, region.kv.key_length)

    def values(self, layer: int) -> Array:
        """(n_pages, n_kv_heads, page_size, value_length)."""
        region = self._kv[layer]
        return self._pages(region.values_offset, region.kv, region.kv.value_length)

    def conv_state(self, layer: int) -> Array:
        """(n_slots, conv_width - 1, conv_channels) float32, oldest first."""
        region = self._state[layer]
        return self._states(region.conv_offset, region.conv_shape)

    def delta_state(self, layer: int) -> Array:
        """(n_slots, n_v_heads, v_dim, k_dim) float32: row j is column j of S."""
        region = self._state[layer]
        return self._states(region.delta_offset, region.delta_shape)

    @property
    def state_regions(self) -> tuple[StateRegion, ...]:
        """Where state lies in the buffer at `state_address`, for copies of whole slots."""
        return tuple(self._state.values())

    @property
    def state_address(self) -> int:
        return self._state_buffer.handle

    def _pages(self, offset: int, kv: KVLayer, length: int) -> Array:
        address = self._kv_buffer.handle + offset
        if not self._on_host:
            return address
        shape = (kv.n_kv_heads, self.n_pages, self.layout.page_size, length)
        return host_array(address, shape).transpose(1, 0, 2, 3)

    def _states(self, offset: int, shape: tuple[int, ...]) -> Array:
        address = self._state_buffer.handle + offset
        return host_array(address, shape) if self._on_host else address

    def close(self) -> None:
        """Free both buffers. The caller has waited for the work that uses them. Idempotent."""
        for buffer in self._buffers:
            buffer.close()

    @property
    def _buffers(self) -> tuple[Buffer, Buffer]:
        return self._kv_buffer, self._state_buffer

    def __repr__(self) -> str:
        sizes = f"{self.n_pages} pages, {self.n_slots} slots, {self.nbytes} bytes"
        return f"PagedCache({sizes}, {self.element_type})"


def allocate_cache(
    device: Device, layout: CacheLayout, n_pages: int, n_slots: int, element_type: str = "f32"
) -> PagedCache:
    """Allocate pages and state slots on `device`; state is zero. DeviceMemoryError says which did not fit.

    `n_slots` counts sequence slots and snapshot slots. The host computes in float32 only.
    """
    assert element_type in ELEMENT_NBYTES, element_type
    assert element_type == "f32" or device.capabilities.kind != "host", element_type
    return PagedCache(device, layout, n_pages, n_slots, element_type)


def host_array(address: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """A float32 view of host memory. The owner of the memory must outlive it."""
    count = int(np.prod(shape, dtype=np.int64))
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address)).reshape(shape)
