"""Cache memory: places do not overlap, state starts at zero, what does not fit names itself."""

import numpy as np
import pytest

from streamer.cache.recurrent import state_regions
from streamer.cache.storage import allocate_cache, kv_regions
from streamer.device.host import HostDevice
from streamer.errors import DeviceMemoryError
from streamer.kernels.ops import CacheLayout, KVLayer, RecurrentLayer

LAYOUT = CacheLayout(
    kv=(KVLayer(1, 2, 16, 12), KVLayer(3, 1, 16, 12)),
    recurrent=(RecurrentLayer(0, 40, 4, 3, 8, 6), RecurrentLayer(2, 40, 4, 3, 8, 6)),
)


@pytest.fixture
def device():
    device = HostDevice(poison=0xFF)
    yield device
    device.close()


def test_every_view_has_its_own_memory(device):
    cache = allocate_cache(device, LAYOUT, 5, 3)
    views = [f(layer) for layer in (1, 3) for f in (cache.keys, cache.values)]
    views += [f(layer) for layer in (0, 2) for f in (cache.conv_state, cache.delta_state)]
    for i, view in enumerate(views):
        view[...] = i
    assert all((view == i).all() for i, view in enumerate(views))
    cache.close()


def test_shapes_are_the_contract(device):
    cache = allocate_cache(device, LAYOUT, 5, 3)
    assert cache.keys(1).shape == (5, 2, 32, 16)
    assert cache.values(3).shape == (5, 1, 32, 12)
    assert cache.conv_state(0).shape == (3, 3, 40)
    assert cache.delta_state(2).shape == (3, 3, 6, 8)


def test_state_is_zero_at_first(device):
    cache = allocate_cache(device, LAYOUT, 5, 3)
    assert not cache.conv_state(0).any()
    assert not cache.delta_state(2).any()


@pytest.mark.parametrize(("element_type", "nbytes"), [("f32", 4), ("f16", 2), ("bf16", 2), ("fp8_e4m3", 1)])
def test_sizes_follow_the_layout(element_type, nbytes):
    regions, total = kv_regions(LAYOUT, 64, element_type)
    assert total == 64 * 32 * LAYOUT.kv_nbytes_per_token(nbytes)  # 64 pages: no padding to 256 bytes
    assert regions[0].values_offset == 64 * 32 * 2 * 16 * nbytes
    assert state_regions(LAYOUT, 64)[1] == 64 * LAYOUT.state_nbytes_per_sequence


def test_layouts_of_one_kind_only(device):
    dense = allocate_cache(device, CacheLayout(kv=LAYOUT.kv), 2, 1)
    hybrid = allocate_cache(device, CacheLayout(kv=(), recurrent=LAYOUT.recurrent), 2, 1)
    assert dense.keys(1).shape[0] == 2
    assert hybrid.conv_state(0).shape[0] == 1


def test_everything_is_given_back(device):
    cache = allocate_cache(device, LAYOUT, 5, 3)
    assert device.statistics().allocated_bytes == cache.nbytes
    cache.close()
    cache.close()
    assert device.statistics().allocated_bytes == 0
    assert device.statistics().live_streams == 0


@pytest.mark.parametrize(("limit", "what"), [(1000, "KV cache"), (55_000, "recurrent state")])
def test_what_does_not_fit_names_itself_and_leaves_nothing(limit, what):
    device = HostDevice(memory_limit=limit)
    with pytest.raises(DeviceMemoryError, match=what):
        allocate_cache(device, LAYOUT, 5, 3)
    assert device.statistics().allocated_bytes == 0
    device.close()


def test_consecutive_pages_of_a_head_are_contiguous_on_the_host(device):
    cache = allocate_cache(device, LAYOUT, 5, 3)
    head = cache.keys(1)[:, 0]
    assert np.shares_memory(head.reshape(-1), head)
