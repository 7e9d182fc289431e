"""Empties the prefix caches of engine replicas."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from app.channel.engine_calls import EngineCall, EngineCalls
from app.channel.failures import is_defect, reason_of

RESET_WITHIN_S = 30.0
"""Timeout of the call; an engine answers between two steps."""

logger = logging.getLogger(__name__)

_running: set[asyncio.Task[int]] = set()


@dataclass(frozen=True, slots=True)
class CacheReset:
    """The outcome: freed blocks of each replica that succeeded, and why the others failed."""

    freed_blocks: dict[str, int]
    failures: dict[str, str]


async def reset_prefix_caches(
    handle: Any, replicas: Collection[str], count_defect: Callable[[], None]
) -> CacheReset:
    """Call each of ``replicas``, at least one, through the engine deployment's ``handle``, all at once.

    A call that fails because of a defect is logged, and counted by ``count_defect``.
    """

    calls = {
        replica: EngineCall(EngineCalls.reset_prefix_cache, target=replica) for replica in sorted(replicas)
    }

    async def reset(call: EngineCall) -> int:
        async with asyncio.timeout(RESET_WITHIN_S):
            return int(await call.send(handle.options(_by_reference=False).reset_prefix_cache))

    loop = asyncio.get_running_loop()
    # In an empty context, and kept if the caller is canceled: a disconnected client must not stop it halfway.
    tasks = {
        replica: loop.create_task(reset(call), context=contextvars.Context()) for replica, call in calls.items()
    }
    _running.update(tasks.values())
    for task in tasks.values():
        task.add_done_callback(_running.discard)
    # Not gather(): canceled, that would cancel them all.
    await asyncio.wait(tasks.values())
    freed: dict[str, int] = {}
    failures: dict[str, str] = {}
    for replica, task in tasks.items():
        error = asyncio.CancelledError("Serve cancelled the call") if task.cancelled() else task.exception()
        if error is None:
            freed[replica] = task.result()
        else:
            failures[replica] = reason_of(error, RESET_WITHIN_S, calls[replica])
            if is_defect(error, calls[replica]):
                logger.error("resetting the prefix cache of replica %s failed", replica, exc_info=error)
                count_defect()
    return CacheReset(freed, failures)
