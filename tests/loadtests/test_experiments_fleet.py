"""What the routing measurements make of what they saw."""

from __future__ import annotations

import math
from typing import Any

import pytest

from loadtests.experiments.fleet import (
    differing_indexes,
    least_share,
    left_figures,
    seconds_to_share,
    seconds_to_step,
)


def ingress(**digests: Any) -> dict[str, Any]:
    return {"index": {name: {"digest": digest} for name, digest in digests.items()}}


@pytest.mark.parametrize(
    ("after", "share"),
    [
        ({"a": 20, "b": 10, "c": 10, "d": 10}, 1.0),
        ({"a": 20, "b": 15, "c": 15, "d": 0}, 0.0),
        ({"a": 30, "b": 12, "c": 4, "d": 4}, 0.4),
        ({"a": 10}, 0.0),
    ],
)
def test_the_share_is_that_of_the_new_replica_which_got_least(after: dict[str, int], share: float) -> None:
    before = {"a": 10, "b": 0, "c": 0, "d": 0}
    assert least_share(before, after, ["c", "d"]) == pytest.approx(share)


def test_a_share_counts_from_when_it_stays() -> None:
    def counts(new: int) -> dict[str, int]:
        return {"old": 100 - new, "new": new}

    samples = [(10.0, {"old": 0, "new": 0}), (11.0, counts(45)), (12.0, counts(30)), (13.0, counts(41))]
    assert seconds_to_share(samples, ["new"], 0.8) == 3.0
    assert seconds_to_share(samples, ["new"], 0.95) == math.inf
    assert seconds_to_share(samples[:2], ["new"], 0.8) == 1.0


def test_indexes_agree_only_if_all_are_in_step() -> None:
    one, other = ingress(a=(3, 7, 2), b=(1, 5, 1)), ingress(a=(3, 7, 2), b=(1, 6, 1))
    assert differing_indexes([one, one], ["a", "b"]) == 0
    assert differing_indexes([one, other], ["a", "b"]) == 1
    assert differing_indexes([one, ingress(a=(3, 7, 2))], ["a", "b"]) == 1
    assert differing_indexes([ingress(a=None)] * 2, ["a"]) == 1, "not to know is not to agree"
    assert differing_indexes([], ["a"]) == 1


def test_an_ingress_is_in_step_once_it_knows_every_replica() -> None:
    index: dict[str, dict[str, float | None]] = {
        "a": {"opened": 5.0, "synced": 5.2},
        "b": {"opened": 5.1, "synced": 5.7},
    }
    assert seconds_to_step(index) == pytest.approx(0.7)
    index["b"]["synced"] = None
    assert seconds_to_step(index) == math.inf
    assert seconds_to_step({}) == math.inf


@pytest.mark.parametrize("name", ["tokens booked", "live requests", "blocks referenced"])
def test_each_leftover_breaks_its_own_bar(name: str) -> None:
    engine = {"live_requests": 0, "referenced_blocks": 0}
    front: dict[str, Any] = {"live_requests": 0, "booked_tokens": {"a": 0}}
    assert all(figure.holds for figure in left_figures("x", [engine], [front, front]))
    match name:
        case "tokens booked":
            front["booked_tokens"] = {"a": 3}
        case "live requests":
            front["live_requests"] = 1
        case _:
            engine["referenced_blocks"] = 1
    broken = [figure.name for figure in left_figures("x", [engine], [front]) if not figure.holds]
    assert broken == [f"x: {name} left"]
