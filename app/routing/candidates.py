"""The replicas that may be routed to, in one order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter

from app.routing.booking import Standing


class Candidates:
    """Their standings and names; a new one is made whenever they change, so that a choice finds them listed."""

    __slots__ = ("_pick", "names", "standings")

    def __init__(self, standings: Iterable[Standing] = ()) -> None:
        self.standings = list(standings)
        self.names = [standing.replica for standing in self.standings]
        self._pick: Callable[[Mapping[str, int]], Sequence[int]] | None = None
        if len(self.names) > 1:  # of one name it would return no sequence
            self._pick = itemgetter(*self.names)

    def among(self, members: Collection[str] | None, avoid: str) -> list[Standing]:
        """Those of ``members`` (all, if ``None``), without ``avoid`` unless it is the only one."""
        standings = self.standings
        if members is not None and not all(map(members.__contains__, self.names)):
            standings = [standing for standing in standings if standing.replica in members]
        if avoid:
            return [standing for standing in standings if standing.replica != avoid] or standings
        return standings

    def held(self, standings: Sequence[Standing], found: Mapping[str, int]) -> Sequence[int]:
        """What an index has ``found`` of each of ``standings``, which ``among`` gave; 0 where nothing."""
        if standings is self.standings and self._pick is not None:
            try:
                return self._pick(found)
            except KeyError:  # a defect has taken one out of the index
                pass
        return [found.get(standing.replica, 0) for standing in standings]
