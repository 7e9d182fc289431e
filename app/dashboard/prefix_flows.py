"""Where prompts that begin alike went: the whole fleet is asked for all viewers together, once a second."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from app.routing.prefix_flow import PrefixGroup, merged, others

EVERY_S = 1.0

MAX_SHOWN_REPLICAS = 4
"""Replicas that an answer has for each prefix, those with the most requests."""


class PrefixFlows:
    """Belongs to one ingress. ``ask`` asks all ingresses for the groups of a model."""

    def __init__(
        self,
        ask: Callable[[str], Awaitable[Sequence[Sequence[PrefixGroup]]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = asyncio.Lock()
        self._seen: dict[str, tuple[float, list[PrefixGroup]]] = {}

    async def get(self, model: str) -> list[PrefixGroup]:
        """The groups, ``EVERY_S`` old at most: the largest first, and last what belongs to none."""
        async with self._lock:
            seen = self._seen.get(model)
            if seen is None or self._clock() - seen[0] >= EVERY_S:
                seen = self._seen[model] = self._clock(), merged(await self._ask(model))
            return seen[1]


def visible_rows(
    groups: Sequence[PrefixGroup], tenant: str, everyones: bool, words: bool
) -> list[dict[str, Any]]:
    """What a viewer of a ``tenant`` sees: its own prefixes, or ``everyones``; ``words`` of its own alone.

    The last one has the others together.
    """
    seen = [group for group in groups if group.blocks and (everyones or group.tenant == tenant)]
    rest = others([group for group in groups if group not in seen])
    return [_row(group, words and group.tenant == tenant) for group in [*seen, rest]]


def _row(group: PrefixGroup, words: bool) -> dict[str, Any]:
    replicas = Counter[str]()
    for (replica, _), count in group.to.items():
        replicas[replica] += count
    to = [
        {
            "replica": replica,
            "requests": count,
            "reasons": {reason: n for (name, reason), n in group.to.items() if name == replica},
        }
        for replica, count in replicas.most_common(MAX_SHOWN_REPLICAS)
    ]
    return {
        "prefix": f"{group.key:016x}" if group.blocks else None,
        "blocks": group.blocks,
        "words": group.words if words and group.words else None,
        "requests": group.requests,
        "per_s": round(group.per_s, 3),
        "cached": round(group.cached / group.tokens, 3) if group.tokens else None,
        "to": to,
        "more": max(len(replicas) - MAX_SHOWN_REPLICAS, 0),
    }
