"""Parts of a fleet for each of several ingresses: all is covered, evenly, and little of it changes."""

from __future__ import annotations

import statistics

import pytest

from app.routing.fleet import Fleet
from app.routing.subset import COVER, Subset


def names(count: int, first: int = 0) -> frozenset[str]:
    return frozenset(f"replica-{number}" for number in range(first, first + count))


def parts(size: int, ingresses: int) -> list[Subset]:
    return [Subset(size, place, ingresses) for place in range(ingresses)]


CASES = [(1, 2, 7), (4, 3, 7), (20, 10, 40), (25, 8, 100), (40, 4, 300), (90, 5, 300)]
"""Size, ingresses, replicas."""


@pytest.mark.parametrize(("size", "ingresses", "replicas"), CASES)
def test_all_replicas_are_covered_alike(size: int, ingresses: int, replicas: int) -> None:
    fleet = names(replicas)
    subsets = [part.of(fleet) for part in parts(size, ingresses)]
    assert all(len(subset) >= size and subset <= fleet for subset in subsets)
    usual = size * ingresses / replicas
    for replica in fleet:
        count = sum(replica in subset for subset in subsets)
        assert count >= min(max(int(usual), COVER), ingresses)
    each = max(usual, COVER) / ingresses * replicas
    assert statistics.mean(map(len, subsets)) <= 1.1 * each + 2
    assert max(map(len, subsets)) <= each + 4 * each**0.5


@pytest.mark.parametrize(("size", "ingresses", "replicas"), CASES)
def test_each_replica_has_one_first_ingress(size: int, ingresses: int, replicas: int) -> None:
    fleet, all_parts = names(replicas), parts(size, ingresses)
    for replica in fleet:
        (first,) = (part for part in all_parts if part.is_first(replica))
        assert replica in first.of(fleet)


def test_subsets_overlap_by_chance() -> None:
    fleet = names(600)
    first, *others = (part.of(fleet) for part in parts(300, 10))
    shared = [len(first & other) for other in others]
    expected = 600 * (5 / 10) * (4 / 9)
    assert min(shared) > 0.75 * expected
    assert max(shared) < 1.25 * expected


@pytest.mark.parametrize(("size", "ingresses", "replicas"), CASES[2:])
def test_one_replica_more_changes_little(size: int, ingresses: int, replicas: int) -> None:
    """As an ingress whose subset it joins may let another one go, and shares of a rank move."""
    all_parts = parts(size, ingresses)
    changed = 0
    for first in range(5):
        before, after = names(replicas, first), names(replicas + 1, first)
        (new,) = after - before
        for part in all_parts:
            changed += len(part.of(before) ^ part.of(after) - {new})
    usual = max(size * ingresses / replicas, COVER)
    assert changed / 5 <= 4 * usual, "of the channels to other replicas, by all ingresses together"


def test_a_wider_subset_only_adds() -> None:
    fleet = names(100)
    for part in parts(10, 7):
        before = part.of(fleet)
        for times in (2, 4, 8):
            wider = part.of(fleet, times)
            assert wider > before or wider == fleet
            before = wider
        assert part.of(fleet, 16) == fleet


def test_a_small_fleet_belongs_to_everybody() -> None:
    for part in parts(8, 3):
        assert part.of(names(8)) == names(8)
        assert part.of(frozenset()) == frozenset()


def test_places_beyond_the_number_begin_again() -> None:
    """While a deploy rolls, there are more ingresses than the option says."""
    assert Subset(5, 9, 4).of(names(50)) == Subset(5, 1, 4).of(names(50))


def test_a_fleet_routes_to_its_subset() -> None:
    fleet = Fleet()
    heard: list[frozenset[str]] = []
    fleet.set_members(names(50))
    fleet.listen(heard.append)
    assert fleet.members is fleet.known
    part = Subset(5, 1, 16)
    fleet.set_subset(part)
    assert fleet.members == part.of(names(50)) < fleet.known
    assert fleet.eligible(names(50)) == fleet.members
    fleet.cordon.set([*fleet.members][:1], 60.0)
    assert fleet.eligible(names(50)) == fleet.members, "no other is routable"
    assert fleet.widen_subset()
    assert fleet.widen_subset()
    assert fleet.members == part.of(names(50), 4)
    fleet.set_members(names(4))
    assert fleet.members == names(4)
    assert fleet.widen_subset(), "it is as wide as before, and all of the fleet belongs to it"
    fleet.set_members(names(50))
    fleet.narrow_subset()
    fleet.narrow_subset()
    assert fleet.members == part.of(names(50))
    fleet.set_subset(None)
    assert fleet.members == names(50)
    assert not fleet.widen_subset()
    usual, double, wide = (part.of(names(50), times) for times in (1, 2, 4))
    assert heard == [names(50), usual, double, wide, names(4), wide, usual, names(50)]
    assert not any(fleet.is_first(replica) for replica in names(50))
