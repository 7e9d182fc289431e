"""The routing faults' measurements while an ingress does not answer."""

from __future__ import annotations

from typing import Any

from loadtests.cluster import LocalCluster
from loadtests.experiments.routing_faults import RoutingFaults


class Silent(LocalCluster):
    """Nothing is started; its ingresses answer once they have been silent for some calls."""

    def __init__(self, *answers: list[dict[str, Any]]) -> None:
        self._answers = list(answers)

    def ingresses(self) -> list[dict[str, Any]]:
        return self._answers.pop(0)

    def inspect(self) -> list[dict[str, Any]]:
        return []


def test_a_silent_ingress_is_asked_again() -> None:
    assert RoutingFaults(Silent([], [], [{"cid": 1}])).ingresses() == [{"cid": 1}]


def test_an_ingress_that_does_not_say_who_it_is_is_not_the_next_one() -> None:
    assert RoutingFaults(Silent([{"index": {}}]))._fresh(set()) == []
