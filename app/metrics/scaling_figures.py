"""The scaling policy's last decision, as Serve's controller has published it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from app.autoscaling.fault_counter import FaultCounter
from app.autoscaling.publishing import NAMESPACE, decision_key
from app.metrics.samples import Samples

OLD_S = 60.0
"""A decision that is older says nothing of now: its controller has died."""

READ_WITHIN_S = 2.0

logger = logging.getLogger(__name__)

Read = Callable[[bytes], bytes | None]
"""Returns the value of a key, or ``None``; may block, and may raise any error."""


class DecisionReader:
    """Reads from Ray's internal KV when asked, in a thread: Ray's head may not answer for a minute."""

    def __init__(
        self, app: str, deployment: str, read: Read | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """``clock`` is in seconds since the epoch."""
        self.faults = FaultCounter("cannot read the last scaling decision", logger)
        self._key = decision_key(app, deployment)
        self._read = read or _read_internal_kv
        self._clock = clock
        self._reading: asyncio.Task[bytes | None] | None = None

    async def latest(self) -> Samples:
        """The figures of the last decision; none where none is known, or it is old. Never raises.

        While a deploy rolls, it may be of another release, which tells less.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(asyncio.to_thread(self._read, self._key))
        done, _ = await asyncio.wait({self._reading}, timeout=READ_WITHIN_S)
        try:
            value = self._reading.result() if done else None
            decision = {} if value is None else dict(json.loads(value))
            if value is None or self._clock() - decision["at"] > OLD_S:
                return {}
            return scaling_samples(decision)
        except Exception:  # noqa: BLE001  (Ray raises many kinds; metrics and the page do without)
            self.faults.add()
            return {}


def scaling_samples(decision: Mapping[str, Any]) -> Samples:
    """Every metric of the table that the scaling policy counts."""
    held_by = decision["held_by"]
    return {
        "scaling_target": {(): decision["target"]},
        "scaling_running": {(): decision["running"]},
        "scaling_need_replicas": {(need,): value for need, value in decision["needs"].items()},
        "scaling_demand": {(): decision["demand"]},
        "scaling_reason": {(decision["reason"],): 1.0},
        "scaling_held": {(held_by,): 1.0} if held_by else {},
        "scaling_missing_reports": {(): decision["missing_reports"]},
        "scaling_faults": {(part,): count for part, count in decision["faults"].items()},
        "scaling_victims": {(predicted,): count for predicted, count in decision["victims"].items()},
    }


def _read_internal_kv(key: bytes) -> bytes | None:
    from ray.experimental.internal_kv import _internal_kv_get

    value: bytes | None = _internal_kv_get(key, namespace=NAMESPACE)
    return value
