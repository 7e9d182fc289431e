"""Whether routing survives what happens to a fleet: real local Ray Serve, the bundled model on 2 to 4 engines.

A replica is cordoned for long, two become four, one of four is killed under load, a second ingress comes and
one of the two is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tqdm import tqdm

from loadtests.arrivals import closed_loop
from loadtests.client import Outcome
from loadtests.cluster import seconds_until, wait_for
from loadtests.experiments.fleet import (
    LIMIT_S,
    OPTIONS,
    START_LIMIT_S,
    Fleet,
    Sample,
    differing_indexes,
    seconds_to_share,
    seconds_to_step,
    started,
    stream_figures,
)
from loadtests.report import Figure, finish, most, parse
from loadtests.stats import median
from loadtests.workloads import prompts

FEW, MANY = 2, 4  # engines
LONG_STREAMS = 4
LONG_S = 14.0  # what a long stream takes; it would outlive a cordon of 10 s
STREAMS, TOKENS = 16, 64
CLIENTS, SHORT = 12, 16  # of the load while replicas come; tokens of one request
SHARE, SHARE_S = 0.8, 20.0  # of an even share, that each new replica must have got by then
HANDED_OVER_S = HEARD_S = 10.0


class RoutingFaults(Fleet):
    """All measurements, one after the other on one cluster."""

    long_s, share_s, share, many = LONG_S, SHARE_S, SHARE, MANY
    after_s: float | None = None
    """When a cordon moves what runs, if not when it does by itself."""

    def run(self) -> list[Figure]:
        first = (self.cordoned, self.scaled_up, self.one_of_many_killed)
        parts = (*first, self.two_ingresses, self.ingress_killed)
        return [figure for part in tqdm(parts, unit="part") for figure in part()]

    def cordoned(self) -> list[Figure]:
        """A replica with running streams is cordoned for long, then used again."""
        gap = median([gap for outcome in self.say(prompts(LONG_STREAMS, seed=1), 24) for gap in outcome.gaps])
        tokens = min(max(math.ceil(self.long_s / gap), 100), 1200)
        texts = prompts(LONG_STREAMS)
        counts: dict[str, int] = {}

        def cordon() -> tuple[float, str]:
            victim = self.cluster.inspect()[0]["replica"]
            self.cluster.cordon([victim], 300.0, self.after_s)
            began = time.perf_counter()
            counts["before"] = self._routed()[victim]
            with ThreadPoolExecutor(1) as clients:
                short = clients.submit(self.say, prompts(CLIENTS, seed=2), 4)
                seconds_until(lambda: self._live(victim) == 0, LIMIT_S)
                seconds = time.perf_counter() - began
                short.result()
            counts["while"] = self._routed()[victim] - counts["before"]
            return seconds, victim

        outcomes, (seconds, victim) = self.while_streaming(texts, tokens, FEW, cordon)
        self.cluster.cordon([], 0.0)
        self.say(prompts(CLIENTS, seed=3), SHORT)
        again = self._routed()[victim] - counts["before"] - counts["while"]
        what = "cordoned for long"
        return [
            most(f"{what}: new requests there, of {CLIENTS}", counts["while"]),
            most(f"{what}: its streams are elsewhere", seconds, HANDED_OVER_S, " s"),
            *stream_figures(what, outcomes, self.say(texts, tokens)),
            Figure(f"{what}: requests there after its end, of {CLIENTS}", again, "", 1),
            *self.nothing_left(what),
        ]

    def scaled_up(self) -> list[Figure]:
        """More engines come under a load of different prompts."""
        before = set(self._routed())
        self.cluster.scale(self.many)
        measured = False

        async def load() -> tuple[list[Sample], list[Outcome]]:
            nonlocal measured
            turns = itertools.takewhile(lambda _: not measured, itertools.count())
            async with self.client() as client:
                clients = asyncio.ensure_future(
                    closed_loop(CLIENTS, turns, lambda turn: client.complete(f"Story {turn}: the", SHORT))
                )
                samples = await asyncio.to_thread(self._count_shares)
                measured = True
                return samples, await clients

        samples, outcomes = asyncio.run(load())
        new = sorted(set(samples[-1][1]) - before)
        if len(new) != self.many - FEW:
            raise RuntimeError(f"expected {self.many - FEW} new replicas, found {new}")
        what = f"{FEW} to {self.many} engines"
        reached = seconds_to_share(samples, new, self.share)
        return [
            most(f"{what}: requests that failed", sum(not outcome.complete for outcome in outcomes)),
            most(f"{what}: until {self.share:g} of an even share, for good", reached, self.share_s, " s"),
        ]

    def one_of_many_killed(self) -> list[Figure]:
        """SIGKILL of one engine of several amid streams."""
        texts = prompts(STREAMS)
        expected = self.say(texts, TOKENS)

        def kill() -> None:
            self.cluster.kill(max(self.cluster.inspect(), key=lambda state: state["live_requests"])["pid"])

        outcomes, _ = self.while_streaming(texts, TOKENS, self.many, kill)
        what = f"one of {self.many} killed"
        return [*stream_figures(what, outcomes, expected), *self.nothing_left(what)]

    def two_ingresses(self) -> list[Figure]:
        """A second ingress: the same index in both, and each hears of the other's load."""
        self.cluster.scale(FEW, ingresses=2)
        wait_for(lambda: self._in_step(2), START_LIMIT_S, "no two ingresses are in step with the engines")

        def both_hear_of_all() -> bool:
            seen = [sum(state["running"].values()) for state in self.cluster.ingresses()]
            return seen == [LONG_STREAMS, LONG_STREAMS]

        streams, heard = self.while_streaming(
            prompts(LONG_STREAMS, seed=6), 60, FEW, lambda: seconds_until(both_hear_of_all, HEARD_S)
        )
        self.say([text * 3 for text in prompts(12, seed=5)], 4)
        replicas = [state["replica"] for state in self.cluster.inspect()]
        seconds_until(lambda: differing_indexes(self.cluster.ingresses(), replicas) == 0, LIMIT_S)
        ingresses = self.ingresses()
        blocks = sum(state["digest"][2] for state in ingresses[0]["index"].values() if state["digest"])
        what = "two ingresses"
        return [
            most(f"{what}: replicas on which their indexes differ", differing_indexes(ingresses, replicas)),
            Figure(f"{what}: blocks known", blocks, "", 1),
            Figure(f"{what}: that route", sum(sum(state["routed"].values()) > 0 for state in ingresses), "", 2),
            most(f"{what}: until each knows of the other's streams", heard, HEARD_S, " s"),
            most(f"{what}: streams that failed", sum(not one.complete for one in streams)),
            *self.nothing_left(what),
        ]

    def ingress_killed(self) -> list[Figure]:
        """SIGKILL of one of two ingresses; the next one must know what is cached."""
        before = {state["cid"] for state in self.ingresses()}
        self.cluster.kill(self.cluster.ingress_pids()[0])
        (fresh,) = wait_for(lambda: self._fresh(before), START_LIMIT_S, "no new ingress is in step")
        differing = differing_indexes(self.ingresses(), fresh["index"])
        what = "ingress killed: the next one"
        return [
            most(f"{what}, first channel to all in sync", seconds_to_step(fresh["index"]), 1.0, " s"),
            most(f"{what}, replicas on which its index differs", differing),
        ]

    def _fresh(self, before: set[str]) -> list[dict[str, Any]]:
        """The ingress that is not one of ``before``, if it knows every engine's blocks."""
        engines = len(self.cluster.inspect())
        return [
            state
            for state in self.cluster.ingresses()
            if state.get("cid") not in {None, *before}
            and len(state["index"]) == engines
            and seconds_to_step(state["index"]) < math.inf
        ]

    def _in_step(self, count: int) -> bool:
        states = self.cluster.ingresses()
        engines = [state["replica"] for state in self.cluster.inspect()]
        return (
            len(states) == count
            and len(engines) == FEW
            and all(state["routable"] == FEW and differing_indexes([state], engines) == 0 for state in states)
        )

    def _count_shares(self) -> list[Sample]:
        """Attempts by replica, each second from when all engines are routable."""
        self.cluster.wait_routable(self.many)
        members = self.cluster.health()["channels"]
        samples: list[Sample] = []
        while not samples or samples[-1][0] - samples[0][0] < self.share_s:
            now, routed = time.perf_counter(), self._routed()
            samples.append((now, {name: routed.get(name, 0) for name in members}))
            time.sleep(1.0)
        return samples

    def _routed(self) -> dict[str, int]:
        """Attempts that each replica was chosen for, by all ingresses."""
        states = self.ingresses()
        totals = dict.fromkeys((name for state in states for name in state["channels"]), 0)
        for state in states:
            for name, count in state["routed"].items():
                totals[name] = totals.get(name, 0) + count
        return totals

    def _live(self, replica: str) -> int:
        return sum(s["live_requests"] for s in self.cluster.inspect() if s["replica"] == replica)


def main() -> None:
    arguments = parse("routing_faults", __doc__)
    with started() as cluster:
        cluster.deploy(**OPTIONS)
        figures = RoutingFaults(cluster).run()
    finish("loadtests.routing_faults", figures, arguments, "fault", options=OPTIONS)
