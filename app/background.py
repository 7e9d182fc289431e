"""Background tasks and threads: if one ends with an error, that is logged and its owner is told."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from engine.errors import QuireError

logger = logging.getLogger(__name__)

_running: set[asyncio.Task[None]] = set()
"""Event loops keep only weak references to their tasks."""


class BackgroundError(QuireError):
    """A background task or thread of this replica has ended, and its work with it."""


def start_task(
    name: str, work: Coroutine[Any, Any, None], on_error: Callable[[str], None]
) -> asyncio.Task[None]:
    """Run ``work`` on the current loop; ``on_error`` gets one line that says why, if it raises.

    The task has an empty context; otherwise Serve would treat it as part of the current call, and cancel it
    with that call.
    """
    task = asyncio.get_running_loop().create_task(work, name=name, context=contextvars.Context())

    def ended(task: asyncio.Task[None]) -> None:
        _running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("the background task %r ended with an error", name, exc_info=error)
            on_error(f"the background task {name!r} ended with an error: {type(error).__name__}: {error}")

    _running.add(task)
    task.add_done_callback(ended)
    return task


class Background:
    """Tasks and threads that run as long as their replica. Once one has failed, the replica stays unhealthy.

    May be used from several threads, each with a loop of its own.
    """

    def __init__(self) -> None:
        self._failure = ""
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work``, which may return or be canceled but must not raise; see :func:`start_task`."""
        return start_task(name, work, self._fail)

    def watch(self, thread: threading.Thread) -> None:
        """A thread that is not to end before the replica does."""
        self._threads.append(thread)

    def check(self) -> None:
        """Call it from ``check_health``.

        Raises:
            BackgroundError: a task has raised, or a thread has ended.
        """
        if self._failure:
            raise BackgroundError(self._failure)
        for thread in self._threads:
            if not thread.is_alive():
                raise BackgroundError(f"the background thread {thread.name!r} has ended")

    def _fail(self, failure: str) -> None:
        self._failure = self._failure or failure
