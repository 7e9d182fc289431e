"""Learns which replicas Serve's controller will probably stop next.

Before it scales down, the scaling policy in the controller writes their names into Ray's internal KV every
second, with an increasing number. A number that is read again is ignored, so no message outlives its writer.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from app.autoscaling.fault_counter import FaultCounter
from app.autoscaling.publishing import NAMESPACE, victims_key
from app.background import Background
from app.routing.timed_set import TimedSet

POLL_S = 1.0

LONGEST_S = 60.0
"""A message that claims to last longer is malformed."""

logger = logging.getLogger(__name__)

Read = Callable[[bytes], bytes | None]
"""Returns the value of a key, or ``None``; may block, and may raise any error."""


class Victims(NamedTuple):
    """One message: exactly these ``replicas`` (unique IDs) for ``lasts_s``; ``seq`` increases."""

    seq: int
    replicas: frozenset[str]
    lasts_s: float


class VictimFeed:
    """Polls once a second in a thread of its own, because a read waits for Ray's head.

    It keeps ``likely_victims`` up to date. A message counts if its number is above the previous one's. One
    that is there at the first read does not count: its controller may have died long ago.
    """

    def __init__(
        self,
        app: str,
        deployment: str,
        likely_victims: TimedSet,
        read: Read | None = None,
        every_s: float = POLL_S,
    ) -> None:
        self.key = victims_key(app, deployment)
        self.received = 0
        self.faults = FaultCounter("cannot read which replicas may be stopped next", logger)
        self._likely_victims = likely_victims
        self._read = read or _read_internal_kv
        self._every_s = every_s
        self._first = True
        self._value: bytes | None = None
        self._seq = -1
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, background: Background) -> None:
        """Begin to poll; later calls do nothing."""
        if self._thread is None:
            # A daemon: an unanswered read must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="victim-feed", daemon=True)
            self._thread.start()
            background.watch(self._thread)

    def stop(self) -> None:
        """Stop polling, without waiting."""
        self._stopped.set()

    def state(self) -> dict[str, Any]:
        """For tests and debugging: messages received, failed reads and messages, current likely victims."""
        return {
            "received": self.received,
            "faults": self.faults.count,
            "likely_victims": sorted(self._likely_victims.names()),
        }

    def poll(self) -> None:
        """Read once and apply a new message; never raises."""
        try:
            value = self._read(self.key)
            if value == self._value and not self._first:
                return
            self._value = value
            first, self._first = self._first, False
            if value is not None:
                self._apply(parse(value), first)
        except Exception:  # noqa: BLE001  (Ray raises many kinds; routing works without the message)
            self.faults.add()

    def _apply(self, victims: Victims, first: bool) -> None:
        if victims.seq <= self._seq:
            return
        self._seq = victims.seq
        if not first:
            self._likely_victims.set(victims.replicas, victims.lasts_s)
            self.received += 1

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.poll()
            self._stopped.wait(self._every_s)


def parse(value: bytes) -> Victims:
    """Parse a stored message.

    Raises:
        ValueError: it is malformed.
    """
    message = json.loads(value)
    if not isinstance(message, Mapping):
        raise ValueError(f"not a JSON object: {value[:80]!r}")
    seq, replicas, lasts_s = message.get("seq"), message.get("replicas"), message.get("lasts_s")
    if not isinstance(seq, int) or isinstance(seq, bool) or seq < 0:
        raise ValueError(f"seq must be an integer, 0 or more, not {seq!r:.80}")
    if not isinstance(replicas, list) or not all(isinstance(replica, str) for replica in replicas):
        raise ValueError(f"replicas must be a list of names, not {replicas!r:.80}")
    if isinstance(lasts_s, bool) or not isinstance(lasts_s, int | float) or not 0 <= lasts_s <= LONGEST_S:
        raise ValueError(f"lasts_s must be 0 to {LONGEST_S:g}, not {lasts_s!r:.80}")
    return Victims(seq, frozenset(replicas), float(lasts_s))


def _read_internal_kv(key: bytes) -> bytes | None:
    from ray.experimental.internal_kv import _internal_kv_get

    value: bytes | None = _internal_kv_get(key, namespace=NAMESPACE)
    return value
