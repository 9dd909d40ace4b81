"""Drives a server: closed loops of N streams, open loops at a rate.

Failures are outcomes, never exceptions.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from streamer.bench.serve_client import Endpoint, Outcome, StreamConnection, completion_body
from streamer.bench.serve_shapes import Workload, arrival_times

AFTER_FAILURE_S = 0.05  # a stream whose request failed waits this long: a refusing server is not hammered


@dataclass
class Budget:
    """Numbers of the requests to send: `requests` of them, or as many as begin within `duration_s`."""

    requests: int | None
    duration_s: float | None
    first: int = 0
    taken: int = 0
    started_s: float = field(default_factory=time.perf_counter)

    def take(self) -> int | None:
        """The next request's number; None when no more are to begin."""
        if self.requests is not None and self.taken >= self.requests:
            return None
        if self.duration_s is not None and time.perf_counter() - self.started_s >= self.duration_s:
            return None
        self.taken += 1
        return self.first + self.taken - 1


@dataclass
class Driver:
    """Sends a workload's requests over as many connections as it needs; idle ones are kept for the next."""

    endpoint: Endpoint
    workload: Workload
    members: dict[str, Any]  # of every request's body: temperature, model
    timeout_s: float = 300.0
    max_tokens: int | None = None  # no request asks for more (a warm-up's)
    outcomes: list[Outcome] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0
    _idle: list[StreamConnection] = field(default_factory=list)

    async def closed(self, n_streams: int, budget: Budget) -> None:
        """N users, each asking again as soon as the answer has come."""

        async def stream() -> None:
            while (index := budget.take()) is not None:
                outcome = await self.send(index, time.perf_counter())
                if outcome.error is not None:
                    await asyncio.sleep(AFTER_FAILURE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(n_streams):
                group.create_task(stream())

    async def open(self, rate: float, budget: Budget) -> None:
        """Users who come at `rate` a second whatever the server does; times count from when they were due."""
        requests: set[asyncio.Task[Outcome]] = set()
        try:
            for due_s in arrival_times(rate, self.workload.seed):
                await asyncio.sleep(budget.started_s + due_s - time.perf_counter())
                index = budget.take()
                if index is None:
                    break
                task = asyncio.create_task(self.send(index, budget.started_s + due_s))
                requests.add(task)
                task.add_done_callback(requests.discard)
            if requests:
                await asyncio.wait(requests)
        finally:
            for task in requests:
                task.cancel()

    async def send(self, index: int, start_s: float) -> Outcome:
        """One request to its end, whatever that is."""
        item = self.workload.item(index)
        n = item.max_tokens if self.max_tokens is None else min(item.max_tokens, self.max_tokens)
        body, outcome = completion_body(item.prompt, n, **self.members), Outcome(index, start_s)
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            connection = await self._connection()
            await connection.complete(body, outcome, self.timeout_s)
            if connection.is_usable:
                self._idle.append(connection)
        except OSError:
            outcome.error, outcome.end_s = "refused", time.perf_counter()
        finally:
            self.in_flight -= 1
        self.outcomes.append(outcome)
        return outcome

    async def _connection(self) -> StreamConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
        return await self.endpoint.connect()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
