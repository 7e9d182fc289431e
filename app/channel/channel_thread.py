"""The thread in which an ingress process's channels run."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

WITHIN_S = 10.0
"""How long the start waits for the loop, which answers at once unless it hangs."""

logger = logging.getLogger(__name__)


class ChannelThread:
    """An event loop in a daemon thread: frames are read and beats sent however busy the ingress is.

    ``loop`` is one that runs permanently in another thread; without it, this object has its own loop and
    thread.

    Raises:
        TimeoutError: ``loop`` hangs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._own = loop is None
        self.loop = loop or asyncio.new_event_loop()
        if self._own:
            threading.Thread(target=self._run, name="channels", daemon=True).start()
        try:
            self.thread = asyncio.run_coroutine_threadsafe(_current_thread(), self.loop).result(WITHIN_S)
        except TimeoutError as error:
            raise TimeoutError(f"the event loop for channels has not answered within {WITHIN_S:g} s") from error
        """The thread, which a ``Background`` is to watch."""

    def stop(self) -> None:
        """End the thread if it is this object's own; tasks that still run there are canceled."""
        if self._own and self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(timeout=5.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self.loop.close()


def routers_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that Serve's routers in this process share, in a thread; ``None`` if there is none.

    They read the frames first. Handing a frame to another thread and back would cost 0.2 ms more CPU time. The
    loop is private to Serve.
    """
    from ray.serve._private import router

    if not ray_runs():  # the call below would start or join one
        return None
    try:
        loop: asyncio.AbstractEventLoop = router.SingletonThreadRouter._get_singleton_asyncio_loop("replica")
    except (AttributeError, TypeError) as error:
        logger.warning("channels run in a thread of their own, which costs more: this Ray differs (%s)", error)
        return None
    return loop


def read_on_this_loop(stream: Any) -> None:
    """Tell Serve that a ``stream`` is read on the loop on which it arrives, once its first message has.

    Serve assumes that whoever reads runs on another loop than its routers: each message then takes two futures
    and wakes the loop twice. What is set here is private to Serve; a stream that differs is left alone.
    """
    result: Any = getattr(stream, "_replica_result", None)
    if getattr(result, "_grpc_call_loop", None) is not asyncio.get_running_loop():
        return
    if getattr(result, "_calling_from_same_loop", None) is False:
        result._calling_from_same_loop = True


def ray_runs() -> bool:
    """Whether this process belongs to a Ray cluster."""
    import ray

    return bool(ray.is_initialized())


async def _current_thread() -> threading.Thread:
    return threading.current_thread()
