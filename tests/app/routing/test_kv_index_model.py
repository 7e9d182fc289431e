"""The index against what it should know: engines' true histories, and a plain list of claims."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import xor

from hypothesis import given, settings
from hypothesis import strategies as st
from index_support import claimed

from app.routing.kv_index import KvIndex
from engine.kv.block_keys import block_keys

TREES = [random.Random(seed).getrandbits(64) for seed in range(2)]


def path_keys(tree: int, tokens: Sequence[int]) -> list[int]:
    return block_keys(TREES[tree], tokens, 1)


PATHS = st.builds(
    path_keys, st.integers(0, len(TREES) - 1), st.lists(st.integers(0, 1), min_size=1, max_size=6)
)


def prefix(keys: Sequence[int], present: Iterable[int]) -> int:
    held = set(present)
    return next((place for place, key in enumerate(keys) if key not in held), len(keys))


def in_window(keys: Sequence[int], present: Iterable[int], window: int) -> int:
    held = set(present)
    hits = [
        blocks
        for blocks in range(len(keys) + 1)
        if all(key in held for key in keys[max(0, blocks - window) : blocks])
    ]
    return hits[-1]


@dataclass
class Engine:
    """One engine's cache: paths come whole, leaves go; every state that it has been in."""

    epoch: int = 0
    sequence: int = 0
    parents: dict[int, int | None] = field(default_factory=dict)
    states: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)
    deltas: dict[tuple[int, int], tuple[list[int], list[int], bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states[self.epoch, self.sequence] = frozenset()

    def step(self, paths: list[list[int]], evict: int, clear: bool) -> tuple[int, int]:
        before = set() if clear else set(self.parents)
        if clear:
            self.parents.clear()
        for path in paths:
            for parent, key in zip([None, *path], path, strict=False):
                self.parents.setdefault(key, parent)
        for _ in range(evict):
            inner = set(self.parents.values())
            leaves = [key for key in self.parents if key not in inner]
            if leaves:
                del self.parents[leaves[0]]
        after = set(self.parents)
        self.sequence += 1
        at = self.epoch, self.sequence
        self.states[at] = frozenset(after)
        self.deltas[at] = (sorted(after - before), sorted(before - after), clear)
        return at

    def restart(self) -> None:
        self.epoch += 1
        self.sequence = 0
        self.parents.clear()
        self.states[self.epoch, 0] = frozenset()


@dataclass
class Claim:
    replica: str
    keys: list[int]
    missing: set[int]
    deadline: float
    size: int


class World:
    """Engines, the faulty way of their events to the index, and the claims that should be alive."""

    def __init__(self, max_waiting: int) -> None:
        self.index = KvIndex(max_waiting=max_waiting)
        self.engines: dict[str, Engine] = {}
        self.epochs: dict[str, int] = {}
        self.claims: list[Claim] = []
        self.now = 0.0

    def join(self, name: str) -> None:
        if name not in self.engines:
            self.engines[name] = Engine()
            self.epochs[name] = 0
            self.index.add(name)

    def leave(self, name: str) -> None:
        self.index.remove(name)
        self.engines.pop(name, None)
        self.claims = [claim for claim in self.claims if claim.replica != name]

    def deliver(self, name: str, at: tuple[int, int], snapshot: bool) -> bool:
        """Hand over one delta or snapshot, as often and as late as one likes."""
        engine, (epoch, sequence) = self.engines[name], at
        if epoch > self.epochs[name]:
            self.epochs[name] = epoch
            self.claims = [claim for claim in self.claims if claim.replica != name]
        before = self.index.digest(name)
        if snapshot:
            keys = sorted(engine.states[at])
            half = len(keys) // 2
            used = self.index.snapshot(name, epoch, sequence, keys[:half], complete=False)
            used = self.index.snapshot(name, epoch, sequence, keys[half:]) and used
        else:
            used = self.index.apply(name, epoch, sequence, *engine.deltas[at])
        after = self.index.digest(name)
        if after is not None:
            arrived: set[int] = set()
            begin = before[0] if before is not None else sequence
            if snapshot and used and (before is None or sequence > before[0]):
                arrived |= engine.states[at]
                begin = sequence
            for step in range(begin + 1, after[0] + 1):
                arrived |= set(engine.deltas[self.epochs[name], step][0])
            for claim in self.claims:
                if claim.replica == name:
                    claim.missing -= arrived
        return used

    def claim(self, name: str, keys: list[int], lasts: float) -> None:
        self.expire()
        self.index.claim(name, keys, self.now, self.now + lasts)
        if name in self.engines:
            missing = set(keys) - self.held(name)
            self.claims.append(Claim(name, keys, missing, self.now + lasts, len(missing) + 1))

    def withdraw(self, name: str, keys: list[int]) -> None:
        mine = [claim for claim in self.claims if claim.replica == name and claim.keys == keys]
        assert self.index.withdraw(name, keys) == bool(mine)
        if mine:
            self.claims.remove(mine[-1])

    def expire(self) -> None:
        self.index.expire(self.now)
        self.claims = [claim for claim in self.claims if claim.deadline > self.now]

    def held(self, name: str) -> frozenset[int]:
        digest = self.index.digest(name)
        if digest is None:
            return frozenset()
        return self.engines[name].states[self.epochs[name], digest[0]]

    def check(self, keys: list[int]) -> None:
        answer = self.index.longest(keys)
        assert list(answer) == list(self.engines)
        for name in self.engines:
            held = self.held(name)
            digest = self.index.digest(name)
            if digest is not None:
                assert digest[1:] == (reduce(xor, held, 0), len(held))
            present = set(held)
            for claim in self.claims:
                if claim.replica == name:
                    present |= claim.missing
            assert answer[name] == prefix(keys, present)
        assert claimed(self.index) == sum(claim.size for claim in self.claims)
        while self.index.sweep():
            pass
        assert self.index.unswept == 0
        assert self.index.slots <= len(self.engines) + 8
        assert len(self.index) == len(
            set().union(*(self.held(name) for name in self.engines)) if self.engines else ()
        )


NAMES = ["a", "b", "c"]


@settings(derandomize=True, max_examples=70, deadline=None)
@given(st.data(), st.sampled_from([2, 12, 1000]))
def test_random_histories(data: st.DataObject, max_waiting: int) -> None:
    """Deltas lost, repeated and late, epochs, snapshots old and new, replicas that come and go, claims."""
    world = World(max_waiting)
    for _ in range(data.draw(st.integers(1, 30))):
        name = data.draw(st.sampled_from(NAMES))
        world.join(name)
        engine = world.engines[name]
        act = data.draw(
            st.sampled_from(
                ["step"] * 6
                + ["snapshot"] * 3
                + ["claim"] * 4
                + ["withdraw", "wait", "lose", "replay"] * 2
                + ["restart", "leave", "verify"]
            )
        )
        if act in ("step", "lose"):
            clear = data.draw(st.integers(0, 9)) == 0
            at = engine.step(data.draw(st.lists(PATHS, max_size=2)), data.draw(st.integers(0, 3)), clear)
            if act == "step":
                world.deliver(name, at, snapshot=False)
        elif act == "snapshot":
            world.deliver(name, (engine.epoch, engine.sequence), snapshot=True)
        elif act == "replay":
            snapshot = data.draw(st.booleans())
            known = sorted(engine.states if snapshot else engine.deltas)
            if known:
                world.deliver(name, data.draw(st.sampled_from(known)), snapshot)
        elif act == "claim":
            world.claim(name, data.draw(PATHS), data.draw(st.sampled_from([1.0, 3.0])))
        elif act == "withdraw":
            paths = [claim.keys for claim in world.claims if claim.replica == name]
            world.withdraw(name, data.draw(st.sampled_from(paths)) if paths else data.draw(PATHS))
        elif act == "wait":
            world.now += 1.0
            world.expire()
        elif act == "restart":
            engine.restart()
        elif act == "leave":
            world.leave(name)
        elif (digest := world.index.digest(name)) is not None:
            assert world.index.verify(name, *digest)
            wrong = data.draw(st.booleans())
            if wrong:
                assert not world.index.verify(name, digest[0], digest[1] ^ 1, digest[2])
                assert world.index.digest(name) is None
        world.check(data.draw(PATHS))
    for name in list(world.engines):
        world.leave(name)
    world.check([])
    assert len(world.index) == claimed(world.index) == 0


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["step", "lose", "repeat", "restart", "drift"]), PATHS), max_size=40))
def test_a_snapshot_for_each_time_that_one_is_asked_for_is_enough(acts: list[tuple[str, list[int]]]) -> None:
    """However deltas are lost, who sends a snapshot exactly when asked ends up with the engine's own state."""
    world = World(max_waiting=12)
    world.join("a")
    engine = world.engines["a"]
    last = None
    for act, path in acts:
        if act == "restart":
            engine.restart()
            last = None
            continue
        if act == "drift":
            digest = world.index.digest("a")
            # What the index cannot notice by itself; the engine's next digest tells.
            if digest is not None:
                assert not world.index.verify("a", digest[0], digest[1], digest[2] + 1)
                world.deliver("a", (engine.epoch, engine.sequence), snapshot=True)
            continue
        if act == "repeat" and last is not None:
            if not world.deliver("a", last, snapshot=False):
                world.deliver("a", (engine.epoch, engine.sequence), snapshot=True)
            continue
        last = engine.step([path], 1, False)
        if act != "lose" and not world.deliver("a", last, snapshot=False):
            world.deliver("a", last, snapshot=True)
    last = engine.step([], 0, False)
    if not world.deliver("a", last, snapshot=False):
        world.deliver("a", last, snapshot=True)
    digest = world.index.digest("a")
    assert digest is not None
    assert digest[0] == engine.sequence
    world.check(path_keys(0, [0, 0, 0]))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), max_size=3),
    st.integers(1, 5),
)
def test_windows_against_their_definition(
    held: list[set[int]], claims: list[tuple[int, int]], window: int
) -> None:
    """Any sets of blocks, holes and all; the last replica has its first ones, and some coming, too."""
    keys = path_keys(0, [0] * 12)
    index = KvIndex(window_blocks=window)
    held.append(set(range(claims[0][0] if claims else 0)))
    expected = {}
    for number, blocks in enumerate(held):
        present = {keys[place] for place in blocks}
        index.add(f"r{number}")
        index.snapshot(f"r{number}", 0, 0, sorted(present))
        if number == len(held) - 1:
            for common, length in claims:
                # The first ``common`` of these blocks are as in ``keys``.
                coming = path_keys(0, [0] * min(common, length) + [1] * (length - common))
                index.claim(f"r{number}", coming, 0.0, 1.0)
                present |= set(coming)
        expected[f"r{number}"] = in_window(keys, present, window)
    assert index.longest(keys) == expected
