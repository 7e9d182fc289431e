"""What all ingress replicas know, which any of them can ask for."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from ray import serve

from app.autoscaling.fault_counter import FaultCounter
from app.metrics.samples import Process

WITHIN_S = 2.0
"""An ingress that does not answer for so long is left out."""

ALONE_S = 5.0
"""How long an ingress that has found no other asks none of what is ``POLLED``: a call takes milliseconds."""

POLLED = frozenset({"figures", "prefix_flow"})
"""What is asked again and again, so that another ingress may be missed for a while."""

logger = logging.getLogger(__name__)


class Siblings:
    """Belongs to one ingress; calls every replica of its deployment, itself included."""

    def __init__(self, app: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.faults = FaultCounter("cannot ask the other ingresses", logger)
        self._app = app
        self._handle: Any = None
        self._clock = clock
        self._alone_until = -math.inf

    async def processes(self) -> list[Process]:
        """The figures of those that answer in time; none if Serve cannot tell who there is. Never raises."""
        answers = await self.ask("figures")
        return [process for answer in answers for process in answer if isinstance(process, Process)]

    async def ask(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of each; return the answers that come in time and are no errors. Never raises.

        For a method in ``POLLED`` there may be none, not even this ingress's own: if it was the only one within
        the last ``ALONE_S``.
        """
        if method in POLLED and self._clock() < self._alone_until:
            return []
        loop = asyncio.get_running_loop()
        # In an empty context: Serve must not take the calls for children of the request that asks.
        return await loop.create_task(self._ask(method, arguments), context=contextvars.Context())

    async def _ask(self, method: str, arguments: tuple[object, ...]) -> list[Any]:
        try:
            if self._handle is None:
                self._handle = serve.get_deployment_handle(serve.get_replica_context().deployment, self._app)
            answers = await self._handle.broadcast(method, *arguments).results_async(
                timeout_s=WITHIN_S, return_exceptions=True
            )
        except Exception:  # noqa: BLE001  (Serve raises many kinds; what this ingress itself knows remains)
            self.faults.add()
            return []
        self._alone_until = self._clock() + ALONE_S if len(answers) == 1 else -math.inf
        return [answer for answer in answers if isinstance(answer, list)]  # and no error
