"""The ledger: what has completed, by weight and by layer, in one lock; readers get immutable values.

The pipeline reports, everybody else asks. Bytes count when their copy's event has completed. A weight whose
layout is not the file's is resident only after its rearrangement: until then the bytes of its last chunk are
held back, so that the fraction reaches 1.0 once, at the end.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from streamer.device.base import Event
from streamer.errors import ResidencyError
from streamer.plan.plan import Layout, Plan, PlannedWeight
from streamer.residency.rate import Rate
from streamer.residency.snapshot import LayerResidency, LoadError, Residency, load_error
from streamer.residency.state import ON_DEVICE, PHASES, Phase, State, advance

JUST_BELOW_ONE = 1 - 1e-9  # a fraction of 1.0 is said only when everything is resident


@dataclass
class _Account:
    """One weight. `held_back`: completed bytes not yet counted."""

    weight: PlannedWeight
    is_finished: bool  # no rearrangement is due (any more)
    state: State = State.PLANNED
    completed: int = 0
    held_back: int = 0
    proved: bool = False

    @property
    def counted(self) -> int:
        return self.completed - self.held_back


@dataclass
class _Waiter:
    """An asyncio future that waits for a layer, or for everything (None)."""

    layer: int | None
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[None]"


class Ledger:
    """Made first of all, for the probes; gets its plan when there is one. Reports from any thread."""

    def __init__(
        self,
        plan: Plan | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        model: str = "",
        device: str = "",
        transfer: str = "",
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._names = {"model": model, "device": device, "transfer": transfer}
        self._started_s = self._progress_s = clock()
        self._ended_s: float | None = None
        self._phase, self._entered_s = Phase.OPEN, self._started_s
        self._phase_seconds: dict[Phase, float] = {}
        self._rate = Rate()
        self._plan: Plan | None = None
        self._accounts: list[_Account] = []
        self._open: list[int] = []  # by segment: weights not yet resident
        self._layers: dict[int, list[int]] = {}  # layer -> its segments
        self._counted = self._page_cache = self._storage = 0
        self._events: dict[int, Event] = {}  # by segment, in the order recorded
        self._waiters: list[_Waiter] = []
        self._error: LoadError | None = None
        self._cause: Exception | None = None
        self._draining = False
        if plan is not None:
            self.adopt(plan)

    # ---- before and around the load

    def describe(
        self, *, model: str | None = None, device: str | None = None, transfer: str | None = None
    ) -> None:
        """Names to show, as they become known."""
        with self._lock:
            given = {"model": model, "device": device, "transfer": transfer}
            self._names.update({key: value for key, value in given.items() if value is not None})

    def adopt(self, plan: Plan) -> None:
        """From now on this is what must become resident. Once."""
        with self._lock:
            assert self._plan is None, "a ledger has one plan"
            self._plan = plan
            self._accounts = [_Account(w, is_finished=w.layout is Layout.FILE) for w in plan.weights]
            for segment in plan.segments:
                if segment.layer is not None:
                    self._layers.setdefault(segment.layer, []).append(segment.index)
            self._open = [len(segment.weights) for segment in plan.segments]

    def enter(self, phase: Phase) -> None:
        """Go forward to `phase`; READY once, and only with every planned weight resident."""
        with self._lock:
            assert PHASES.index(phase) > PHASES.index(self._phase), f"from {self._phase} to {phase}"
            assert phase is not Phase.READY or (self._is_resident(None) and self._error is None), (
                "READY too early"
            )
            now_s = self._clock()
            self._phase_seconds[self._phase] = now_s - self._entered_s
            self._phase, self._entered_s = phase, now_s
            if phase is Phase.UPLOAD:
                self._rate.start(now_s, self._counted)
                self._progress_s = now_s
            if phase is Phase.READY:
                self._ended_s = now_s

    def fail(self, error: BaseException) -> None:
        """The load has failed; waiters get the error. The first one stays."""
        with self._lock:
            if self._cause is not None:
                return
            if isinstance(error, Exception):
                self._error, self._cause = load_error(error), error
            else:
                self._cause = ResidencyError("the load was cancelled")  # nobody's fault: no error to show
            self._ended_s = self._clock()
            for account in self._accounts:
                if account.state not in ON_DEVICE:
                    account.state = advance(account.state, State.FAILED)
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.loop.call_soon_threadsafe(_set_error, waiter.future, self._cause)

    def drain(self) -> None:
        """The service is stopping."""
        with self._lock:
            self._draining = True

    def release(self) -> None:
        """Device memory of all weights is gone."""
        with self._lock:
            for account in self._accounts:
                account.state = advance(account.state, State.RELEASED)

    # ---- reports of the pipeline

    def allocated(self, segment: int) -> None:
        with self._lock:
            for index in self._the_plan().segments[segment].weights:
                self._accounts[index].state = advance(self._accounts[index].state, State.ALLOCATED)

    def read(self, *, page_cache: int = 0, storage: int = 0) -> None:
        """File bytes taken, by where they came from."""
        with self._lock:
            self._page_cache += page_cache
            self._storage += storage

    def completed(self, weight: int, nbytes: int) -> None:
        """The event after a copy of `nbytes` of this weight has completed."""
        with self._lock:
            account = self._accounts[weight]
            if account.state is State.ALLOCATED:
                account.state = advance(account.state, State.UPLOADING)
            account.completed += nbytes
            total = account.weight.tensor.nbytes
            assert account.completed <= total, f"{account.weight.name} was uploaded twice"
            if account.completed == total and not account.is_finished:
                account.held_back = nbytes
            self._count(nbytes - account.held_back)
            waiters = self._settle(account)
        _wake(waiters)

    def finished(self, weight: int) -> None:
        """The event after this weight's rearrangement has completed (layouts other than the file's)."""
        with self._lock:
            account = self._accounts[weight]
            assert account.weight.layout is not Layout.FILE, account.weight.name
            account.is_finished = True  # its copies came before, but their reports may still be on the way
            waiters = self._settle(account)
        _wake(waiters)

    def verified(self, weight: int) -> None:
        """Device bytes of this weight are proved. May come before its copies have been reported completed."""
        with self._lock:
            account = self._accounts[weight]
            account.proved = True
            if account.state is State.RESIDENT:
                account.state = advance(account.state, State.VERIFIED)

    def segment_submitted(self, segment: int, event: Event) -> None:
        """All work of this segment is queued; `event` follows it."""
        with self._lock:
            self._events[segment] = event

    # ---- questions

    def layer_event(self, layer: int) -> Event | None:
        """What device work that needs the layer waits for; None while its copies are not all queued.

        Events of one load follow each other on one stream: the last of a layer's segments covers the others.
        """
        with self._lock:
            segments = self._layers.get(layer, [])
            events = [event for index, event in self._events.items() if index in segments]  # as recorded
            return events[-1] if events and len(events) == len(segments) else None

    async def wait_resident(self, layer: int | None = None) -> None:
        """Return once the layer (None: everything) is resident; raise what the load failed with."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._cause is not None:
                raise self._cause
            if self._is_resident(layer):
                return
            waiter = _Waiter(layer, loop, loop.create_future())
            self._waiters.append(waiter)
        try:
            await waiter.future
        finally:
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    def statistics(self) -> Residency:
        with self._lock:
            now_s = self._clock()
            end_s = now_s if self._ended_s is None else self._ended_s
            total = self._plan.nbytes if self._plan else 0
            complete = self._is_resident(None)
            over = complete or self._ended_s is not None
            rate = self._rate.average() if over else self._rate.recent(now_s)
            layers = self._layer_snapshots()
            return Residency(
                **self._names,
                phase=self._phase,
                bytes_resident=self._counted,
                bytes_total=total,
                tensors_resident=sum(layer.tensors_resident for layer in layers),
                tensors_total=len(self._accounts),
                layers_resident=sum(self._is_resident(layer) for layer in self._layers),
                layers_total=self._plan.n_layers if self._plan else 0,
                fraction=1.0 if complete else min(self._counted / total, JUST_BELOW_ONE) if total else 0.0,
                elapsed_s=end_s - self._started_s,
                bytes_per_s=rate,
                eta_s=0.0 if complete else (total - self._counted) / rate if rate > 0 else None,
                last_progress_s=now_s - self._progress_s,
                page_cache_bytes=self._page_cache,
                storage_bytes=self._storage,
                verified=bool(self._accounts) and all(a.state is State.VERIFIED for a in self._accounts),
                error=self._error,
                draining=self._draining,
                bytes_by_state=self._bytes_by_state(),
                phase_seconds=self._phase_seconds | {self._phase: end_s - self._entered_s},
                layers=layers,
            )

    def __repr__(self) -> str:
        r = self.statistics()
        return f"Ledger({r.status}, phase={r.phase}, {r.bytes_resident} of {r.bytes_total} bytes)"

    # ---- under the lock

    def _the_plan(self) -> Plan:
        assert self._plan is not None, "no plan yet"
        return self._plan

    def _count(self, nbytes: int) -> None:
        """Progress: these bytes count from now on."""
        self._counted += nbytes
        self._progress_s = self._clock()
        self._rate.add(self._progress_s, self._counted)

    def _settle(self, account: _Account) -> list[_Waiter]:
        """If nothing of a weight is due any more it is resident; returns whom that sets free."""
        if account.completed < account.weight.tensor.nbytes or not account.is_finished:
            return []
        if account.held_back:
            held, account.held_back = account.held_back, 0
            self._count(held)
        account.state = advance(account.state, State.RESIDENT)
        if account.proved:
            account.state = advance(account.state, State.VERIFIED)
        segment = account.weight.segment
        self._open[segment] -= 1
        if self._open[segment]:
            return []
        free = [waiter for waiter in self._waiters if self._is_resident(waiter.layer)]
        self._waiters = [waiter for waiter in self._waiters if waiter not in free]
        return free

    def _is_resident(self, layer: int | None) -> bool:
        if self._plan is None:
            return False
        segments = range(len(self._open)) if layer is None else self._layers.get(layer, ())
        return all(not self._open[index] for index in segments)

    def _bytes_by_state(self) -> dict[State, int]:
        sums = dict.fromkeys(State, 0)
        for account in self._accounts:
            sums[account.state] += account.weight.tensor.nbytes
        return sums

    def _layer_snapshots(self) -> tuple[LayerResidency, ...]:
        if self._plan is None:
            return ()
        snapshots = []
        for segment in self._plan.segments:
            accounts = [self._accounts[index] for index in segment.weights]
            snapshots.append(
                LayerResidency(
                    name=segment.name,
                    layer=segment.layer,
                    bytes_resident=sum(account.counted for account in accounts),
                    bytes_total=sum(account.weight.tensor.nbytes for account in accounts),
                    tensors_resident=sum(account.state in ON_DEVICE for account in accounts),
                    tensors_total=len(accounts),
                )
            )
        return tuple(snapshots)


def _wake(waiters: list[_Waiter]) -> None:
    for waiter in waiters:
        waiter.loop.call_soon_threadsafe(_set_done, waiter.future)


def _set_done(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _set_error(future: "asyncio.Future[None]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
