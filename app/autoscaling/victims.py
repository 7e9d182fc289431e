"""Which replicas Ray Serve stops when the target falls: it offers no choice, but its order is predictable.

Replicas that do not run yet go first. Then nodes with the fewest replicas come first, and the head node last;
equal nodes go in the order in which their oldest replica started. Within a node, the newest goes first.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

from app.autoscaling.snapshot import ReplicaStats

Name = TypeVar("Name", bound=Hashable)


def stop_order(replicas: Mapping[Name, ReplicaStats]) -> list[Name]:
    """The running replicas in the order in which Serve would stop them. O(n log n).

    If ``started_at`` is unknown, ``replicas`` must be ordered from the oldest to the newest. Two things are not
    visible here: other deployments' replicas, which Serve also counts on a node, and the labels that replicas
    require. Replicas that do not know their node are assumed to share one.
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
    """Counts how many of the stopped replicas had been predicted.

    Replicas that leave while none is to be stopped have crashed, and do not count.
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
