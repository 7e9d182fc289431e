"""Whether routing survives what happens to a fleet: real local Ray Serve, the bundled model on 2 to 4 engines.

A replica is cordoned for long, two become four, one of four is killed under load, a second ingress comes and
one of the two is killed. All is fp32 and greedy: a stream that moved must say the same.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from tqdm import tqdm

from loadtests.cluster import LocalCluster, seconds_until, wait_for
from loadtests.faults import OPTIONS, longest_pause, stream_figures
from loadtests.fleet_figures import (
    Sample,
    differing_indexes,
    least_share,
    left_figures,
    seconds_to_share,
    seconds_to_step,
)
from loadtests.report import Figure, add_arguments, finish, print_table
from loadtests.streams import Outcome, complete, complete_all, prompts

FEW, MANY = 2, 4  # engines
LONG_STREAMS = 4
LONG_S = 14.0  # what a long stream takes; it would outlive a cordon of 10 s
STREAMS, TOKENS = 16, 64
CLIENTS, SHORT = 12, 16  # of the load while replicas come; tokens of one request
SHARE, SHARE_S = 0.8, 20.0  # of an even share, that each new replica must have got by then
LIMIT_S = 30.0
START_LIMIT_S = 120.0  # of a new replica, on a machine that may be busy
HANDED_OVER_S = HEARD_S = 10.0


class RoutingFaults:
    """All measurements, one after the other on one cluster."""

    def __init__(
        self,
        cluster: LocalCluster,
        bar: tqdm[Any] | None = None,
        long_s: float = LONG_S,
        share_s: float = SHARE_S,
        share: float = SHARE,
        after_s: float | None = None,
    ) -> None:
        """``after_s`` is when a cordon moves what runs, if not when it does by itself."""
        self._cluster = cluster
        self._bar = bar
        self._long_s = long_s
        self._share_s = share_s
        self._share = share
        self._after_s = after_s

    def run(self) -> list[Figure]:
        """Every figure."""
        parts: list[Callable[[], list[Figure]]] = [
            self.cordoned,
            self.scaled_up,
            self.one_of_four_killed,
            self.two_ingresses,
            self.ingress_killed,
        ]
        figures = []
        for part in parts:
            if self._bar is not None:
                self._bar.set_description(part.__name__.replace("_", " "))
            figures += part()
            if self._bar is not None:
                self._bar.update()
        return figures

    def cordoned(self) -> list[Figure]:
        """A replica with running streams is cordoned for long, then used again."""
        url = self._cluster.url
        pace = asyncio.run(complete_all(url, prompts(LONG_STREAMS, seed=1), 24))
        gap = statistics.median(gap for outcome in pace for gap in outcome.gaps)
        tokens = min(max(math.ceil(self._long_s / gap), 100), 1200)
        texts = prompts(LONG_STREAMS)
        counts: dict[str, int] = {}

        def cordon() -> tuple[float, str]:
            victim = self._cluster.inspect()[0]["replica"]
            self._cluster.cordon([victim], 300.0, self._after_s)
            began = time.perf_counter()
            counts["before"] = self._routed()[victim]
            with ThreadPoolExecutor(1) as clients:
                short = clients.submit(lambda: asyncio.run(complete_all(url, prompts(CLIENTS, seed=2), 4)))
                seconds_until(lambda: self._live(victim) == 0, LIMIT_S)
                seconds = time.perf_counter() - began
                short.result()
            counts["while"] = self._routed()[victim] - counts["before"]
            return seconds, victim

        outcomes, (seconds, victim) = asyncio.run(self._while_streaming(texts, tokens, FEW, cordon))
        self._cluster.cordon([], 0.0)
        asyncio.run(complete_all(url, prompts(CLIENTS, seed=3), SHORT))
        again = self._routed()[victim] - counts["before"] - counts["while"]
        expected = asyncio.run(complete_all(url, texts, tokens))
        what = "cordoned for long"
        return [
            Figure(f"{what}: new requests there, of {CLIENTS}", counts["while"], "", 0, at_most=True),
            Figure(f"{what}: its streams are elsewhere", seconds, " s", HANDED_OVER_S, at_most=True),
            *stream_figures(what, outcomes, expected),
            Figure(f"{what}: longest pause of a client", longest_pause(outcomes), " s"),
            Figure(f"{what}: requests there after its end, of {CLIENTS}", again, "", 1),
            *self._nothing_left(what),
        ]

    def scaled_up(self) -> list[Figure]:
        """Two engines become four under a load of different prompts."""
        before = set(self._routed())
        self._cluster.scale(MANY)
        failures = 0

        async def load() -> list[Sample]:
            nonlocal failures
            stop = asyncio.Event()

            async def client(number: int) -> int:
                failed = 0
                for turn in range(100_000):
                    if stop.is_set():
                        break
                    outcome = await complete(self._cluster.url, f"Client {number}, story {turn}: the", SHORT)
                    failed += not outcome.complete
                return failed

            clients = asyncio.gather(*(client(number) for number in range(CLIENTS)))
            try:
                samples = await asyncio.to_thread(self._count_shares)
            finally:
                stop.set()
                failures = sum(await clients)
            return samples

        samples = asyncio.run(load())
        new = sorted(set(samples[-1][1]) - before)
        what = f"{FEW} to {MANY} engines"
        if len(new) != MANY - FEW:
            raise RuntimeError(f"expected {MANY - FEW} new replicas, found {new}")
        requests = sum(samples[-1][1].values()) - sum(samples[0][1].values())
        least = least_share(samples[0][1], samples[-1][1], new)
        reached = seconds_to_share(samples, new, self._share)
        return [
            Figure(f"{what}: requests in {self._share_s:g} s", requests),
            Figure(f"{what}: requests that failed", failures, "", 0, at_most=True),
            Figure(f"{what}: least share of a new one, of an even share", least, "", self._share),
            Figure(
                f"{what}: {self._share:g} of an even share, and no less later",
                reached,
                " s",
                self._share_s,
                at_most=True,
            ),
        ]

    def one_of_four_killed(self) -> list[Figure]:
        """SIGKILL of one engine of four amid streams."""
        texts = prompts(STREAMS)
        expected = asyncio.run(complete_all(self._cluster.url, texts, TOKENS))

        def kill() -> float:
            self._cluster.kill(max(self._cluster.inspect(), key=lambda state: state["live_requests"])["pid"])
            return time.perf_counter()

        outcomes, _ = asyncio.run(self._while_streaming(texts, TOKENS, MANY, kill))
        what = f"one of {MANY} killed"
        return [
            *stream_figures(what, outcomes, expected),
            Figure(f"{what}: longest pause of a client", longest_pause(outcomes), " s"),
            *self._nothing_left(what),
        ]

    def two_ingresses(self) -> list[Figure]:
        """A second ingress: the same index in both, and each hears of the other's load."""
        self._cluster.scale(FEW, ingresses=2)
        wait_for(lambda: self._in_step(2), START_LIMIT_S, "no two ingresses are in step with the engines")

        def both_hear_of_all() -> bool:
            seen = [sum(state["running"].values()) for state in self._cluster.ingresses()]
            return seen == [LONG_STREAMS, LONG_STREAMS]

        def look() -> float:
            return seconds_until(both_hear_of_all, HEARD_S)

        streams, heard = asyncio.run(self._while_streaming(prompts(LONG_STREAMS, seed=6), 60, FEW, look))
        asyncio.run(complete_all(self._cluster.url, [text * 3 for text in prompts(12, seed=5)], 4))
        replicas = [state["replica"] for state in self._cluster.inspect()]
        seconds = seconds_until(lambda: differing_indexes(self._cluster.ingresses(), replicas) == 0, 5.0)
        ingresses = self._ingresses()
        blocks = sum(state["digest"][2] for state in ingresses[0]["index"].values() if state["digest"])
        what = "two ingresses"
        differing = differing_indexes(ingresses, replicas)
        failed = sum(not one.complete for one in streams)
        return [
            Figure(f"{what}: replicas of which they know differently", differing, "", 0, at_most=True),
            Figure(f"{what}: after the last request", seconds, " s"),
            Figure(f"{what}: blocks known", blocks, "", 1),
            Figure(f"{what}: that route", sum(sum(state["routed"].values()) > 0 for state in ingresses), "", 2),
            Figure(f"{what}: each hears of the other's streams", heard, " s", HEARD_S, at_most=True),
            Figure(f"{what}: streams that failed", failed, "", 0, at_most=True),
            *self._nothing_left(what),
        ]

    def ingress_killed(self) -> list[Figure]:
        """SIGKILL of one of two ingresses; the next one must know what is cached."""
        before = {state["cid"] for state in self._ingresses()}
        self._cluster.kill(self._cluster.ingress_pids()[0])
        killed = time.perf_counter()
        (fresh,) = wait_for(lambda: self._fresh(before), START_LIMIT_S, "no new ingress is in step")
        served = time.perf_counter() - killed
        differing = differing_indexes(self._ingresses(), fresh["index"])
        what = "ingress killed"
        return [
            Figure(
                f"{what}: the next one's first channel to all in step",
                seconds_to_step(fresh["index"]),
                " s",
                1.0,
                True,
            ),
            Figure(f"{what}: replicas of which it knows differently", differing, "", 0, at_most=True),
            Figure(f"{what}: next one there", served, " s"),
        ]

    def _fresh(self, before: set[str]) -> list[dict[str, Any]]:
        """The ingress that is not one of ``before``, if it knows every engine's blocks."""
        engines = len(self._cluster.inspect())
        return [
            state
            for state in self._cluster.ingresses()
            if state.get("cid") not in {None, *before}
            and len(state["index"]) == engines
            and seconds_to_step(state["index"]) < math.inf
        ]

    def _in_step(self, count: int) -> bool:
        states = self._cluster.ingresses()
        engines = [state["replica"] for state in self._cluster.inspect()]
        return (
            len(states) == count
            and len(engines) == FEW
            and all(state["routable"] == FEW and differing_indexes([state], engines) == 0 for state in states)
        )

    def _count_shares(self) -> list[Sample]:
        """Attempts by replica, each second from when all engines are routable."""
        self._cluster.wait_routable(MANY)
        members = self._cluster.health()["channels"]
        samples: list[Sample] = []
        began = time.perf_counter()
        while True:
            now = time.perf_counter()
            routed = self._routed()
            samples.append((now, {name: routed.get(name, 0) for name in members}))
            if now - began >= self._share_s:
                return samples
            time.sleep(1.0)

    def _routed(self) -> dict[str, int]:
        """Attempts that each replica was chosen for, by all ingresses."""
        states = self._ingresses()
        totals = dict.fromkeys((name for state in states for name in state["channels"]), 0)
        for state in states:
            for name, count in state["routed"].items():
                totals[name] = totals.get(name, 0) + count
        return totals

    def _ingresses(self) -> list[dict[str, Any]]:
        """Their accounts, once all of them answer."""
        states: list[dict[str, Any]] = wait_for(self._cluster.ingresses, LIMIT_S, "the ingresses do not answer")
        return states

    def _engines(self) -> list[dict[str, Any]]:
        """Their accounts; none while one of them does not answer, since it has been killed."""
        try:
            return self._cluster.inspect()
        except (RayError, RayServeException):
            return []

    def _live(self, replica: str) -> int:
        return sum(s["live_requests"] for s in self._cluster.inspect() if s["replica"] == replica)

    def _nothing_left(self, what: str) -> list[Figure]:
        def left() -> list[Figure]:
            engines = wait_for(self._engines, LIMIT_S, "the engines do not answer")
            return left_figures(what, engines, self._ingresses())

        seconds_until(lambda: all(figure.holds for figure in left()), 10.0)
        return left()

    async def _while_streaming(
        self, texts: list[str], tokens: int, engines: int, act: Callable[[], Any]
    ) -> tuple[list[Outcome], Any]:
        """Start the streams, call ``act`` in a thread once every engine runs some; outcomes, and its result."""
        streams = asyncio.ensure_future(complete_all(self._cluster.url, texts, tokens))

        def all_busy() -> bool:
            states = self._cluster.inspect()
            live = sum(state["live_requests"] for state in states)
            return bool(live == len(texts) and sum(state["running"] > 0 for state in states) == engines)

        await asyncio.to_thread(wait_for, all_busy, LIMIT_S, "not every engine runs some of the streams")
        result = await asyncio.to_thread(act)
        return await streams, result


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.routing_faults", description=__doc__)
    add_arguments(parser)
    arguments = parser.parse_args()
    cluster = LocalCluster()
    began = time.perf_counter()
    with tqdm(total=5, unit="", desc="starting") as bar:
        try:
            cluster.start()
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ray's handler would skip the clean-up
            cluster.deploy(**OPTIONS)
            figures = RoutingFaults(cluster, bar).run()
        finally:
            cluster.stop()
    figures.append(Figure("whole command", time.perf_counter() - began, " s"))
    print_table(["fault", "figure"], [[figure.name, f"{figure.value:.3g}{figure.unit}"] for figure in figures])
    finish("loadtests.routing_faults", figures, arguments, options=OPTIONS)


if __name__ == "__main__":
    main()
