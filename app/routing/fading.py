"""Replicas that will probably be stopped next get no requests that others can take nearly as well.

They stay routable. A session whose blocks are on one costs much more elsewhere, and goes on there; what is new
to the fleet begins where it can stay. So a stopped replica takes few caches and few running streams with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

NEAR_SHARE = 0.25
"""What more a request may cost elsewhere: as much load as a fleet of five puts on each of four."""

NEAR_S = 0.05
"""And beside that, since a share of next to nothing is nothing: seconds, about two steps of a busy engine."""


def lasting(
    replicas: Sequence[str], costs: Sequence[float], fading: Collection[str], near: float, tie: float = 0.0
) -> list[int]:
    """Places of the cheapest of ``replicas`` that are not ``fading``, and of those within ``tie`` of it.

    ``costs`` is that of each, in any unit, ``near`` in the same one (``NEAR_S`` where they are seconds). None
    costs more than the least of all, ``NEAR_SHARE`` of it, and ``near``; empty if all would.
    """
    most = (1.0 + NEAR_SHARE) * min(costs) + near
    places = [place for place, replica in enumerate(replicas) if replica not in fading]
    limit = min(min((costs[place] for place in places), default=most) + tie, most)
    return [place for place in places if costs[place] <= limit]
