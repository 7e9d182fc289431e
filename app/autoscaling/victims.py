"""Which replicas Ray Serve stops when the target falls: it offers no choice, but its order can be known.

Replicas that do not run yet go first. Then it goes by node: the head node last, before it those with the fewest
replicas, and equal ones in the order in which their oldest replica came. Within a node the newest goes first.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

from app.autoscaling.snapshot import ReplicaStats

Name = TypeVar("Name", bound=Hashable)


def stop_order(replicas: Mapping[Name, ReplicaStats]) -> list[Name]:
    """The running replicas, the one that is stopped first in front. O(n log n).

    ``replicas`` goes from the oldest to the newest where ``started_at`` does not tell. Two things cannot be
    seen from here: other deployments' replicas, which Serve counts on a node, too, and labels that replicas
    were meant for. Replicas that do not know their node are taken to share one.
    """
    oldest_first = sorted(replicas, key=lambda name: replicas[name].started_at)
    nodes: dict[float, list[Name]] = {}
    for name in oldest_first:
        nodes.setdefault(replicas[name].node, []).append(name)

    def priority(names: list[Name]) -> tuple[bool, int]:
        return any(replicas[name].on_head >= 0.5 for name in names), len(names)

    # Sorting keeps the order of equal nodes, here and in Serve.
    return [name for names in sorted(nodes.values(), key=priority) for name in reversed(names)]


class PredictionOutcome:
    """Counts how many of the replicas that were stopped had been predicted.

    Those that leave while nothing is to be stopped have crashed, and are no matter of prediction.
    """

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self.due = 0
        """Replicas that are still to leave."""
        self._target = 0
        self._known: frozenset[Hashable] = frozenset()
        self._predicted: frozenset[Hashable] = frozenset()

    def lowered(self, order: list[Name], running: Collection[Name], target: int) -> None:
        """The target falls to ``target`` while ``running`` run, of which the first of ``order`` should go."""
        self._known = frozenset(running)
        self._target = target
        self.due = max(len(self._known) - target, 0)
        self._predicted = frozenset(order[: self.due])

    def observe(self, running: Collection[Name], target: int) -> None:
        """Take note of what runs now, and of the target."""
        if not self.due:
            return
        now = frozenset(running)
        gone = self._known - now
        hits = min(len(gone & self._predicted), self.due)
        misses = min(len(gone), self.due) - hits
        self.hits += hits
        self.misses += misses
        self._known = now
        # A target that was raised again stops no more.
        self.due = 0 if target > self._target else self.due - hits - misses
