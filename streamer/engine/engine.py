"""The engine: one thread steps the batch, handles on the event loop get what it finds.

Between the threads: an inbox (requests, wishes to end) that the engine empties at the start of each turn, and
one `call_soon_threadsafe` a turn that carries all its events. Neither side ever waits for the other.
"""

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

from streamer.cache.pages import PagePool
from streamer.cache.snapshots import SnapshotTable
from streamer.engine.handle import Handle, deliver_all
from streamer.engine.refusals import NotServing, QueueFull
from streamer.engine.request import EngineStatistics, Event, FinishEvent, FinishReason, Request
from streamer.engine.sequence import Sequence, new_sequence
from streamer.engine.steps import EngineOptions, StepLoop
from streamer.kernels.ops import Executor

QUIET_S = 0.5  # without work for so long, the executor prepares more: a first request is not kept waiting
FAREWELL_S = 5.0  # after a drain's time is over: how long the cancelled requests' last events may take


class Engine:
    """`start`, then `submit_nowait` from an event loop's thread; `drain` and `stop` end it.

    `snapshots` is given exactly when the model has recurrent state; its slots lie above
    `options.max_sequences`. `weight_h2d_bytes()` is the device's count of weight bytes sent while serving.
    `on_failure(error)` is called on the engine's thread, before any request gets its FinishEvent, when the
    device or the engine itself has failed.
    """

    def __init__(
        self,
        executor: Executor,
        pool: PagePool,
        options: EngineOptions,
        *,
        snapshots: SnapshotTable | None = None,
        weight_h2d_bytes: Callable[[], int] = lambda: 0,
        on_failure: Callable[[Exception], None] | None = None,
        on_step: Callable[[str, float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options, self._pool, self._clock, self._on_failure = options, pool, clock, on_failure
        self._steps = StepLoop(
            executor,
            pool,
            options,
            snapshots=snapshots,
            clock=clock,
            weight_h2d_bytes=weight_h2d_bytes,
            on_step=on_step,
        )
        self._live: dict[Handle, Sequence] = {}
        self._inbox: deque[tuple[Sequence, FinishReason | None]] = deque()  # None: submitted
        self._arrivals = itertools.count()
        self._wake = threading.Event()
        self._turn = threading.Lock()  # held while a turn runs
        self._thread: threading.Thread | None = None
        self._gate = threading.Lock()  # nothing enters the inbox once `_refusal` is set
        self._refusal: str | None = "not started"
        self._stopping = False
        self._busy_since_s: float | None = None
        self._may_prepare = True  # the executor has not said that nothing is left
        self.failed: str | None = None

    # ---- for the loop ----

    def start(self) -> None:
        assert self._thread is None, "an engine starts once"
        self._refusal = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit_nowait(self, request: Request) -> Handle:
        """Queue a request; never blocks. QueueFull, NotServing, PromptTooLong; ValueError for an empty
        prompt.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        handle = Handle(request, loop, self._ask, self._wake.set, self.options.backlog_limit // 2)
        capacity = self._steps.scheduler.capacity
        sequence = new_sequence(request, capacity, next(self._arrivals), handle, self._clock())
        with self._gate:
            self._check_open()
            self._live[handle] = sequence
            self._inbox.append((sequence, None))
        self._wake.set()
        return handle

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise NotServing(self._refusal)
        if len(self._live) >= self.options.max_sequences + self.options.queue_limit:
            raise QueueFull(f"{len(self._live)} requests are waiting or running")

    def _ask(self, handle: Handle, reason: FinishReason) -> None:
        sequence = self._live.get(handle)
        if sequence is not None:
            self._inbox.append((sequence, reason))
            self._wake.set()

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for the live ones; those not done in time are cancelled. True: none
        was.
        """
        self._refuse("draining")
        live = list(self._live)
        if not live:
            return True
        _, late = await asyncio.wait([handle.ended for handle in live], timeout=timeout_s)
        if not late:
            return True
        for handle in live:
            handle.finish(FinishReason.CANCELLED)
        await asyncio.wait(late, timeout=FAREWELL_S)
        return False

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Cancel everything and end the thread. False when it did not end in time (the device hangs)."""
        self._refuse("stopped")
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _refuse(self, why: str) -> None:
        with self._gate:
            if self.failed is None:
                self._refusal = why

    def statistics(self) -> EngineStatistics:
        """From any thread, without waiting; the numbers may be a turn apart."""
        scheduler, outcomes = self._steps.scheduler, self._steps.outcomes
        running, pages = list(scheduler.running), self._pool.statistics()
        n_prefilling = sum(1 for s in running if s.goal == s.n_prompt)
        busy_since = self._busy_since_s
        age = 0.0 if busy_since is None else self._clock() - max(busy_since, self._steps.last_done_s)
        return EngineStatistics(
            waiting=max(0, len(self._live) - len(running)),
            running=len(running),
            prefilling=n_prefilling,
            pages={"free": pages.free, "used": pages.used, "cached": pages.cached},
            prompt_tokens=outcomes.n_prompt_tokens,
            generated_tokens=outcomes.n_generated_tokens,
            cached_prompt_tokens=outcomes.n_cached_tokens,
            steps=self._steps.n_steps,
            last_step_age_s=max(0.0, age),
            failed=self.failed,
        )

    def check_integrity(self) -> None:
        """When idle: no request, page, slot or step is left over. Raises AssertionError."""
        with self._turn:
            assert not self._live, "requests are alive"
            assert not self._inbox, "the inbox is not empty"
            self._steps.check_integrity()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                with self._turn:
                    more = self._take_turn()
                if not more and not self._inbox:
                    self._busy_since_s = None
                    self._rest()
            self._end_all()
        except Exception as error:  # noqa: BLE001 - whatever it is must reach requests and service
            self._fail(error)
        finally:
            self._busy_since_s = None
            self._steps.close()

    def _take_turn(self) -> bool:
        began_s, waited_s, n_steps = self._clock(), self._steps.waited_s, self._steps.n_steps
        self._busy_since_s = self._busy_since_s or began_s
        self._take_inbox()
        self._send()  # ends that were asked for do not wait for the step
        more = self._steps.turn()
        self._send()
        self._steps.note_turn(n_steps, self._clock() - began_s - (self._steps.waited_s - waited_s))
        return more

    def _take_inbox(self) -> None:
        while self._inbox:
            sequence, reason = self._inbox.popleft()
            if reason is None:
                self._steps.submit(sequence)
            else:
                self._steps.finish(sequence, reason)

    def _rest(self) -> None:
        """Until something comes or is due. A long rest is used: the executor prepares, piece by piece."""
        patience_s = self._patience_s()
        if not self._may_prepare or (patience_s is not None and patience_s < QUIET_S):
            self._wake.wait(patience_s)
        elif not self._wake.wait(QUIET_S):
            while self._may_prepare and not self._wake.is_set():
                self._may_prepare = self._steps.prepare_more()

    def _patience_s(self) -> float | None:
        due = self._steps.next_due_s()
        return None if due is None else max(0.0, due - self._clock())

    def _end_all(self) -> None:
        with self._turn:
            self._take_inbox()
            self._steps.conclude_all(FinishReason.CANCELLED, "the engine was stopped")
            self._send()

    def _fail(self, error: Exception) -> None:
        """Only events go out: after a fault the books may be wrong, and nothing will run on them any more."""
        with self._gate:
            self.failed = str(error) or type(error).__name__
            self._refusal = f"the engine has failed: {self.failed}"
        for sequence in list(self._live.values()):
            self._steps.outcomes.abandon(sequence, self.failed)
        try:
            if self._on_failure is not None:
                self._on_failure(error)
        finally:
            self._send()

    def _send(self) -> None:
        """All events of the turn, in one call a loop (there is one loop but in tests)."""
        outbox = self._steps.outcomes.outbox
        if not outbox:
            return
        self._steps.outcomes.outbox = []
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Handle, Event]]] = {}
        for handle, event in outbox:
            batches.setdefault(handle.loop, []).append((handle, event))
            if isinstance(event, FinishEvent):
                self._live.pop(handle, None)
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(deliver_all, batch)
            except RuntimeError:  # that loop is closed: nobody will ever read these
                for handle, _ in batch:
                    self._ask(handle, FinishReason.CANCELLED)
