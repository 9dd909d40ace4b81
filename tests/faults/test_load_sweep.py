"""Fail the nth device call of a load, for every n: all is freed and named, and the next load works."""

import pytest
from pipeline_support import (
    CHUNK,
    STRATEGIES,
    Piece,
    assert_exact,
    assert_nothing_held,
    build,
    load_threads,
    make_transfer,
    run_load,
)

from streamer.device.faulty import CALLS, FaultyDevice
from streamer.device.host import HostDevice
from streamer.errors import DeviceError, DeviceMemoryError
from streamer.plan.plan import Layout

SETUP = {"create_stream": "stream", "allocate_pinned": "pinned memory", "register": "registered memory"}


class Copying:
    """A finisher that goes through the device's own calls, so that they are swept too."""

    landing_nbytes = 4 * CHUNK

    def __init__(self, device) -> None:
        self.device = device

    def finish(self, weight, source, source_offset, target, target_offset, *, stream) -> None:
        self.device.download(
            source, source_offset, target.handle + target_offset, weight.tensor.nbytes, stream=stream
        )


def model_of(tmp_path):
    layouts = [Layout.FILE, Layout.PLANES]
    return build(tmp_path, [Piece(2 * CHUNK + i, layer=i // 2, layout=layouts[i % 2]) for i in range(4)])


def attempt(model, device: FaultyDevice, strategy: str):
    # without processes the conductor copies by itself: the device's calls are the same, and it is quick
    transfer = make_transfer(strategy, device, **({"workers": 0} if strategy == "crewed" else {}))
    try:
        return run_load(model, device, transfer, finisher=Copying(device), verify=True)[0]
    finally:
        transfer.close()


def attempt_or_error(model, device: FaultyDevice, strategy: str):
    try:
        return None, attempt(model, device, strategy)
    except DeviceError as error:
        return error, None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_device_call_may_fail(tmp_path, strategy: str) -> None:
    model = model_of(tmp_path)
    failures = 0
    for nth in range(1, 1000):
        device = FaultyDevice(HostDevice(), nth=nth)
        error, weights = attempt_or_error(model, device, strategy)
        call = device.plan.failed
        if call is None:
            weights.close()
            break  # the load has fewer calls than nth
        if error is None:
            assert call == "allocate_pinned"  # survived with a smaller ring
            weights.close()
        else:
            failures += 1
            assert error.exit_code == 71
            named = any(weight.name in str(error) for weight in model.plan.weights)
            assert named or SETUP.get(call, "landing") in str(error), (nth, call, str(error))
        assert_nothing_held(device)
        assert load_threads() == []
        again = attempt(model, device, strategy)  # the fault is over: same process, same device
        assert_exact(model, device, again)
        again.close()
        assert_nothing_held(device)
    assert failures > 50, "the sweep swept nothing"


@pytest.mark.parametrize("call", sorted(CALLS - {"fill", "register"}))
def test_a_device_that_fails_for_good_is_reported_once(tmp_path, call: str) -> None:
    """Sticky: every later call of the kind fails too, as after an illegal access."""
    model = model_of(tmp_path)
    device = FaultyDevice(HostDevice(), nth=2, calls=frozenset({call}), sticky=True)
    if call in ("allocate_pinned", "stream_sync"):
        attempt(model, device, "ring").close()  # a smaller ring; nobody waits for whole streams
    else:
        with pytest.raises(DeviceError, match="INJECTED"):
            attempt(model, device, "ring")
    assert_nothing_held(device)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_case_49_allocation_k_fails(tmp_path, k: int) -> None:
    model = build(tmp_path, [Piece(2 * CHUNK, layer=i) for i in range(6)])
    sizes = [segment.nbytes for segment in model.plan.segments]
    device = HostDevice(memory_limit=sum(sizes[: k - 1]) + 100)
    with pytest.raises(
        DeviceMemoryError, match=rf"layer {k - 1} \(blk\.{k - 1}\.w{k - 1}\.weight\)"
    ) as caught:
        run_load(model, device, make_transfer("ring", device))
    assert (caught.value.asked, caught.value.free) == (sizes[k - 1], 100)
    assert f"asked {sizes[k - 1]} bytes, 100 bytes free" in str(caught.value)
    assert_nothing_held(device)
    roomy = HostDevice()
    weights, _ = run_load(model, roomy, make_transfer("ring", roomy))
    assert_exact(model, roomy, weights)
    roomy.close()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_case_48_a_smaller_ring_with_a_warning(tmp_path, caplog, slots: int) -> None:
    model = build(tmp_path, [Piece(5 * CHUNK, layer=i) for i in range(4)])
    slot = CHUNK + 4096
    device = HostDevice(pinned_limit=slots * slot + 100)
    weights, _ = run_load(model, device, make_transfer("ring", device, workers=2), verify=True)
    assert_exact(model, device, weights)
    assert device.statistics().peak_pinned_bytes == slots * slot
    assert f"event=smaller_ring slots={slots}" in caplog.text
    device.close()


def test_no_pinned_memory_at_all_is_an_error(tmp_path) -> None:
    model = build(tmp_path, [Piece(CHUNK)])
    device = HostDevice(pinned_limit=100)
    with pytest.raises(DeviceMemoryError, match="pinned memory: asked"):
        run_load(model, device, make_transfer("ring", device))
    assert_nothing_held(device)
