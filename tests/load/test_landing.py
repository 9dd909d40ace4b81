"""Weights that are rearranged on the device: the landing area, the finisher, and who waits for whom."""

import threading

import numpy as np
import pytest
from pipeline_support import CHUNK, STRATEGIES, Piece, assert_nothing_held, build, make_transfer, run_load

from streamer.device.host import HostDevice
from streamer.errors import DeviceError, PlanError, ResidencyError
from streamer.plan.plan import Layout


class Inverting:
    """Writes every byte inverted to the target; `before` runs on the stream first."""

    def __init__(self, landing_nbytes: int, before=lambda weight: None) -> None:
        self.landing_nbytes = landing_nbytes
        self.before = before
        self.finished: list[str] = []

    def finish(self, weight, source, source_offset, target, target_offset, *, stream) -> None:
        nbytes = weight.tensor.nbytes
        self.finished.append(weight.name)

        def work() -> None:
            self.before(weight)
            data = source.array[source_offset : source_offset + nbytes]
            target.array[target_offset : target_offset + nbytes] = ~data

        stream.submit(work)


def model_of(tmp_path, count: int = 8):
    rng = np.random.default_rng(5)
    pieces = []
    for i in range(count):
        nbytes = 3 * CHUNK + 100 * i
        layout = Layout.PLANES if i % 3 else Layout.FILE
        data = rng.integers(0, 256, nbytes, dtype=np.uint8).tobytes()
        pieces.append(Piece(nbytes, layer=i // 2, layout=layout, data=data))
    return build(tmp_path, pieces)


def assert_inverted(model, weights) -> None:
    for planned in model.plan.weights:
        place = weights[planned.name]
        found = place.buffer.array[place.offset : place.offset + planned.resident_nbytes].tobytes()
        data = np.frombuffer(model.data[planned.name], dtype=np.uint8)
        expected = data if planned.layout is Layout.FILE else ~data
        assert found == expected.tobytes(), planned.name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("room", [1, 2, 10])
def test_weights_are_rearranged_after_their_proof(tmp_path, strategy: str, room: int) -> None:
    model = model_of(tmp_path)
    device = HostDevice(poison=0x55, link_bytes_per_s=50e6)
    finisher = Inverting(room * 4 * CHUNK)
    transfer = make_transfer(strategy, device)
    weights, ledger = run_load(model, device, transfer, finisher=finisher, verify=True)
    assert_inverted(model, weights)
    planes = [w.name for w in model.plan.weights if w.layout is Layout.PLANES]
    assert sorted(finisher.finished) == sorted(planes)  # two workers may queue neighbours in either order
    assert ledger.statistics().verified
    weights.close()
    transfer.close()
    assert_nothing_held(device)


def test_landing_space_is_reused_behind_the_rearrangement_without_the_host_waiting(tmp_path) -> None:
    """The first rearrangement hangs until the next weight's copy into the same space has been queued."""
    pieces = [Piece(CHUNK, layer=i, layout=Layout.PLANES) for i in range(3)]
    model = build(tmp_path, pieces)
    queued = threading.Event()
    offsets: list[int] = []

    class Watching(HostDevice):
        def upload(self, buffer, offset, source, nbytes, *, stream, kind) -> None:
            super().upload(buffer, offset, source, nbytes, stream=stream, kind=kind)
            offsets.append(offset)
            if len(offsets) == 2:
                queued.set()

    def hang(weight) -> None:
        if weight.index == 0:
            assert queued.wait(timeout=30), "the host waited for the rearrangement"

    device = Watching()
    weights, _ = run_load(model, device, make_transfer("ring", device), finisher=Inverting(CHUNK, hang))
    assert offsets == [0, 0, 0]  # all in the same space
    assert_inverted(model, weights)
    device.close()


def test_a_weight_is_resident_only_after_its_rearrangement(tmp_path) -> None:
    model = build(tmp_path, [Piece(3 * CHUNK, layer=0, layout=Layout.PLANES)])
    device = HostDevice()
    seen: list[tuple[float, int]] = []
    from streamer.residency.ledger import Ledger

    ledger = Ledger(model.plan)

    def look(weight) -> None:
        now = ledger.statistics()
        seen.append((now.fraction, now.tensors_resident))

    run_load(model, device, make_transfer("ring", device), ledger=ledger, finisher=Inverting(4 * CHUNK, look))
    assert [(fraction < 1.0, resident) for fraction, resident in seen] == [(True, 0)]
    assert ledger.statistics().fraction == 1.0
    device.close()


def test_a_weight_larger_than_the_landing_area_is_named(tmp_path) -> None:
    model = model_of(tmp_path)
    device = HostDevice()
    with pytest.raises(ResidencyError, match=r"blk\.0\.w1\.weight"):
        run_load(model, device, make_transfer("ring", device), finisher=Inverting(CHUNK))
    assert_nothing_held(device)


def test_a_plan_that_rearranges_needs_a_finisher(tmp_path) -> None:
    model = model_of(tmp_path)
    device = HostDevice()
    with pytest.raises(PlanError, match="rearranges"):
        run_load(model, device, make_transfer("ring", device))
    assert_nothing_held(device)


def test_a_failed_rearrangement_names_the_weight_and_frees_everything(tmp_path) -> None:
    model = model_of(tmp_path)
    device = HostDevice()

    def fail(weight) -> None:
        if weight.index == 4:
            raise ValueError("no such plane")

    with pytest.raises(DeviceError, match=r"blk\..*no such plane"):
        run_load(model, device, make_transfer("ring", device), finisher=Inverting(4 * CHUNK, fail))
    assert_nothing_held(device)
