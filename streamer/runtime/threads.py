"""Work of a start in threads, awaited under cancellation."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from streamer.runtime.executors import Bound, Stopped

T = TypeVar("T")


async def in_thread(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


async def stoppable(threads: ThreadPoolExecutor, stop: threading.Event, work: Callable[[], T]) -> T:
    """Cancellation sets `stop` and waits for the thread, which frees what it has made."""
    future = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([future])
        if not future.cancelled() and future.exception() is None:
            finished = future.result()
            if isinstance(finished, Bound):
                finished.close()
        raise
    except Stopped:
        raise asyncio.CancelledError from None


async def uncancelled(threads: ThreadPoolExecutor, work: Callable[[], None]) -> None:
    """Run to the end whatever comes: memory is given back before anybody goes on."""
    future = asyncio.get_running_loop().run_in_executor(threads, work)
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    future.result()
