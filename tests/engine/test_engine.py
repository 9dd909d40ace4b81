"""The engine with its thread and an event loop: what a server sees. Blocked on gates, never on time."""

import asyncio
import dataclasses
import threading

import pytest

from streamer.cache.pages import PagePool
from streamer.engine.engine import Engine
from streamer.engine.refusals import NotServing, PromptTooLong, QueueFull
from streamer.engine.request import FinishEvent, FinishReason, TokenEvent
from streamer.engine.steps import EngineOptions
from streamer.errors import DeviceError


class Permits:
    """A gate that lets a counted number of steps through."""

    def __init__(self):
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def allow(self, n):
        self._permits.release(n)

    def wait(self, timeout):
        return self._is_open or self._permits.acquire(timeout=timeout)

    def set(self):
        self._is_open = True
        self.allow(1)


class Bench:
    """An engine over the fake executor, for use inside one asyncio.run."""

    def __init__(self, fake_executor, *, n_pages=64, **changes):
        options = EngineOptions(
            max_sequences=4, n_ctx=4096, max_rows=32, max_logit_rows=8, min_prefill_rows=2, queue_limit=8
        )
        self.options = dataclasses.replace(options, **changes)
        self.executor = fake_executor(n_pages, 4, self.options.max_sequences)
        self.failures = []
        self.failed = threading.Event()
        self.engine = Engine(self.executor, PagePool(n_pages, 4), self.options, on_failure=self.note_failure)

    def note_failure(self, error):
        self.failures.append(error)
        self.failed.set()

    def __enter__(self):
        self.engine.start()
        return self

    def __exit__(self, *_):
        if self.executor.gate is not None:
            self.executor.gate.set()
        assert self.engine.stop()


@pytest.fixture
def bench(fake_executor):
    return lambda **changes: Bench(fake_executor, **changes)


async def collect(handle):
    return [event async for event in handle.events()]


def ids_in(events):
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


async def until_idle(engine):
    """Nothing tells that the thread went to sleep but its statistics; the test's own timeout is the bound."""
    while engine.statistics().last_step_age_s or engine.statistics().running:  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize("overlap", [False, True])
def test_concurrent_consumers_get_their_own_answers(bench, request_of, alone, overlap):
    requests = [request_of(f"r{i}", 3 + 5 * i, 10 + i, temperature=1.0, seed=i) for i in range(10)]

    async def main():
        with bench(overlap=overlap) as b:
            handles = [b.engine.submit_nowait(r) for r in requests]
            answers = await asyncio.gather(*(collect(h) for h in handles))
            b.engine.check_integrity()
            return answers

    for request, events in zip(requests, asyncio.run(main()), strict=True):
        assert ids_in(events) == alone(request, request.max_tokens)
        assert isinstance(events[-1], FinishEvent)
        assert sum(isinstance(e, FinishEvent) for e in events) == 1


def test_more_than_the_queue_holds_is_refused_and_the_rest_is_served(bench, request_of):
    async def main():
        with bench(max_sequences=1, max_logit_rows=4, queue_limit=2) as b:
            b.executor.gate = threading.Event()
            handles = [b.engine.submit_nowait(request_of(f"r{i}", 4, 3)) for i in range(3)]
            with pytest.raises(QueueFull):
                b.engine.submit_nowait(request_of("more", 4, 3))
            b.executor.gate.set()
            for handle in handles:
                assert len(ids_in(await collect(handle))) == 3
            assert len(ids_in(await collect(b.engine.submit_nowait(request_of("more", 4, 3))))) == 3

    asyncio.run(main())


def test_what_cannot_run_is_refused_at_once(bench, request_of):
    async def main():
        with bench(n_ctx=10) as b:
            with pytest.raises(PromptTooLong):
                b.engine.submit_nowait(request_of("a", 11, 1))
            with pytest.raises(ValueError, match="at least one"):
                b.engine.submit_nowait(request_of("a", [], 1))
            b.engine.check_integrity()

    asyncio.run(main())


def test_an_engine_that_was_not_started_or_is_stopped_takes_nothing(bench, request_of):
    async def main():
        b = bench()
        with pytest.raises(NotServing):
            b.engine.submit_nowait(request_of("a", 4, 1))
        with b:
            pass
        with pytest.raises(NotServing):
            b.engine.submit_nowait(request_of("a", 4, 1))

    asyncio.run(main())


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.STOP])
def test_finishing_takes_effect_within_one_step_and_only_the_end_still_comes(bench, request_of, reason):
    async def main():
        with bench() as b:
            b.executor.gate = Permits()
            handle = b.engine.submit_nowait(request_of("a", 4, 100))
            other = b.engine.submit_nowait(request_of("b", 4, 30))
            b.executor.gate.allow(3)
            async for event in handle.events():
                if isinstance(event, TokenEvent):
                    break
            handle.finish(reason)
            handle.finish(FinishReason.CANCELLED)
            b.executor.gate.allow(1)
            rest = await collect(handle)
            assert [type(e) for e in rest] == [FinishEvent]
            assert rest[0].reason is reason
            assert rest[0].n_generated <= 4
            b.executor.gate.set()
            assert len(ids_in(await collect(other))) == 30
            b.engine.check_integrity()

    asyncio.run(main())


def test_a_cancelled_consumer_that_finishes_in_its_finally_frees_the_sequence(bench, request_of):
    handles = []

    async def consumer(b, started):
        handle = b.engine.submit_nowait(request_of("a", 4, 10_000))
        handles.append(handle)
        try:
            async for _ in handle.events():
                started.set()
        finally:
            handle.finish(FinishReason.CANCELLED)

    async def main():
        with bench(n_pages=2000) as b:
            started = asyncio.Event()
            task = asyncio.create_task(consumer(b, started))
            await started.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await handles[0].ended).reason is FinishReason.CANCELLED
            b.engine.check_integrity()

    asyncio.run(main())


def test_a_slow_reader_resumes_where_it_stopped(bench, request_of, alone):
    slow_request, fast_request = request_of("slow", 4, 60), request_of("fast", 4, 60)

    async def main():
        with bench(backlog_limit=8) as b:
            slow, fast = b.engine.submit_nowait(slow_request), b.engine.submit_nowait(fast_request)
            assert ids_in(await collect(fast)) == alone(fast_request, 60)
            assert slow.paused
            assert slow.sent <= 10
            assert ids_in(await collect(slow)) == alone(slow_request, 60)
            b.engine.check_integrity()

    asyncio.run(main())


def test_draining_finishes_what_runs_and_refuses_what_comes(bench, request_of, alone):
    request = request_of("a", 4, 40)

    async def main():
        with bench() as b:
            b.executor.gate = threading.Event()
            reading = asyncio.create_task(collect(b.engine.submit_nowait(request)))
            draining = asyncio.create_task(b.engine.drain(60))
            await asyncio.sleep(0)
            with pytest.raises(NotServing, match="draining"):
                b.engine.submit_nowait(request_of("b", 4, 1))
            b.executor.gate.set()
            assert await draining
            assert ids_in(await reading) == alone(request, 40)
            assert await b.engine.drain(0)
            b.engine.check_integrity()

    asyncio.run(main())


def test_a_drain_that_runs_out_of_time_cancels_the_rest(bench, request_of):
    async def main():
        with bench(n_pages=3000) as b:
            reading = asyncio.create_task(collect(b.engine.submit_nowait(request_of("a", 4, 4000))))
            b.executor.gate = threading.Event()
            draining = asyncio.create_task(b.engine.drain(0))
            await asyncio.sleep(0)
            b.executor.gate.set()
            assert not await draining
            assert (await reading)[-1].reason is FinishReason.CANCELLED
            b.engine.check_integrity()

    asyncio.run(main())


@pytest.mark.parametrize("in_call", [False, True])
@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_device_failure_ends_every_request_and_the_engine(bench, request_of, in_call, step, overlap):
    async def main():
        b = bench(max_sequences=2, overlap=overlap)
        b.executor.fail_at, b.executor.fail_in_call = step, in_call
        with b:
            handles = [b.engine.submit_nowait(request_of(f"r{i}", 40, 50)) for i in range(5)]
            for events in await asyncio.gather(*(collect(h) for h in handles)):
                assert [type(e) for e in events].count(FinishEvent) == 1
                assert events[-1].reason is FinishReason.ERROR
                assert "CUDA_ERROR_ILLEGAL_ADDRESS" in events[-1].error
            assert b.failed.is_set()  # the owner knew before any request did
            assert len(b.failures) == 1
            assert isinstance(b.failures[0], DeviceError)
            assert "ILLEGAL_ADDRESS" in b.engine.statistics().failed
            with pytest.raises(NotServing, match="failed"):
                b.engine.submit_nowait(request_of("late", 4, 1))
            assert await b.engine.drain(0)

    asyncio.run(main())


def test_a_fault_of_our_own_is_no_different(bench, request_of):
    async def main():
        b = bench()
        b.executor.step = lambda batch, sampling: 1 // 0
        with b:
            events = await collect(b.engine.submit_nowait(request_of("a", 4, 5)))
            assert events[-1].reason is FinishReason.ERROR
            assert b.failed.wait(60)
            assert isinstance(b.failures[0], ZeroDivisionError)

    asyncio.run(main())


def test_stopping_ends_what_runs(bench, request_of):
    async def main():
        with bench(n_pages=3000) as b:
            handle = b.engine.submit_nowait(request_of("a", 4, 4000))
            await anext(handle.events())
            assert b.engine.stop()
            assert (await collect(handle))[-1].reason is FinishReason.CANCELLED
            b.engine.check_integrity()

    asyncio.run(main())


def test_a_stop_does_not_wait_for_a_device_that_hangs(bench, request_of):
    async def main():
        with bench() as b:
            b.executor.gate = threading.Event()
            b.engine.submit_nowait(request_of("a", 4, 10))
            await asyncio.to_thread(b.executor.stepped.wait)
            assert not b.engine.stop(timeout_s=0)

    asyncio.run(main())


def test_a_hanging_step_grows_old_and_an_idle_engine_does_not(fake_executor, request_of):
    now = [100.0]

    async def main():
        executor = fake_executor(64, 4, 4)
        engine = Engine(
            executor,
            PagePool(64, 4),
            EngineOptions(max_sequences=4, max_rows=32, max_logit_rows=8),
            clock=lambda: now[0],
        )
        engine.start()
        executor.gate = threading.Event()
        handle = engine.submit_nowait(request_of("a", 4, 3))
        await asyncio.to_thread(executor.stepped.wait)
        now[0] += 7.0
        assert engine.statistics().last_step_age_s == pytest.approx(7.0)
        executor.gate.set()
        await collect(handle)
        now[0] += 1.0
        await until_idle(engine)
        now[0] += 1000.0
        assert engine.statistics().last_step_age_s == 0.0
        assert engine.stop()

    asyncio.run(main())


def test_a_deadline_wakes_an_idle_engine(bench, request_of):
    """A paused stream's deadline passes while nothing else happens."""

    async def main():
        with bench(backlog_limit=4) as b:
            loop = asyncio.get_running_loop()
            handle = b.engine.submit_nowait(request_of("a", 4, 400, deadline_s=loop.time() + 0.05))
            end = await handle.ended
            assert end.reason is FinishReason.DEADLINE

    asyncio.run(main())


def test_statistics_show_what_waits_and_runs(bench, request_of):
    async def main():
        with bench(max_sequences=2) as b:
            b.executor.gate = threading.Event()
            handles = [b.engine.submit_nowait(request_of(f"r{i}", 4, 3)) for i in range(5)]
            await asyncio.to_thread(b.executor.stepped.wait)
            statistics = b.engine.statistics()
            assert 1 <= statistics.running <= 2
            assert statistics.running + statistics.waiting == 5
            assert sum(statistics.pages.values()) == 64
            b.executor.gate.set()
            await asyncio.gather(*(handle.ended for handle in handles))
            b.engine.check_integrity()  # waits for the turn that sent the last event
            done = b.engine.statistics()
            assert (done.prompt_tokens, done.generated_tokens) == (20, 15)
            assert done.steps == len(b.executor.batches)

    asyncio.run(main())


def test_consumers_whose_loop_is_gone_leave_nothing_behind(bench, request_of):
    async def leave(b):
        b.executor.gate = threading.Event()
        b.engine.submit_nowait(request_of("a", 4, 400))

    async def look(b, request):
        events = await collect(b.engine.submit_nowait(request))
        await until_idle(b.engine)
        b.engine.check_integrity()
        return events

    with bench(n_pages=1000) as b:
        asyncio.run(leave(b))
        b.executor.gate.set()
        events = asyncio.run(look(b, request_of("b", 4, 5)))
        assert len(ids_in(events)) == 5


def test_all_events_of_a_turn_travel_in_one_call(bench, request_of):
    async def main():
        loop = asyncio.get_running_loop()
        calls = []
        original = loop.call_soon_threadsafe

        def counting(callback, *args, **kwargs):
            calls.append(callback)
            return original(callback, *args, **kwargs)

        with bench() as b:
            loop.call_soon_threadsafe = counting
            handles = [b.engine.submit_nowait(request_of(f"r{i}", 4, 50)) for i in range(4)]
            await asyncio.gather(*(collect(h) for h in handles))
            assert len(calls) <= len(b.executor.batches) + 2

    asyncio.run(main())


def test_an_idle_engine_lets_the_executor_prepare_and_a_request_ends_that(fake_executor, request_of):
    """A piece at a time, after a while without work: what a request waits for is one piece at most."""

    async def main():
        bench = Bench(fake_executor)
        executor, began, go_on = bench.executor, threading.Event(), threading.Semaphore(0)
        executor.n_pieces = 4

        def slow_piece(inner=executor.prepare_more):
            began.set()
            assert go_on.acquire(timeout=60)
            return inner()

        executor.prepare_more = slow_piece
        with bench:
            assert await asyncio.to_thread(began.wait, 60)
            handle = bench.engine.submit_nowait(request_of(prompt=[1, 2, 3], max_tokens=2))
            go_on.release()
            assert [event async for event in handle.events()]
            assert executor.n_pieces == 3  # the request came before the next piece
            go_on.release(9)
            while executor.n_pieces > 0:  # noqa: ASYNC110 - written by the engine's thread
                await asyncio.sleep(0.01)
        assert executor.n_pieces == 0  # and then it is not asked again

    asyncio.run(main())
