"""Threads for work off the event loop, in which clients take turns."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

T = TypeVar("T")


class InThread(Protocol):
    """Runs work for a client in a thread, off the event loop."""

    async def __call__(self, client: str, work: Callable[[], T]) -> T: ...


class FairThreads:
    """At most so many threads; each does the next piece of work of the client whose turn it is.

    So a client that sends much work delays another's by what the threads are doing and by one piece of each
    client in between, not by all that it has sent. Each client's own work is done first come, first served.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # by client, the next one first

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises; if the caller is cancelled before it begins, it is not done."""
        return await asyncio.wrap_future(self.submit(client, work))

    def submit(self, client: str, work: Callable[[], T]) -> Future[T]:
        """As :meth:`run`, without waiting."""
        done: Future[T] = Future()
        held = [work]  # not beyond its end: what is cancelled may have to wait for its turn, and be large
        done.add_done_callback(lambda _: held.clear())
        with self._lock:
            self._waiting.setdefault(client, deque()).append(partial(_do, held, done))
        self._executor.submit(self._next)
        return done

    def _next(self) -> None:
        """In a thread, once for each piece of work."""
        with self._lock:
            client, queue = next(iter(self._waiting.items()))
            del self._waiting[client]
            work = queue.popleft()
            if queue:
                self._waiting[client] = queue  # behind the others
        work()


def _do(held: list[Callable[[], T]], done: Future[T]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        result = held[0]()
    except BaseException as error:  # noqa: BLE001  (whoever waits gets it)
        done.set_exception(error)
    else:
        done.set_result(result)
