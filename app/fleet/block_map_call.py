"""Asks an engine replica what its KV blocks hold."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Sequence
from typing import Any

from app.channel.engine_calls import EngineCall, EngineCalls
from app.channel.failures import is_defect, reason_of
from app.fleet.generation import UnavailableError
from engine.kv.block_groups import GroupBy
from engine.kv.block_map import BlockMap

WITHIN_S = 2.0

logger = logging.getLogger(__name__)


async def ask_block_map(
    handle: Any, replica: str, by: GroupBy, keys: Sequence[int], count_defect: Callable[[], None]
) -> BlockMap:
    """Call ``replica`` through the engine deployment's ``handle``; ``count_defect`` counts defects.

    Raises:
        UnavailableError: it does not answer in time, or cannot.
    """

    call = EngineCall(EngineCalls.block_map, by.value, list(keys), target=replica)

    async def ask() -> BlockMap:
        async with asyncio.timeout(WITHIN_S):
            return BlockMap(*await call.send(handle.options(_by_reference=False).block_map))

    try:
        # In an empty context: Serve must not take the call for a child of the request that asks.
        return await asyncio.get_running_loop().create_task(ask(), context=contextvars.Context())
    except Exception as error:  # the page shows the reason; a defect is in the log with its traceback
        if is_defect(error, call):
            logger.exception("the block map of replica %s failed", replica)
            count_defect()
        why = reason_of(error, WITHIN_S, call)
        raise UnavailableError(f"replica {replica} did not report what its blocks hold: {why}") from error
