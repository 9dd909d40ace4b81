"""A channel between threads: bounded, closable from either side, with a count of what has gone through."""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class Aborted(Exception):
    """The channel was aborted: the load is over, whoever puts must end."""


@dataclass(frozen=True)
class ChannelStatistics:
    capacity: int
    depth: int
    peak_depth: int
    taken: int
    is_closed: bool


class Channel(Generic[T]):
    """First in, first out, at most `capacity` items.

    Producers `put` and finally `close`; consumers `get` until None. `abort` throws away what is inside and
    wakes everybody: putters get Aborted, getters None. A putter that found the channel full sleeps until it
    is half empty, so that a fast consumer does not wake it for every item.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, capacity
        self._capacity = capacity
        self._items: deque[T] = deque()
        lock = threading.Lock()
        self._filled, self._emptied = threading.Condition(lock), threading.Condition(lock)
        self._taken = self._peak = self._awaited = 0
        self._closed = self._aborted = False

    def put(self, item: T) -> None:
        """Blocks while full. Aborted once aborted."""
        with self._emptied:
            if len(self._items) >= self._capacity:
                while len(self._items) > self._capacity // 2 and not self._aborted:
                    self._emptied.wait()
            if self._aborted:
                raise Aborted
            assert not self._closed, "put after close"
            self._items.append(item)
            self._peak = max(self._peak, len(self._items))
            self._filled.notify()

    def get(self) -> T | None:
        """The next item; blocks until there is one. None at the end."""
        with self._filled:
            while not self._items and not self._closed:
                self._filled.wait()
            return self._pop()

    def get_nowait(self) -> T | None:
        """The next item if there is one now."""
        with self._filled:
            return self._pop()

    def wait_taken(self, count: int) -> None:
        """Block until `count` items have been taken; one thread at a time. Aborted once aborted."""
        with self._emptied:
            self._awaited = count
            while self._taken < count and not self._aborted:
                self._emptied.wait()
            if self._aborted:
                raise Aborted

    def close(self) -> None:
        """Nothing more will be put; what is inside can still be taken. Idempotent."""
        with self._filled:
            self._closed = True
            self._filled.notify_all()

    def abort(self) -> None:
        """Throw everything away and end every wait. Idempotent."""
        with self._filled:
            self._closed = self._aborted = True
            self._items.clear()
            self._filled.notify_all()
            self._emptied.notify_all()

    @property
    def is_ended(self) -> bool:
        """Closed and empty: `get` returns None from now on."""
        with self._filled:
            return self._closed and not self._items

    def statistics(self) -> ChannelStatistics:
        with self._filled:
            return ChannelStatistics(self._capacity, len(self._items), self._peak, self._taken, self._closed)

    def _pop(self) -> T | None:
        if not self._items:
            return None
        self._taken += 1
        item = self._items.popleft()
        if len(self._items) <= self._capacity // 2 or self._taken == self._awaited:
            self._emptied.notify_all()
        return item

    def __repr__(self) -> str:
        return f"Channel({self.statistics()})"
