"""Touch and copy: which path the probe settles on, and that an integrated GPU never holds the model twice."""

import threading
from dataclasses import replace

import pytest
from pipeline_support import Piece, assert_exact, build, make_transfer, run_load

from streamer.device.host import HOST_CAPABILITIES, HostDevice
from streamer.gguf.mapping import Mapping
from streamer.transfer.touch_copy import PROBE_CHUNKS, PathProbe, reads_pageable_memory

KIB = 1 << 10
BIG = 256 * KIB


class Clocked(HostDevice):
    """Knows where each upload came from; `slow` says which sources are slow on this machine."""

    def __init__(self, slow=lambda address: False, **options) -> None:
        super().__init__(**options)
        self.slow, self.sources = slow, []

    def upload(self, buffer, offset, source, nbytes, *, stream, kind) -> None:
        self.sources.append(source)
        if self.slow(source):
            gate = threading.Event()
            stream.submit(lambda: gate.wait(0.005) and None)  # what this path costs on this machine
        super().upload(buffer, offset, source, nbytes, stream=stream, kind=kind)


def is_slot(transfer, address: int) -> bool:
    slots = [slot for worker in transfer._pool._slots for slot in worker]
    return any(slot.address <= address < slot.address + slot.pinned.nbytes for slot in slots)


@pytest.mark.parametrize("slots_are_slow", [True, False])
def test_the_faster_path_is_taken_after_the_probe(tmp_path, slots_are_slow: bool) -> None:
    model = build(tmp_path, [Piece(BIG, layer=i) for i in range(30)], chunk_nbytes=BIG)
    device = Clocked()
    transfer = make_transfer("touch", device, chunk_nbytes=BIG)
    device.slow = lambda address: is_slot(transfer, address) == slots_are_slow
    weights, _ = run_load(model, device, transfer, verify=True)
    assert_exact(model, device, weights)
    from_slot = [is_slot(transfer, address) for address in device.sources]
    probed = 2 * (PROBE_CHUNKS + 1)
    assert from_slot[:probed].count(True) == from_slot[:probed].count(False)
    assert set(from_slot[probed:]) == {not slots_are_slow}
    assert transfer.probe.direct == slots_are_slow
    device.close()


def test_the_probe_ignores_the_first_copy_of_each_path() -> None:
    probe = PathProbe(allowed=True)
    for seconds in (9.0, 1.0, 1.0):
        probe.measured(False, seconds, 1)
    assert not probe.is_over
    for seconds in (99.0, 0.5, 0.6):
        probe.measured(True, seconds, 1)
    assert probe.is_over
    assert probe.direct


def test_without_pageable_access_only_slots_are_used() -> None:
    discrete = replace(HOST_CAPABILITIES, kind="cuda")
    assert not reads_pageable_memory(discrete)
    assert reads_pageable_memory(replace(discrete, integrated=True))
    assert reads_pageable_memory(replace(discrete, pageable_uses_host_page_tables=True))
    probe = PathProbe(allowed=False)
    assert probe.is_over
    assert not probe.direct


def test_an_integrated_gpu_does_not_hold_the_model_twice(tmp_path) -> None:
    """Pages are dropped behind the copies: what is left in the page cache does not grow with the model."""
    model = build(tmp_path, [Piece(BIG, layer=i) for i in range(40)], chunk_nbytes=BIG)
    device = HostDevice()
    device.capabilities = replace(HOST_CAPABILITIES, integrated=True)
    with model.path.open("rb") as file:
        import os

        os.fsync(file.fileno())  # dirty pages cannot be dropped
    transfer = make_transfer("touch", device, chunk_nbytes=BIG)
    weights, _ = run_load(model, device, transfer)
    assert_exact(model, device, weights)
    with Mapping(model.directory.shards[0]) as probe:
        assert probe.resident_bytes() <= model.plan.nbytes // 8
    device.close()


def test_the_mapping_is_never_written(tmp_path) -> None:
    before = None
    model = build(tmp_path, [Piece(BIG, layer=i) for i in range(8)], chunk_nbytes=BIG)
    before = model.path.read_bytes()
    device = HostDevice()
    run_load(model, device, make_transfer("touch", device, chunk_nbytes=BIG), verify=True)
    assert model.path.read_bytes() == before
    device.close()
