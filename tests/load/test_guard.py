"""A file cut short while its mapping is read: the process lives, and the load says whose fault it was."""

import asyncio
import ctypes
import os
import signal
import threading

import pytest
from pipeline_support import CHUNK, Piece, assert_nothing_held, build, make_transfer, run_load

from streamer.device.host import HostDevice
from streamer.errors import FileChangedError
from streamer.gguf.mapping import Mapping
from streamer.load.guard import MappingGuard, repair
from streamer.residency.ledger import Ledger


class CutAfterTouch(Mapping):
    """The worst moment: the file shrinks between `touch` and the copy from the mapping."""

    cut_at = 3

    def touch(self, offset: int, nbytes: int) -> None:
        super().touch(offset, nbytes)
        type(self).cut_at -= 1
        if type(self).cut_at == 0:
            os.truncate(self.shard.path, 4096)


@pytest.mark.parametrize("strategy", ["ring", "window", "touch"])
def test_truncation_between_touch_and_copy_is_an_error_not_a_death(tmp_path, strategy: str) -> None:
    model = build(tmp_path, [Piece(4 * CHUNK, layer=i) for i in range(8)])
    CutAfterTouch.cut_at = 3
    device = HostDevice()
    with pytest.raises(FileChangedError, match=r"truncated|ends early"):
        run_load(model, device, make_transfer(strategy, device), open_source=CutAfterTouch, verify=True)
    assert_nothing_held(device)
    assert signal.getsignal(signal.SIGBUS) == signal.SIG_DFL  # put back


def test_outside_the_main_thread_cached_bytes_are_read_not_mapped(tmp_path) -> None:
    """No handler can be installed there: the ring then never copies from the mapping."""
    model = build(tmp_path, [Piece(4 * CHUNK, layer=i) for i in range(8)])
    touched: list[int] = []

    class Watching(Mapping):
        def touch(self, offset: int, nbytes: int) -> None:
            touched.append(offset)
            super().touch(offset, nbytes)

    device = HostDevice()
    errors: list[BaseException] = []

    def body() -> None:
        try:
            run_load(model, device, make_transfer("ring", device), open_source=Watching)
        except BaseException as error:  # noqa: BLE001  handed to the test
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert errors == []
    assert touched == []
    device.close()


def test_repair_replaces_only_what_is_lost(tmp_path) -> None:
    model = build(tmp_path, [Piece(3 * 4096, layer=0)], header=0)
    with Mapping(model.directory.shards[0]) as mapping:
        assert not repair(mapping)
        os.truncate(model.path, 5000)
        assert repair(mapping)
        assert ctypes.string_at(mapping.address, 5000) == b"\x01" * 5000
        assert ctypes.string_at(mapping.address + 8192, 4096) == bytes(4096)


def test_a_foreign_bus_error_is_left_to_whoever_was_there_before() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGBUS, lambda number, frame: seen.append(number))
    try:
        guard = MappingGuard()
        assert guard.watch([])
        signal.raise_signal(signal.SIGBUS)  # nothing of ours has shrunk
        assert seen == []
        signal.raise_signal(signal.SIGBUS)  # the instruction's next turn
        assert seen == [signal.SIGBUS]
        guard.close()
    finally:
        signal.signal(signal.SIGBUS, previous)


def test_errors_while_reading_are_named(tmp_path) -> None:
    """EIO in mid-read: the file's name, the tensor's, the reason."""
    model = build(tmp_path, [Piece(4 * CHUNK, layer=i) for i in range(8)])

    class Failing(Mapping):
        def touch(self, offset: int, nbytes: int) -> None:
            if offset > model.plan.weights[5].tensor.offset:
                raise FileChangedError(
                    self.shard.path, "file", f"{nbytes} bytes at {offset}: Input/output error"
                )
            super().touch(offset, nbytes)

        def read_direct(self, address: int, offset: int, nbytes: int) -> int:
            self.touch(offset, nbytes)
            return super().read_direct(address, offset, nbytes)

    for strategy in ("ring", "window", "touch"):
        device = HostDevice()
        ledger = Ledger(model.plan)
        with pytest.raises(
            FileChangedError, match=r"blk\.[4567]\.w\d\.weight: .*Input/output error"
        ) as caught:
            run_load(model, device, make_transfer(strategy, device), ledger=ledger, open_source=Failing)
        assert caught.value.exit_code == 65
        assert_nothing_held(device)
        with pytest.raises(FileChangedError):
            asyncio.run(ledger.wait_resident())
