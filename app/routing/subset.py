"""Which engine replicas an ingress opens channels to, where it does not open them to all."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import lru_cache

COVER = 2
"""Each replica is in the subsets of at least this many ingresses, if there are that many: one may restart."""

REMEMBERED = 20_000
"""Replicas whose ranks are kept; each costs as many hashes as there are ingresses."""


class Subset:
    """The replicas of the ingress ``place``, one of ``ingresses``: ``size`` of them or a few more.

    Rendezvous hashing: each replica ranks the ingresses by a hash of its name and theirs, and each ingress
    takes the replicas that rank it highest. So all replicas have about the same number of ingresses, at least
    ``COVER``; two subsets overlap like random ones; and a replica that comes or goes changes few of the pairs
    of other replicas and ingresses. A larger ``size`` only adds replicas.
    """

    def __init__(self, size: int, place: int, ingresses: int) -> None:
        self.size = size
        self._ingresses = ingresses
        self._place = place % ingresses
        self._key = lru_cache(REMEMBERED)(self._make_key)

    def of(self, replicas: Collection[str], times: int = 1) -> frozenset[str]:
        """Those of ``replicas`` that belong to this ingress: ``times`` as many as usual."""
        size = times * self.size
        if size >= len(replicas):
            return frozenset(replicas)
        ranked = sorted((self._key(replica), replica) for replica in replicas)
        limit = times * max(self.size * self._ingresses / len(replicas), COVER)
        return frozenset(replica for at, (key, replica) in enumerate(ranked) if key < limit or at < size)

    def is_first(self, replica: str) -> bool:
        """Whether this ingress ranks highest; for each replica one of them does."""
        return self._key(replica) < 1

    def _make_key(self, replica: str) -> float:
        """The rank of this ingress for ``replica``, from 0, plus a fraction that orders replicas of a rank."""
        own = _hash(replica, self._place)
        rank = sum(_hash(replica, other) < own for other in range(self._ingresses) if other != self._place)
        return rank + _hash(replica, -1) / 2**64


def _hash(replica: str, place: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{place} {replica}".encode(), digest_size=8).digest())
