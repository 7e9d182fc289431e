"""Blocks that are coming: requests that were sent to a replica whose events have not told of them yet."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Claim:
    """One request's claim on the blocks that its replica lacked when it was sent there."""

    replica: str
    name: tuple[int, int]
    """Last key and length of the prefix: what else it has follows from them."""
    keys: Sequence[int]
    bit: int
    alone: _Group = field(init=False)
    """The group of this claim and no other."""
    live: bool = True

    def __post_init__(self) -> None:
        self.alone = _Group((self,))


class _Group:
    """The claims on one key, shared by all keys that have the same; never changed."""

    __slots__ = ("bits", "claims")

    def __init__(self, claims: tuple[_Claim, ...]) -> None:
        self.claims = claims
        self.bits = 0
        for claim in claims:
            self.bits |= claim.bit


@dataclass(slots=True, eq=False)
class _Replica:
    bit: int
    claims: dict[tuple[int, int], list[_Claim]] = field(default_factory=dict)

    def live(self) -> list[_Claim]:
        return [claim for claims in self.claims.values() for claim in claims]


class Speculation:
    """Claims with deadlines.

    A replica has a key coming while at least one live claim of its own on it is unconfirmed: a request that
    is withdrawn takes nothing from its siblings, and a stored event confirms the key for all of them.
    """

    def __init__(self, max_keys: int) -> None:
        self.coming: dict[int, _Group] = {}
        """Key → ``bits`` of the replicas that it is coming to."""
        self._max_keys = max_keys
        self._replicas: dict[str, _Replica] = {}
        self._deadlines: list[tuple[float, int, _Claim]] = []
        self._made = 0
        self._claimed = 0
        self._claims = 0
        self.dropped = 0
        """Claims ended before their deadline because there were too many."""

    def __len__(self) -> int:
        """Keys claimed, a key once for each claim, plus one for each claim: what ``max_keys`` bounds."""
        return self._claimed

    def attach(self, replica: str, bit: int) -> None:
        """Let this bit stand for a replica; its claims, if any, come along."""
        known = self._replicas.get(replica)
        if known is None:
            self._replicas[replica] = _Replica(bit)
            return
        known.bit = bit
        for claim in known.live():
            claim.bit = bit
            claim.alone = _Group((claim,))
        for claim in known.live():
            group = renewed = None
            for key in claim.keys:
                mine = self.coming.get(key)
                if mine is None or claim not in mine.claims:
                    continue
                if mine is not group or renewed is None:
                    group, renewed = mine, _Group(mine.claims)
                self.coming[key] = renewed

    def detach(self, replica: str) -> None:
        """End all claims on a replica and forget it."""
        self.clear(replica)
        del self._replicas[replica]

    def clear(self, replica: str) -> None:
        """End all claims on a replica."""
        for claim in self._replicas[replica].live():
            self._end(claim)

    def claim(self, replica: str, keys: Sequence[int], held: int, deadline: float) -> None:
        """Claim the blocks of a prefix after the first ``held``, which the replica has."""
        known = self._replicas[replica]
        missing = keys[held : held + self._max_keys - 1]
        while self._claimed + len(missing) + 1 > self._max_keys:
            nearest = heapq.heappop(self._deadlines)[2]
            if nearest.live:
                self._end(nearest)
                self.dropped += 1
        claim = _Claim(replica, (keys[-1], len(keys)), missing, known.bit)
        known.claims.setdefault(claim.name, []).append(claim)
        self._made += 1
        heapq.heappush(self._deadlines, (deadline, self._made, claim))
        self._claimed += len(missing) + 1
        self._claims += 1

        # One visit for each key, since most are new; neighbours mostly have the same claims, and share a group.
        coming, alone = self.coming, claim.alone
        group, joined = alone, alone
        for key in missing:
            mine = coming.setdefault(key, alone)
            if mine is not alone:
                if mine is not group:
                    group, joined = mine, _Group((*mine.claims, claim))
                coming[key] = joined

    def withdraw(self, replica: str, keys: Sequence[int]) -> bool:
        """End the latest live claim that was made with these keys; false if there is none."""
        known = self._replicas.get(replica)
        claims = known.claims.get((keys[-1], len(keys))) if known is not None and keys else None
        if not claims:
            return False
        self._end(claims[-1])
        return True

    def confirm(self, replica: str, stored: Sequence[int]) -> None:
        """Some of these keys were coming to the replica and have arrived, or none."""
        if not self.coming or self.coming.keys().isdisjoint(stored):
            return
        group = left = None
        for key in stored:
            mine = self.coming.get(key)
            if mine is None:
                continue
            if mine is not group:
                group = mine
                left = self._without(mine, [claim for claim in mine.claims if claim.replica == replica])
            if left is None:
                del self.coming[key]
            else:
                self.coming[key] = left

    def expire(self, now: float) -> int:
        """End the claims whose deadline is not after ``now``; return how many."""
        ended = 0
        while self._deadlines and self._deadlines[0][0] <= now:
            claim = heapq.heappop(self._deadlines)[2]
            if claim.live:
                self._end(claim)
                ended += 1
        return ended

    def _end(self, claim: _Claim) -> None:
        claim.live = False
        named = self._replicas[claim.replica].claims
        named[claim.name].remove(claim)
        if not named[claim.name]:
            del named[claim.name]
        self._claimed -= len(claim.keys) + 1
        self._claims -= 1
        if len(self._deadlines) > 2 * self._claims + 64:
            # Withdrawn claims stay until their deadline comes, but not more of them than live ones.
            self._deadlines = [entry for entry in self._deadlines if entry[2].live]
            heapq.heapify(self._deadlines)

        coming, alone = self.coming, claim.alone
        group: _Group | None = None
        left: _Group | None = None
        for key in claim.keys:
            mine = coming.get(key)
            if mine is alone:
                del coming[key]
            elif mine is not None:
                if mine is not group:
                    group, left = mine, self._without(mine, [claim])
                if left is None:
                    del coming[key]
                else:
                    coming[key] = left

    @staticmethod
    def _without(group: _Group, gone: list[_Claim]) -> _Group | None:
        left = tuple(claim for claim in group.claims if claim not in gone)
        if len(left) == len(group.claims):
            return group
        return _Group(left) if left else None
