"""The paths of claims as trees of runs: there is an entry where claims diverge, not for every block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol


class Path(Protocol):
    """Some blocks of one prefix: ``keys`` are those of its blocks from ``base`` on."""

    keys: Sequence[int]
    base: int
    run: Run | None


class Run:
    """Blocks ``begin`` to ``end`` (not included) of a prefix that each path through here has.

    Since a key names its whole prefix, two prefixes with the same key at a place are the same up to there: how
    far they go together is found by halving. ``keys`` and ``base`` are those of a path that ends here or
    further on.
    """

    __slots__ = ("base", "begin", "children", "end", "keys", "parent", "paths")

    def __init__(self, path: Path, begin: int, parent: Run | None) -> None:
        self.keys, self.base = path.keys, path.base
        self.begin, self.end = begin, path.base + len(path.keys)
        self.parent = parent
        self.children: dict[int, Run] = {}
        self.paths: list[Path] = [path]
        """Those that end where this ends."""
        path.run = self

    @property
    def first(self) -> int:
        """The key of its first block."""
        return self.keys[self.begin - self.base]

    def common(self, keys: Sequence[int], base: int) -> int:
        """Up to where the prefix of these keys, the first of which is of block ``base``, goes along with it.

        It is the same at least in this run's first block.
        """
        mine, shift = self.keys, base - self.base
        low, high = self.begin + 1 - base, min(self.end - base, len(keys))
        if keys[high - 1] == mine[high - 1 + shift]:
            return high + base
        while low < high:
            middle = (low + high) // 2
            if keys[middle] == mine[middle + shift]:
                low = middle + 1
            else:
                high = middle
        return low + base

    def all_paths(self) -> Iterator[Path]:
        """The paths that end here and further on."""
        stack = [self]
        while stack:
            run = stack.pop()
            yield from run.paths
            stack.extend(run.children.values())


class ClaimTree:
    """The paths that one replica lacks, in trees by the first block that is missing.

    ``starts`` counts the trees that begin with a key, of all replicas together.
    """

    __slots__ = ("_starts", "roots")

    def __init__(self, starts: dict[int, int]) -> None:
        self.roots: dict[int, Run] = {}
        """By the key of the first block."""
        self._starts = starts

    def reach(self, run: Run, keys: Sequence[int]) -> int:
        """How many of the first keys are on some path from ``run`` on, of which they have the first block."""
        while True:
            end = run.common(keys, 0)
            if end < run.end or end >= len(keys):
                return end
            child = run.children.get(keys[end])
            if child is None:
                return end
            run = child

    def insert(self, path: Path, begin: int) -> None:
        """Add a path of which the blocks before ``begin`` are there; the one at ``begin`` is not.

        One whose key there is, by a collision, that of a block at another place is left out.
        """
        keys, base = path.keys, path.base
        above, siblings = None, self.roots
        while True:
            run = siblings.get(keys[begin - base])
            if run is None:
                run = siblings[keys[begin - base]] = Run(path, begin, above)
                if above is None:
                    self._count(run.first)
                return
            if run.begin != begin:
                path.run = None
                return
            begin = run.common(keys, base)
            if begin < run.end:
                run = self._split(run, begin)
            if begin - base == len(keys):
                run.paths.append(path)
                path.run = run
                return
            above, siblings = run, run.children

    def remove(self, path: Path) -> None:
        """Take a path out; one of which all blocks have arrived is not there any more."""
        run = path.run
        if run is None:
            return
        path.run = None
        run.paths.remove(path)
        if not (run.paths or run.children):
            if run.parent is None:
                self._pop(run.first)
                return
            run.parent.children.pop(run.first)
            run = run.parent
        self._join(run)
        at: Run | None = run
        while at is not None:  # nobody keeps the keys of a path that is gone
            if at.keys is path.keys:
                heir = next(at.all_paths())
                at.keys, at.base = heir.keys, heir.base
            at = at.parent

    def clear(self) -> None:
        """Forget all trees; their paths are the caller's to mark."""
        for key in list(self.roots):
            self._pop(key)

    def arrive(self, key: int, there: Callable[[int], bool]) -> None:
        """The first block of a tree is there; so are, in each run behind it, those up to one that is not."""
        arrived = [self._pop(key)]
        while arrived:
            run = arrived.pop()
            low, high = run.begin + 1, run.end
            while low < high:
                middle = (low + high) // 2
                if there(run.keys[middle - run.base]):
                    low = middle + 1
                else:
                    high = middle
            if low < run.end:
                self._plant(run, low)
                continue
            for path in run.paths:
                path.run = None
            for first, child in run.children.items():
                if there(first):
                    arrived.append(child)
                else:
                    self._plant(child, child.begin)

    def _plant(self, run: Run, begin: int) -> None:
        """Make what is left of a run and those behind it a tree by itself."""
        run.begin, run.parent = begin, None
        if run.first not in self.roots:
            self.roots[run.first] = run
            self._count(run.first)
            return
        for path in list(run.all_paths()):
            self.insert(path, begin)

    def _split(self, run: Run, place: int) -> Run:
        """Cut a run in two; return the upper one, a new object."""
        upper = Run.__new__(Run)
        upper.keys, upper.base, upper.begin, upper.end = run.keys, run.base, run.begin, place
        upper.parent, upper.paths = run.parent, []
        self._siblings(run)[run.first] = upper
        run.begin, run.parent = place, upper
        upper.children = {run.first: run}
        return upper

    def _join(self, run: Run) -> None:
        """Make a run one with its only child, where no path ends between them."""
        if run.paths or len(run.children) != 1:
            return
        (child,) = run.children.values()
        self._siblings(run)[run.first] = child
        child.begin, child.parent = run.begin, run.parent

    def _count(self, key: int) -> None:
        self._starts[key] = self._starts.get(key, 0) + 1

    def _pop(self, key: int) -> Run:
        left = self._starts[key] - 1
        if left:
            self._starts[key] = left
        else:
            del self._starts[key]
        return self.roots.pop(key)

    def _siblings(self, run: Run) -> dict[int, Run]:
        return self.roots if run.parent is None else run.parent.children
