"""One run: streams for as long as it takes, clients that come and leave, the controller killed in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ray import serve

from app.launch import serving
from loadtests.client import complete, complete_all
from loadtests.cluster import LocalCluster, seconds_until
from loadtests.experiments.autoscale_live.judge import Recording, stops
from loadtests.experiments.autoscale_live.load import Load
from loadtests.experiments.autoscale_live.plan import (
    CLIENT_TOKENS,
    DOWN_AFTER_S,
    FEW_CLIENTS,
    MANY_CLIENTS,
    OPTIONS,
    REPLICAS,
    SLEEPING,
    STREAMS,
    Plan,
)
from loadtests.experiments.autoscale_live.watch import ServeLook, Watch, engine_details, kill_controller
from loadtests.report import Figure, most
from loadtests.stats import median
from loadtests.workloads import prompts

TARGET_LIMIT_S = 20.0
START_LIMIT_S = 120.0  # of a replica, on a machine that may be busy
DOWN_LIMIT_S = 120.0
END_LIMIT_S = 300.0


class Stage:
    """Runs on one cluster. ``say`` is told what happens."""

    def __init__(self, cluster: LocalCluster, plan: Plan, say: Callable[[str], object]) -> None:
        self._plan = plan
        self._say = say
        self._cluster = cluster

    def run(self) -> Recording:
        """One replica becomes two, then three, then one again.

        What never comes is said and waited for no longer; the recording shows it.
        """
        self._say("deploying one replica")
        self._cluster.deploy(**OPTIONS)
        tokens = self._plan.stream_tokens(self._pace())
        load = Load(self._cluster.url, CLIENT_TOKENS, self._cluster.model)
        watch = Watch(self._cluster)
        run = Recording(time.perf_counter())
        load.start()
        watch.start()
        try:
            self._up_and_down(run, load, watch, tokens)
            watch.stop()
        finally:
            watch.stop()
            load.stop()
        run.serve, run.engines, run.asked = watch.serve, watch.engines, load.asked
        return run

    def from_zero(self) -> list[Figure]:
        """A fleet that has gone to zero gets a request."""
        self._say("deploying a fleet that may sleep")
        serve.delete(serving.APP_NAME)
        self._cluster.deploy(**SLEEPING)

        def asleep() -> bool:
            engine = engine_details()
            return engine is not None and engine["target_num_replicas"] == 0 and not engine["replicas"]

        self._await(asleep, START_LIMIT_S, "no replica is left")
        engine = engine_details()
        there = len(engine["replicas"]) if engine is not None else 0
        self._say(f"{there} replicas; a request comes")
        url, model = self._cluster.url, self._cluster.model
        answer = asyncio.run(complete(url, "A single story: the", CLIENT_TOKENS, model=model))
        first = answer.first - answer.began if answer.first else END_LIMIT_S
        self._say(f"answered with {answer.status} after {first:.1f} s")
        return [
            most("from zero: replicas before", there),
            Figure("from zero: requests answered in full, of 1", answer.whole, "", 1),
            most("from zero: answers with a 5xx", answer.status >= 500),
            Figure("from zero: request to first token", first, " s"),
        ]

    def _up_and_down(self, run: Recording, load: Load, watch: Watch, tokens: int) -> None:
        plan = self._plan

        def event(name: str) -> float:
            at = time.perf_counter()
            run.events.append((at, name))
            self._say(name)
            return at

        def rise(clients: int, target: int) -> None:
            run.rises.append(event(f"{clients} clients"))
            load.clients(clients)
            self._await(
                lambda: self._last(watch).target >= target, TARGET_LIMIT_S, f"the target is not {target}"
            )
            self._say(f"target {self._last(watch).target}")
            self._await(
                lambda: len(self._last(watch).running) >= target, START_LIMIT_S, f"no {target} replicas run"
            )
            self._say(f"{len(self._last(watch).running)} replicas run")

        event(f"{STREAMS} streams")
        self._say(f"of {tokens} tokens each")
        load.start_streams(STREAMS, tokens)
        self._await(lambda: bool(watch.serve) and bool(watch.engines), TARGET_LIMIT_S, "nothing to be seen")
        time.sleep(plan.alone_s)
        rise(FEW_CLIENTS, 2)
        time.sleep(plan.settle_s)
        run.killed = event("controller killed")
        kill_controller()
        time.sleep(plan.after_kill_s)
        run.watched_s = time.perf_counter() - run.killed
        rise(MANY_CLIENTS, REPLICAS)
        time.sleep(plan.hold_s)
        run.left = event("clients leave")
        load.clients(0)
        for target in range(REPLICAS - 1, 0, -1):
            limit_s = DOWN_AFTER_S + DOWN_LIMIT_S
            self._await(lambda: self._last(watch).target <= target, limit_s, f"the target is not {target}")  # noqa: B023
            self._say(f"target {self._last(watch).target}")
        self._await(
            lambda: all(gone < float("inf") for _, gone in stops(watch.serve).values()),
            START_LIMIT_S,
            "what was stopped is not gone",
        )
        self._say(f"{len(self._last(watch).running)} replicas run; waiting for the streams' ends")
        run.streams = load.streams(END_LIMIT_S)

    def _pace(self) -> float:
        """Tokens a second of each stream, while there is nothing else."""
        texts = prompts(STREAMS, seed=1)
        outcomes = asyncio.run(complete_all(self._cluster.url, texts, 32, self._cluster.model))
        return 1.0 / median([gap for outcome in outcomes for gap in outcome.gaps])

    def _await(self, condition: Callable[[], bool], limit_s: float, otherwise: str) -> None:
        if seconds_until(condition, limit_s) >= limit_s and not condition():
            self._say(f"after {limit_s:g} s: {otherwise}")

    @staticmethod
    def _last(watch: Watch) -> ServeLook:
        return watch.serve[-1]
