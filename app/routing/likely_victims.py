"""Likely victims: replicas that autoscaling would stop next get no request that others can take nearly as well.

They stay routable. A session whose blocks are on one would cost much more elsewhere and continues there; new
sessions start on other replicas. So when a replica stops, few caches and running streams are lost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

EXTRA_SHARE = 0.25
"""How much more a request may cost elsewhere: as much load as a fleet of five puts on each of four."""

EXTRA_S = 0.05
"""Added to that, since a share of next to nothing is nothing: seconds, about two steps of a busy engine."""


def places_that_stay(
    replicas: Sequence[str],
    costs: Sequence[float],
    likely_victims: Collection[str],
    extra: float,
    tie: float = 0.0,
) -> list[int]:
    """Places of the cheapest of ``replicas`` that are no likely victims, and of those within ``tie`` of it.

    ``costs`` is that of each, in any unit, ``extra`` in the same one (``EXTRA_S`` where they are seconds). None
    costs more than the least of all, ``EXTRA_SHARE`` of it, and ``extra``; empty if all would.
    """
    most = (1.0 + EXTRA_SHARE) * min(costs) + extra
    places = [place for place, replica in enumerate(replicas) if replica not in likely_victims]
    limit = min(min((costs[place] for place in places), default=most) + tie, most)
    return [place for place in places if costs[place] <= limit]
