"""The host's own share of a step: what a turn took without its waits, on a clock that only we move."""

import asyncio
import runpy
from pathlib import Path

import numpy as np
import pytest

from streamer.cache.pages import PagePool
from streamer.engine.engine import Engine
from streamer.engine.steps import EngineOptions

ROOT = Path(__file__).parents[2]
LAUNCH_S, DEVICE_S = 0.25, 8.0


class TimedExecutor:
    """The fake executor on a device that takes `DEVICE_S`; its launch takes the host `LAUNCH_S`."""

    def __init__(self, inner, clock):
        self._inner, self._clock = inner, clock

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def step(self, batch, sampling):
        self._clock.now_s += LAUNCH_S
        return TimedPending(self._inner.step(batch, sampling), self._clock)


class TimedPending:
    def __init__(self, inner, clock):
        self._inner, self._clock = inner, clock

    def result(self):
        self._clock.now_s += DEVICE_S
        return self._inner.result()


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.mark.parametrize(("overlap", "expected_s"), [(True, LAUNCH_S), (False, 0.0)])
def test_host_time_is_without_the_wait_for_the_device(fake_executor, request_of, overlap, expected_s):
    """Without overlap the executor computes within `step`: that is the device's time, too."""
    clock, seen = Clock(), []
    options = EngineOptions(max_sequences=4, n_ctx=256, max_rows=32, max_logit_rows=8, overlap=overlap)
    executor = TimedExecutor(fake_executor(64, 4, 4), clock)
    engine = Engine(
        executor, PagePool(64, 4), options, clock=clock, on_step=lambda phase, s: seen.append((phase, s))
    )

    async def main():
        engine.start()
        handle = engine.submit_nowait(request_of(prompt=[1, 2, 3], max_tokens=5))
        while await handle.batch():
            pass
        engine.stop()

    asyncio.run(main())
    host = [seconds for phase, seconds in seen if phase == "host"]
    steps = [seconds for phase, seconds in seen if phase != "host"]
    assert len(host) == len(steps) >= 5
    assert expected_s in host
    assert max(host) <= expected_s  # the last turns launch nothing
    assert min(steps) >= DEVICE_S


def test_the_hosts_share_of_a_step_stays_small():
    """0.5 ms at 64 sequences, building the tables of a GPU included; processor time, so that neighbours do
    not count.
    """
    found = runpy.run_path(str(ROOT / "benchmarks" / "host_step.py"))["step_times_us"](64, 300)
    assert np.percentile(found, 10) < 500
