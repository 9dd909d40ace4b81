"""The channel between threads."""

import threading
from collections.abc import Callable

import pytest

from streamer.load.channel import Aborted, Channel


def in_thread(body: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001  handed to the test
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_items_come_out_in_order_and_then_the_end() -> None:
    channel: Channel[int] = Channel(10)
    for i in range(5):
        channel.put(i)
    channel.close()
    assert [channel.get() for _ in range(6)] == [0, 1, 2, 3, 4, None]
    assert channel.is_ended


def test_a_full_channel_holds_its_putter_until_half_is_taken() -> None:
    channel: Channel[int] = Channel(4)

    def produce() -> None:
        for i in range(100):
            channel.put(i)
        channel.close()

    thread, errors = in_thread(produce)
    taken = []
    while (item := channel.get()) is not None:
        taken.append(item)
    thread.join()
    assert taken == list(range(100))
    assert channel.statistics().peak_depth <= 4
    assert not errors


def test_abort_wakes_a_putter_a_getter_and_a_waiter() -> None:
    full: Channel[int] = Channel(1)
    full.put(1)
    putter, put_errors = in_thread(lambda: full.put(2))
    waiter, wait_errors = in_thread(lambda: full.wait_taken(5))
    empty: Channel[int] = Channel(1)
    got: list[object] = []
    getter, _ = in_thread(lambda: got.append(empty.get()))
    full.abort()
    empty.abort()
    for thread in (putter, waiter, getter):
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert [type(e) for e in put_errors + wait_errors] == [Aborted, Aborted]
    assert got == [None]
    with pytest.raises(Aborted):
        full.put(3)
    assert full.get() is None


def test_wait_taken_returns_when_so_many_have_been_taken() -> None:
    channel: Channel[int] = Channel(8)
    for i in range(6):
        channel.put(i)
    waiter, errors = in_thread(lambda: channel.wait_taken(3))
    for _ in range(3):
        channel.get_nowait()
    waiter.join(timeout=10)
    assert not waiter.is_alive()
    assert not errors
    assert channel.statistics().taken == 3


def test_get_nowait_does_not_wait() -> None:
    assert Channel[int](1).get_nowait() is None


def test_many_consumers_share_without_loss() -> None:
    channel: Channel[int] = Channel(16)
    taken: list[int] = []
    lock = threading.Lock()

    def consume() -> None:
        while (item := channel.get()) is not None:
            with lock:
                taken.append(item)

    threads = [in_thread(consume)[0] for _ in range(5)]
    for i in range(2000):
        channel.put(i)
    channel.close()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(2000))
