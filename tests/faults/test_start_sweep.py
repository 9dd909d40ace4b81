"""Fail the nth call of a whole start, from file to running engine, for every n: all is freed, the next works.

What fails is what a machine can run out of or break: files, mappings and memory, disk reads, threads.
"""

import asyncio
import errno
import gc
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from streamer.engine.request import FinishEvent, FinishReason, Request, SamplingParameters
from streamer.errors import GgufdError
from streamer.gguf.mapping import Mapping
from streamer.residency.ledger import Ledger
from streamer.runtime.options import StartOptions
from streamer.runtime.planning import RuntimeOptions
from streamer.runtime.start import Runtime, start_runtime

BUILDER = Path(__file__).parents[1] / "cases" / "builder.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    spec = spec_from_file_location("case_builder_of_faults", BUILDER)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return str(module.scripted().write(tmp_path_factory.mktemp("start") / "m.gguf"))


class Nth:
    """Counts calls while `on`; the nth one raises."""

    def __init__(self) -> None:
        self.nth, self.seen = 0, 0
        self._lock = threading.Lock()

    def is_due(self) -> bool:
        with self._lock:
            self.seen += self.nth > 0
            return self.nth > 0 and self.seen == self.nth


def failing_os(name: str, code: int) -> Callable[[pytest.MonkeyPatch, Nth, str], None]:
    def patch(monkeypatch: pytest.MonkeyPatch, due: Nth, path: str) -> None:
        real = getattr(os, name)

        def call(first: Any, *rest: Any, **more: Any) -> Any:
            is_ours = first == path if name == "open" else os.readlink(f"/proc/self/fd/{first}") == path
            if is_ours and due.is_due():
                raise OSError(code, os.strerror(code))
            return real(first, *rest, **more)

        monkeypatch.setattr(os, name, call)

    return patch


def failing_memory(monkeypatch: pytest.MonkeyPatch, due: Nth, path: str) -> None:
    real = mmap.mmap

    def call(*args: Any, **more: Any) -> Any:
        if due.is_due():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(*args, **more)

    monkeypatch.setattr(mmap, "mmap", call)


def failing_disk(monkeypatch: pytest.MonkeyPatch, due: Nth, path: str) -> None:
    real = Mapping.touch

    def call(self: Mapping, offset: int, nbytes: int) -> None:
        if due.is_due():
            self._raise_touch_failed(errno.EIO, offset, nbytes)
        real(self, offset, nbytes)

    monkeypatch.setattr(Mapping, "touch", call)


def failing_threads(monkeypatch: pytest.MonkeyPatch, due: Nth, path: str) -> None:
    real = threading.Thread.start

    def call(self: threading.Thread) -> None:
        if due.is_due():
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", call)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch, Nth, str], None]] = {
    "open": failing_os("open", errno.EMFILE),
    "fstat": failing_os("fstat", errno.EIO),
    "pread": failing_os("pread", errno.EIO),
    "touch": failing_disk,
    "memory": failing_memory,
    "threads": failing_threads,
}


@pytest.fixture
def held() -> Callable[[], tuple[int, set[str]]]:
    """What this process holds: descriptors, and threads that a start could have left."""

    def look() -> tuple[int, set[str]]:
        gc.collect()
        names = {t.name for t in threading.enumerate() if t.is_alive()}
        left = {n for n in names if n.startswith(("load", "stream", "start", "engine", "blas", "host"))}
        return len(os.listdir("/proc/self/fd")), left

    return look


async def start(model: str) -> Runtime:
    options = StartOptions(
        path=model, device="host", runtime=RuntimeOptions(n_ctx=64, max_sequences=1), ring_mib=8
    )
    return await start_runtime(options, Ledger(model=model))


async def answer(runtime: Runtime) -> list[int]:
    request = Request(id="x", prompt_ids=[8], sampling=SamplingParameters(temperature=0), max_tokens=3)
    events = [event async for event in runtime.engine.submit_nowait(request).events()]
    assert isinstance(events[-1], FinishEvent)
    assert events[-1].reason is not FinishReason.ERROR
    return [event.token_id for event in events if hasattr(event, "token_id")]


def attempt(model: str, due: Nth, nth: int) -> BaseException | None:
    """One start with the nth call failing; the error, or None when it came up and answered."""

    async def run() -> BaseException | None:
        due.nth, due.seen = nth, 0
        try:
            runtime = await start(model)
        except Exception as error:  # noqa: BLE001 - whatever comes is looked at
            return error
        finally:
            due.nth = 0
        try:
            assert await answer(runtime) == [9, 10, 11]
        finally:
            await asyncio.to_thread(runtime.close)
        return None

    return asyncio.run(run())


@pytest.mark.parametrize("fault", list(FAULTS))
def test_every_call_of_a_start_may_fail(fault: str, model: str, monkeypatch, held) -> None:
    due = Nth()
    FAULTS[fault](monkeypatch, due, model)
    assert attempt(model, due, 0) is None
    before = held()
    failures = 0
    for nth in range(1, 200):
        error = attempt(model, due, nth)
        if due.seen < nth:
            break  # the start has fewer such calls
        if error is not None:
            failures += 1
            right = (GgufdError, RuntimeError) if fault == "threads" else (GgufdError,)
            assert isinstance(error, right), (nth, error)
            assert fault in ("threads", "memory") or model in str(error)
        _settles(held, before, nth)
    assert failures, "the sweep swept nothing"
    assert attempt(model, due, 0) is None


def _settles(held: Callable[[], tuple[int, set[str]]], before: tuple[int, set[str]], nth: int) -> None:
    """Threads that were told to end may need a moment."""
    deadline = time.monotonic() + 5
    while (now := held()) != before:
        assert time.monotonic() < deadline, (nth, before, now)
        time.sleep(0.01)
