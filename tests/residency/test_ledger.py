"""The ledger on a virtual clock: progress, rate, ETA, stall age, states, waiters, the JSON object."""

import asyncio
import json

import pytest
from pipeline_support import Piece, build

from streamer.errors import DeviceMemoryError, ResidencyError
from streamer.plan.plan import Layout
from streamer.residency.ledger import Ledger
from streamer.residency.snapshot import to_json
from streamer.residency.state import Phase, State


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ledger_of(tmp_path, clock: Clock, pieces) -> Ledger:
    return Ledger(build(tmp_path, pieces).plan, clock, model="m.gguf", device="host", transfer="ring")


def upload(ledger: Ledger, weight: int, nbytes: int, parts: int = 1) -> None:
    for _ in range(parts):
        ledger.completed(weight, nbytes // parts)


def test_progress_counts_completed_bytes_tensors_and_layers(tmp_path, clock) -> None:
    ledger = ledger_of(tmp_path, clock, [Piece(100, layer=None), Piece(200, layer=0), Piece(100, layer=1)])
    for segment in range(3):
        ledger.allocated(segment)
    ledger.completed(0, 50)
    now = ledger.statistics()
    assert (now.bytes_resident, now.bytes_total, now.tensors_resident, now.layers_resident) == (50, 400, 0, 0)
    assert now.fraction == 0.125
    upload(ledger, 0, 50)
    upload(ledger, 1, 200, parts=2)
    now = ledger.statistics()
    assert (now.tensors_resident, now.layers_resident, now.layers_total) == (2, 1, 2)
    assert [layer.is_resident for layer in now.layers] == [True, True, False]
    assert now.bytes_by_state[State.RESIDENT] == 300
    assert now.bytes_by_state[State.ALLOCATED] == 100
    upload(ledger, 2, 100)
    assert ledger.statistics().fraction == 1.0
    assert not ledger.statistics().verified


def test_a_weight_uploaded_twice_is_our_own_fault(tmp_path, clock) -> None:
    ledger = ledger_of(tmp_path, clock, [Piece(100)])
    ledger.allocated(0)
    upload(ledger, 0, 100)
    with pytest.raises(AssertionError, match="uploaded twice"):
        ledger.completed(0, 1)


def test_rate_is_of_the_last_two_seconds_and_eta_follows(tmp_path, clock) -> None:
    ledger = ledger_of(tmp_path, clock, [Piece(10_000)])
    ledger.allocated(0)
    ledger.enter(Phase.UPLOAD)
    for _ in range(40):  # 4 s at 1000 bytes/s
        clock.now_s += 0.1
        ledger.completed(0, 100)
    now = ledger.statistics()
    assert now.bytes_per_s == pytest.approx(1000, rel=0.06)
    assert now.eta_s == pytest.approx(6.0, rel=0.06)
    for _ in range(30):  # 3 s at 500 bytes/s
        clock.now_s += 0.1
        ledger.completed(0, 50)
    assert ledger.statistics().bytes_per_s == pytest.approx(500, rel=0.06)


def test_a_stall_grows_its_age_and_lowers_the_rate(tmp_path, clock) -> None:
    ledger = ledger_of(tmp_path, clock, [Piece(10_000)])
    ledger.allocated(0)
    ledger.enter(Phase.UPLOAD)
    for _ in range(10):
        clock.now_s += 0.1
        ledger.completed(0, 100)
    rate = ledger.statistics().bytes_per_s
    clock.now_s += 1.0
    assert ledger.statistics().last_progress_s == pytest.approx(1.0)
    assert ledger.statistics().bytes_per_s < rate
    clock.now_s += 9.0
    assert ledger.statistics().last_progress_s == pytest.approx(10.0)
    assert ledger.statistics().bytes_per_s == 0.0
    assert ledger.statistics().eta_s is None


def test_after_the_upload_the_rate_is_the_whole_uploads(tmp_path, clock) -> None:
    ledger = ledger_of(tmp_path, clock, [Piece(1000)])
    ledger.allocated(0)
    ledger.enter(Phase.UPLOAD)
    clock.now_s += 2.0
    ledger.completed(0, 1000)
    clock.now_s += 50.0
    now = ledger.statistics()
    assert now.bytes_per_s == pytest.approx(500)
    assert now.eta_s == 0.0


def test_phases_go_forward_and_their_seconds_are_kept(tmp_path, clock) -> None:
    ledger = Ledger(None, clock)
    clock.now_s += 1.0
    ledger.enter(Phase.PLAN)
    clock.now_s += 2.0
    ledger.adopt(build(tmp_path, [Piece(10)]).plan)
    ledger.enter(Phase.UPLOAD)
    with pytest.raises(AssertionError):
        ledger.enter(Phase.PLAN)
    clock.now_s += 4.0
    ledger.allocated(0)
    ledger.completed(0, 10)
    ledger.enter(Phase.READY)
    clock.now_s += 100.0
    now = ledger.statistics()
    assert now.phase_seconds[Phase.OPEN] == 1.0
    assert now.phase_seconds[Phase.PLAN] == 2.0
    assert now.phase_seconds[Phase.UPLOAD] == 4.0
    assert now.elapsed_s == 7.0  # stands still once ready


def test_verification_may_be_known_before_the_last_completion_is_reported(tmp_path, clock) -> None:
    ledger = ledger_of(tmp_path, clock, [Piece(100), Piece(100)])
    ledger.allocated(0)
    ledger.verified(0)
    upload(ledger, 0, 100)
    assert ledger.statistics().bytes_by_state[State.VERIFIED] == 100
    upload(ledger, 1, 100)
    assert not ledger.statistics().verified
    ledger.verified(1)
    assert ledger.statistics().verified


@pytest.mark.parametrize("finished_first", [True, False])
def test_a_rearranged_weight_holds_its_last_bytes_back(tmp_path, clock, finished_first: bool) -> None:
    ledger = ledger_of(tmp_path, clock, [Piece(100, layout=Layout.PLANES)])
    ledger.allocated(0)
    ledger.completed(0, 60)
    if finished_first:
        ledger.finished(0)
        assert ledger.statistics().fraction == 0.6
        ledger.completed(0, 40)
    else:
        ledger.completed(0, 40)
        assert ledger.statistics().bytes_resident == 60
        assert ledger.statistics().fraction == 0.6
        ledger.finished(0)
    assert ledger.statistics().fraction == 1.0
    assert ledger.statistics().tensors_resident == 1


def test_a_layer_in_two_segments_has_its_event_when_both_are_queued(tmp_path, clock) -> None:
    pieces = [Piece(10, layer=0), Piece(10, layer=1), Piece(10, layer=0)]
    ledger = ledger_of(tmp_path, clock, pieces)
    ledger.segment_submitted(2, "second")
    assert ledger.layer_event(0) is None
    ledger.segment_submitted(0, "first")
    assert ledger.layer_event(0) == "first"  # recorded last on the one stream: after both
    assert ledger.layer_event(7) is None


def test_waiters_wake_at_their_layer(tmp_path) -> None:
    ledger = Ledger(build(tmp_path, [Piece(10, layer=0), Piece(10, layer=1)]).plan)
    order: list[str] = []

    async def wait(layer: int | None, name: str) -> None:
        await ledger.wait_resident(layer)
        order.append(name)

    async def main() -> None:
        tasks = [asyncio.create_task(wait(*x)) for x in ((None, "all"), (1, "one"), (0, "zero"))]
        await asyncio.sleep(0)
        for index in (0, 1):
            ledger.allocated(index)
            await asyncio.to_thread(ledger.completed, index, 10)
            await tasks[2 if index == 0 else 1]
        await asyncio.gather(*tasks)
        await ledger.wait_resident()  # at once by now

    asyncio.run(asyncio.wait_for(main(), 30))
    assert order[0] == "zero"
    assert sorted(order[1:]) == ["all", "one"]


def test_waiters_may_come_before_the_plan(tmp_path) -> None:
    ledger = Ledger()

    async def main() -> None:
        waiter = asyncio.create_task(ledger.wait_resident())
        await asyncio.sleep(0)
        ledger.adopt(build(tmp_path, [Piece(10)]).plan)
        ledger.allocated(0)
        ledger.completed(0, 10)
        await waiter

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_cancelled_waiter_leaves_nothing_behind(tmp_path) -> None:
    ledger = Ledger(build(tmp_path, [Piece(10)]).plan)

    async def main() -> None:
        waiter = asyncio.create_task(ledger.wait_resident())
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    asyncio.run(main())
    assert ledger._waiters == []


def test_failure_is_told_to_waiters_and_probes(tmp_path, clock) -> None:
    ledger = ledger_of(tmp_path, clock, [Piece(10)])
    error = DeviceMemoryError("cuMemAlloc", "OUT_OF_MEMORY", 100, 7, "layer 3")

    async def main() -> None:
        waiter = asyncio.create_task(ledger.wait_resident())
        await asyncio.sleep(0)
        ledger.fail(error)
        with pytest.raises(DeviceMemoryError):
            await waiter

    asyncio.run(main())
    ledger.fail(ResidencyError("a consequence"))
    now = ledger.statistics()
    assert now.status == "failed"
    assert now.bytes_by_state[State.FAILED] == 10
    assert to_json(now, h2d_load=0, h2d_serve=0)["error"] == {
        "message": "cuMemAlloc: OUT_OF_MEMORY: layer 3: asked 100 bytes, 7 bytes free",
        "type": "device_memory_error",
        "code": 71,
    }


def test_an_unforeseen_error_shows_no_internals(tmp_path, clock) -> None:
    ledger = ledger_of(tmp_path, clock, [Piece(10)])
    ledger.fail(KeyError("/secret/path"))
    error = ledger.statistics().error
    assert error is not None
    assert (error.message, error.code) == ("internal error", 70)


def test_the_residency_object_is_the_interfaces(tmp_path, clock) -> None:
    ledger = ledger_of(tmp_path, clock, [Piece(100, layer=0), Piece(100, layer=1)])
    ledger.enter(Phase.UPLOAD)
    ledger.allocated(0)
    ledger.read(page_cache=60, storage=40)
    clock.now_s += 0.5
    ledger.completed(0, 100)
    clock.now_s += 0.5
    found = to_json(ledger.statistics(), h2d_load=100, h2d_serve=0, with_layers=True)
    layers = found.pop("layers")
    assert json.loads(json.dumps(found)) == {
        "status": "loading",
        "phase": "upload",
        "model": "m.gguf",
        "device": "host",
        "transfer": "ring",
        "bytes_resident": 100,
        "bytes_total": 200,
        "tensors_resident": 1,
        "tensors_total": 2,
        "layers_resident": 1,
        "layers_total": 2,
        "fraction": 0.5,
        "elapsed_s": 1.0,
        "bytes_per_s": 100.0,
        "eta_s": 1.0,
        "last_progress_s": 0.5,
        "source": {"page_cache_bytes": 60, "storage_bytes": 40},
        "verified": False,
        "weight_h2d_bytes_load": 100,
        "weight_h2d_bytes_serve": 0,
        "error": None,
    }
    assert [(layer["name"], layer["state"]) for layer in layers] == [
        ("layer 0", "resident"),
        ("layer 1", "planned"),
    ]


def test_draining_shows_unless_failed(tmp_path, clock) -> None:
    ledger = ledger_of(tmp_path, clock, [Piece(10)])
    ledger.drain()
    assert ledger.statistics().status == "draining"


def test_an_empty_ledger_answers_probes(clock) -> None:
    now = Ledger(None, clock).statistics()
    assert (now.status, now.phase, now.fraction, now.bytes_total) == ("loading", "open", 0.0, 0)
