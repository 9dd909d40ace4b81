"""Cancelling a load at every stage: everything stops, drains and is freed; the next load works."""

import asyncio
import threading

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

from streamer.device.host import HostDevice
from streamer.gguf.mapping import Mapping
from streamer.load.pipeline import load
from streamer.residency.ledger import Ledger


class CancellingDevice(HostDevice):
    """Cancels the load's task at the nth call of one kind, from within the call."""

    def __init__(self, call: str, nth: int, **options) -> None:
        super().__init__(**options)
        self._call, self._left = call, nth
        self.cancel = lambda: None

    def _seen(self, call: str) -> None:
        if call == self._call:
            self._left -= 1
            if self._left == 0:
                self.cancel()

    def create_stream(self, name):
        self._seen("create_stream")
        return super().create_stream(name)

    def allocate(self, nbytes, *, what=""):
        self._seen("allocate")
        return super().allocate(nbytes, what=what)

    def allocate_pinned(self, nbytes):
        self._seen("allocate_pinned")
        return super().allocate_pinned(nbytes)

    def register(self, address, nbytes):
        self._seen("register")
        return super().register(address, nbytes)

    def upload(self, buffer, offset, source, nbytes, *, stream, kind) -> None:
        self._seen("upload")
        super().upload(buffer, offset, source, nbytes, stream=stream, kind=kind)

    def checksum(self, buffer, offset, nbytes, *, stream):
        self._seen("checksum")
        return super().checksum(buffer, offset, nbytes, stream=stream)


class CancellingSource(Mapping):
    """Cancels at the nth touch; then as the file is read no further."""

    cancel = staticmethod(lambda: None)
    left = 0

    def touch(self, offset: int, nbytes: int) -> None:
        type(self).left -= 1
        if type(self).left == 0:
            type(self).cancel()
        super().touch(offset, nbytes)


def run_cancelled(model, device, strategy: str, ledger: Ledger, set_cancel, **options) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        transfer = make_transfer(strategy, device)
        task = asyncio.create_task(load(model.plan, model.directory, device, transfer, ledger, **options))
        set_cancel(lambda: loop.call_soon_threadsafe(task.cancel))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


STAGES = [
    ("create_stream", 1),
    ("create_stream", 2),
    ("allocate", 1),
    ("allocate", 4),
    ("allocate_pinned", 1),
    ("allocate_pinned", 4),
    ("upload", 1),
    ("upload", 9),
    ("checksum", 1),
    ("checksum", 7),
]


@pytest.mark.parametrize(("call", "nth"), STAGES)
def test_cancelled_at_a_stage_everything_is_freed_and_the_next_load_works(
    tmp_path, call: str, nth: int
) -> None:
    model = build(tmp_path, [Piece(3 * CHUNK, layer=i) for i in range(6)])
    device = CancellingDevice(call, nth, link_bytes_per_s=2e6)
    ledger = Ledger(model.plan)
    run_cancelled(model, device, "ring", ledger, lambda c: setattr(device, "cancel", c), verify=True)
    assert_nothing_held(device)
    assert load_threads() == []
    assert ledger.statistics().fraction < 1.0
    assert ledger.statistics().error is None  # nobody's fault
    again = HostDevice()
    weights, _ = run_load(model, again, make_transfer("ring", again), verify=True)
    assert_exact(model, again, weights)
    again.close()


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "crewed"])  # touched elsewhere
def test_cancelled_while_touching(tmp_path, strategy: str) -> None:
    model = build(tmp_path, [Piece(3 * CHUNK, layer=i) for i in range(6)])
    device, ledger = HostDevice(link_bytes_per_s=2e6), Ledger(model.plan)
    CancellingSource.left = 5

    def set_cancel(cancel) -> None:
        CancellingSource.cancel = staticmethod(cancel)

    run_cancelled(model, device, strategy, ledger, set_cancel, open_source=CancellingSource)
    assert_nothing_held(device)
    assert load_threads() == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cancelled_load_does_not_wait_for_a_slow_link(tmp_path, strategy: str) -> None:
    """At 100 kB/s the slots in flight alone would take 0.6 s, the model minutes; SIGTERM has two seconds."""
    model = build(tmp_path, [Piece(16 * CHUNK, layer=i) for i in range(20)])
    device = CancellingDevice("upload", 3, link_bytes_per_s=20e3)
    ledger = Ledger(model.plan)
    took: list[float] = []

    def set_cancel(cancel) -> None:
        import time

        def cancel_and_note() -> None:
            took.append(time.monotonic())
            cancel()

        device.cancel = cancel_and_note

    import time

    run_cancelled(model, device, strategy, ledger, set_cancel)
    assert time.monotonic() - took[0] < 1.5
    assert_nothing_held(device)


def test_cancelled_twice_it_still_ends_clean(tmp_path) -> None:
    model = build(tmp_path, [Piece(3 * CHUNK, layer=i) for i in range(6)])
    device = CancellingDevice("upload", 4, link_bytes_per_s=2e6)
    entered, release = threading.Event(), threading.Event()

    class Slow(HostDevice):
        pass

    ledger = Ledger(model.plan)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        transfer = make_transfer("ring", device)
        task = asyncio.create_task(load(model.plan, model.directory, device, transfer, ledger))

        def cancel() -> None:
            # a worker is inside `upload` while both cancellations arrive
            loop.call_soon_threadsafe(task.cancel)
            loop.call_soon_threadsafe(task.cancel)
            loop.call_soon_threadsafe(entered.set)
            assert entered.wait(timeout=30)
            release.set()

        device.cancel = cancel
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert release.is_set()
    assert_nothing_held(device)
    assert load_threads() == []


def test_waiters_are_told_when_a_load_is_cancelled(tmp_path) -> None:
    model = build(tmp_path, [Piece(3 * CHUNK, layer=i) for i in range(6)])
    device = HostDevice(link_bytes_per_s=1e5)
    ledger = Ledger(model.plan)

    async def main() -> None:
        transfer = make_transfer("ring", device)
        task = asyncio.create_task(load(model.plan, model.directory, device, transfer, ledger))
        waiter = asyncio.create_task(ledger.wait_resident())
        await ledger.wait_resident(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(Exception, match="cancelled"):
            await waiter

    asyncio.run(main())
    assert_nothing_held(device)
