"""The consumer's side of a request, on the event loop: a bounded stream of events and a way to end it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from streamer.engine.refusals import NotServing, PromptTooLong, QueueFull
from streamer.engine.request import Event, FinishEvent, FinishReason, Request

__all__ = ["Handle", "NotServing", "PromptTooLong", "QueueFull", "deliver_all"]


class Handle:
    """One request's events, for one consumer on the loop it was submitted from.

    The consumer must end with the FinishEvent or call `finish` (in a `finally`): a handle that is dropped
    silently fills its queue, is paused, and is cancelled once it was paused for `slow_reader_s`.

    `sent` and `paused` are written by the engine's thread, `taken` by the loop's; each reads the other's.
    """

    def __init__(
        self,
        request: Request,
        loop: asyncio.AbstractEventLoop,
        ask: Callable[["Handle", FinishReason], None],
        wake: Callable[[], None],
        low_mark: int,
    ) -> None:
        self.request, self.loop = request, loop
        self.sent = self.taken = 0
        self.paused = False
        self.ended: asyncio.Future[FinishEvent] = loop.create_future()
        self._ask, self._wake, self._low_mark = ask, wake, low_mark
        self._queue: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._asked = False
        self._exhausted = False

    def events(self) -> AsyncIterator[Event]:
        """The events, ending after the FinishEvent. Called again, it goes on from there."""
        return self

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if not await self._come():
            raise StopAsyncIteration
        event = self._queue.popleft()
        self._exhausted = isinstance(event, FinishEvent)
        self._took(1)
        return event

    async def batch(self) -> list[Event]:
        """All events that have come, at least one; empty after the FinishEvent. A consumer that falls behind
        the engine catches up by it.
        """
        if not await self._come():
            return []
        events = list(self._queue)
        self._queue.clear()
        self._exhausted = isinstance(events[-1], FinishEvent)
        self._took(len(events))
        return events

    async def _come(self) -> bool:
        """Wait for an event. False: there are no more."""
        while not self._queue:
            if self._exhausted:
                return False
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return True

    def finish(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """No more tokens are wanted: a stop string was found, the client left. Takes effect within a step; of
        the events, only the FinishEvent still comes. Does nothing when the request has ended already.
        """
        if self._asked or self.ended.done():
            return
        self._asked = True
        self._took(len(self._queue))
        self._queue.clear()
        self._ask(self, reason)

    def _took(self, n: int) -> None:
        self.taken += n
        if self.paused and self.sent - self.taken <= self._low_mark:
            self._wake()

    def deliver(self, event: Event) -> None:
        """On the loop's thread, from the engine."""
        if isinstance(event, FinishEvent):
            self.ended.set_result(event)
        elif self._asked:
            self.taken += 1
            return
        self._queue.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __repr__(self) -> str:
        state = "ended" if self.ended.done() else "paused" if self.paused else "live"
        return f"Handle({self.request.id}, {state}, unread={self.sent - self.taken})"


def deliver_all(batch: list[tuple[Handle, Event]]) -> None:
    for handle, event in batch:
        handle.deliver(event)
