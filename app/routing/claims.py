"""Expected blocks: those of requests that were sent to a replica whose events have not reported them yet."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from app.routing.claim_tree import ClaimTree, Run


class BlockClaim:
    """One request's claim on the blocks that its replica lacked when the request was sent there.

    ``keys`` are those blocks' keys, from block ``base`` of the prefix on. ``run`` is the place in the replica's
    tree where they end; ``None`` once all have arrived.
    """

    __slots__ = ("base", "keys", "live", "name", "replica", "run")

    def __init__(self, replica: str, name: tuple[int, int], keys: Sequence[int], base: int) -> None:
        self.replica = replica
        self.name = name
        """Last key and length of the whole prefix: what else it has follows from them."""
        self.keys = keys
        self.base = base
        self.run: Run | None = None
        self.live = True


class _Replica:
    __slots__ = ("claims", "tree")

    def __init__(self, starts: dict[int, int]) -> None:
        self.tree = ClaimTree(starts)
        self.claims: dict[tuple[int, int], list[BlockClaim]] = {}


class Claims:
    """Claims with deadlines.

    A key is expected at a replica while at least one live claim there is unconfirmed. Withdrawing one request
    does not affect its siblings, and a stored event confirms the key for all of them. It also confirms the
    claimed keys before it, because an engine that has a block has, or had, those before it.
    """

    def __init__(self, max_keys: int) -> None:
        self.starts: dict[int, int] = {}
        """Keys of blocks that are the first of some claim that its replica lacks, and for how many replicas."""
        self._max_keys = max_keys
        self._replicas: dict[str, _Replica] = {}
        self._deadlines: list[tuple[float, int, BlockClaim]] = []
        self._made = 0
        self._claimed = 0
        self._claims = 0

    def __len__(self) -> int:
        """Keys claimed, a key once for each claim, plus one for each claim: what ``max_keys`` bounds."""
        return self._claimed

    def attach(self, replica: str) -> None:
        """Let a replica have claims; it keeps those that it has."""
        if replica not in self._replicas:
            self._replicas[replica] = _Replica(self.starts)

    def detach(self, replica: str) -> None:
        """End all claims on a replica and forget it."""
        self.clear(replica)
        del self._replicas[replica]

    def clear(self, replica: str) -> None:
        """End all claims on a replica."""
        known = self._replicas[replica]
        known.tree.clear()
        for claims in list(known.claims.values()):
            for claim in list(claims):
                claim.run = None
                self._end(claim)

    def deepen(self, depths: dict[str, int], begin: int, keys: Sequence[int]) -> None:
        """Add to ``begin`` blocks that some replicas have those that are coming right after them.

        Of interest only where ``starts`` has the key of the next block.
        """
        first = keys[begin]
        for replica, known in self._replicas.items():
            run = known.tree.roots.get(first)
            if run is not None and run.begin == begin and depths.get(replica) == begin:
                depth = known.tree.reach(run, keys)
                if len(known.tree.roots) > 1:
                    depth = self._further(known.tree, keys, begin, depth)
                depths[replica] = depth

    def stretches(self, keys: Sequence[int]) -> Iterator[tuple[str, int, int]]:
        """Blocks ``begin`` to ``end`` (not included) that are coming to a replica, wherever that is."""
        for replica, known in self._replicas.items():
            for first, run in known.tree.roots.items():
                if run.begin < len(keys) and keys[run.begin] == first:
                    yield replica, run.begin, known.tree.reach(run, keys)

    def claim(self, replica: str, keys: Sequence[int], held: int, deadline: float) -> None:
        """Claim the blocks of a prefix after the first ``held``, which the replica has."""
        missing = keys[held : held + self._max_keys - 1]
        size = len(missing) + 1
        while self._claimed + size > self._max_keys:
            nearest = heapq.heappop(self._deadlines)[2]
            if nearest.live:
                self._end(nearest)
        known = self._replicas[replica]
        name = (keys[-1], len(keys))
        claim = BlockClaim(replica, name, missing, held)
        if name in known.claims:
            known.claims[name].append(claim)
        else:
            known.claims[name] = [claim]
        self._made += 1
        heapq.heappush(self._deadlines, (deadline, self._made, claim))
        self._claimed += size
        self._claims += 1
        if missing:
            known.tree.insert(claim, held)

    def withdraw(self, replica: str, keys: Sequence[int]) -> bool:
        """End the latest live claim that was made with these keys; false if there is none."""
        known = self._replicas.get(replica)
        claims = known.claims.get((keys[-1], len(keys))) if known is not None and keys else None
        if not claims:
            return False
        self._end(claims[-1])
        return True

    def confirm(self, replica: str, stored: Sequence[int], there: Callable[[int], bool]) -> None:
        """Some of these keys were coming to the replica and have arrived, or none.

        ``there`` says of a key whether the replica has it now, these ones included.
        """
        tree = self._replicas[replica].tree
        if not tree.roots or tree.roots.keys().isdisjoint(stored):
            return
        for key in [key for key in stored if key in tree.roots]:
            if key in tree.roots:
                tree.arrive(key, there)

    def expire(self, now: float) -> int:
        """End the claims whose deadline is not after ``now``; return how many."""
        ended = 0
        while self._deadlines and self._deadlines[0][0] <= now:
            claim = heapq.heappop(self._deadlines)[2]
            if claim.live:
                self._end(claim)
                ended += 1
        return ended

    def _end(self, claim: BlockClaim) -> None:
        claim.live = False
        known = self._replicas[claim.replica]
        same = known.claims[claim.name]
        if len(same) == 1:
            del known.claims[claim.name]
        else:
            same.remove(claim)
        self._claimed -= len(claim.keys) + 1
        self._claims -= 1
        if len(self._deadlines) > 2 * self._claims + 64:
            # Withdrawn claims stay until their deadline comes, but not more of them than live ones.
            self._deadlines = [entry for entry in self._deadlines if entry[2].live]
            heapq.heapify(self._deadlines)
        if claim.run is not None:
            known.tree.remove(claim)
        claim.keys = ()

    @staticmethod
    def _further(tree: ClaimTree, keys: Sequence[int], begin: int, depth: int) -> int:
        """What is coming to ``begin`` up to ``depth``, and what other claims go on with from in between.

        Claims begin where the replica's blocks end. Others do only since a block before theirs has gone.
        """
        count, roots = len(keys), tree.roots
        if len(roots) < count - begin:
            others = [
                (run.begin, run)
                for first, run in roots.items()
                if begin < run.begin < count and keys[run.begin] == first
            ]
            others.sort(key=itemgetter(0))
        else:
            ahead = ((place, roots.get(keys[place])) for place in range(begin + 1, count))
            others = [(place, run) for place, run in ahead if run is not None and run.begin == place]
        for place, run in others:
            if place > depth:
                break
            depth = max(depth, tree.reach(run, keys))
        return depth
