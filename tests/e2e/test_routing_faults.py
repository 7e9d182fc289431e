"""Routing under real Ray Serve while replicas are cordoned, come, and die, and with two ingresses.

The measuring command does the same for longer and judges how long things take; here counts what must be true.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from local_cluster import SOON_S, BreakableCluster

from loadtests.client import Outcome
from loadtests.cluster import wait_for
from loadtests.experiments.fleet import left_figures
from loadtests.experiments.routing_faults import FEW, RoutingFaults
from loadtests.report import Figure

ASKED = 4
FEW_EVENTS_S = 0.1
"""A step, while replicas start: events would take the processor from them."""


def check(figures: list[Figure]) -> None:
    """Every bar that is no time holds."""
    assert [figure.line() for figure in figures if figure.unit != " s" and not figure.holds] == []


class QuickFaults(RoutingFaults):
    """With less of everything; streams are as long as they are slow."""

    long_s, share_s, share, many = 0.0, 4.0, 0.5, 3
    after_s = 0.5
    cluster: BreakableCluster

    def while_streaming(
        self, texts: Sequence[str], tokens: int, engines: int, act: Callable[[], Any]
    ) -> tuple[list[Outcome], Any]:
        """As ever, with steps that are slow until ``act`` has ended."""
        with self.cluster.slow_steps() as go_on:

            def act_and_go_on() -> Any:
                result = act()
                go_on()
                return result

            return super().while_streaming(texts, tokens, engines, act_and_go_on)

    def two_ingresses(self) -> list[Figure]:
        """As ever, once HAProxy has heard of the second one, too: else one of them routes nothing."""
        self.cluster.scale(FEW, ingresses=2)
        self.both_proxied()
        return super().two_ingresses()

    def nothing_left(self, what: str) -> list[Figure]:
        """As ever, which may look too soon on a busy machine."""

        def nothing() -> bool:
            return all(figure.holds for figure in left_figures(what, self.engines(), self.ingresses()))

        wait_for(nothing, SOON_S, "requests or blocks are left")
        return super().nothing_left(what)

    def both_proxied(self) -> None:
        wait_for(lambda: self.cluster.proxied() == 2, SOON_S, "HAProxy does not send requests to both")


@pytest.fixture
def faults(paced: BreakableCluster) -> Iterator[QuickFaults]:
    yield QuickFaults(paced)
    paced.cordon([], 0.0)
    paced.scale(ingresses=1)


@pytest.fixture
def growing(faults: RoutingFaults) -> RoutingFaults:
    """For the test that leaves three replicas."""
    return faults


def test_a_cordoned_replica_gets_nothing_new_and_hands_its_streams_over(faults: RoutingFaults) -> None:
    check(faults.cordoned())


def test_new_replicas_get_their_share_and_one_that_dies_ends_no_stream(growing: RoutingFaults) -> None:
    with growing.cluster.slow_steps(FEW_EVENTS_S):
        check(growing.scaled_up())
    check(growing.one_of_many_killed())


def test_two_ingresses_agree_and_one_that_restarts_knows_what_is_cached(faults: QuickFaults) -> None:
    check(faults.two_ingresses())
    whichever_ingress_answers_knows_what_the_others_know(faults)
    check(faults.ingress_killed())


def whichever_ingress_answers_knows_what_the_others_know(faults: QuickFaults) -> None:
    """Each has routed some of the requests; HAProxy gives each question to one of them."""
    url, prompt = faults.cluster.url, list(range(7000, 7064))
    faults.both_proxied()
    with httpx.Client(base_url=url, limits=httpx.Limits(max_keepalive_connections=0), timeout=60) as http:
        before = routed(http)
        names = [f"sibling-{number}-{uuid.uuid4().hex}" for number in range(ASKED)]
        for name in names:
            body = {"prompt": prompt, "max_tokens": 1}
            http.post("/v1/completions", json=body, headers={"x-request-id": name}).raise_for_status()
        owners = Counter[str]()
        for name in names:
            # An ingress hears of the other from Serve, in its own time, and of an end after the client.
            ended = lambda name=name: ended_request(http, name)  # noqa: E731
            lives = [wait_for(ended, SOON_S, "an ingress does not ask the other") for _ in range(2)]
            assert lives[0] == lives[1]
            owners[lives[0][0]["ingress"]] += 1
        assert len(owners) == 2, "both have routed requests"

        def counted() -> bool:
            """Wherever one asks, once what an ingress remembers of the answer before is too old."""
            return [routed(http) for _ in range(2)] == [before + ASKED] * 2

        wait_for(counted, SOON_S, "an ingress counts only the prompts that it has routed")


def ended_request(http: httpx.Client, name: str) -> list[dict[str, Any]] | None:
    """What an ingress knows of a request, if it has ended."""
    lives = http.get(f"/dashboard/requests/{name}").json().get("requests") or []
    return lives if lives and all(life["state"] == "ended" for life in lives) else None


def routed(http: httpx.Client) -> int:
    """Prompts that all ingresses have routed, by whichever answers."""
    return sum(group["requests"] for group in http.get("/dashboard/prefixes").json()["prefixes"])
