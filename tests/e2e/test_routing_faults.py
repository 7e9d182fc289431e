"""Routing under real Ray Serve while replicas are cordoned, come, and die, and with two ingresses.

The measuring command does the same for longer and judges how long things take; here counts what must be true.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_cluster import BreakableCluster

from loadtests.cluster import wait_for
from loadtests.experiments.routing_faults import RoutingFaults
from loadtests.report import Figure


def check(figures: list[Figure]) -> None:
    """Every bar that is no time holds."""
    assert [figure.line() for figure in figures if figure.unit != " s" and not figure.holds] == []


class QuickFaults(RoutingFaults):
    """With less of everything."""

    long_s, share_s, share, many = 4.0, 6.0, 0.5, 3
    after_s = 0.5


@pytest.fixture
def faults(cluster: BreakableCluster) -> Iterator[RoutingFaults]:
    yield QuickFaults(cluster)
    cluster.cordon([], 0.0)
    cluster.scale(2)
    wait_for(lambda: len(cluster.ingresses()) == 1, 120.0, "the second ingress is still there")
    cluster.wait_routable(2)


def test_a_cordoned_replica_gets_nothing_new_and_hands_its_streams_over(faults: RoutingFaults) -> None:
    check(faults.cordoned())


def test_new_replicas_get_their_share_and_one_that_dies_ends_no_stream(faults: RoutingFaults) -> None:
    check(faults.scaled_up())
    check(faults.one_of_many_killed())


def test_two_ingresses_agree_and_one_that_restarts_knows_what_is_cached(faults: RoutingFaults) -> None:
    check(faults.two_ingresses())
    check(faults.ingress_killed())
