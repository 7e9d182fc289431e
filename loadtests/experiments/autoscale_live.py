"""``python -m loadtests.autoscale_live``: does the fleet follow its load, on a real local Ray Serve?

Twenty streams run all the time. Clients come until their requests need two replicas' KV memory, then three, and
leave again. Each request holds one block of a small pool, so memory decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve._private.common import ReplicaState
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from app.launch import serving
from loadtests.client import Client, Outcome
from loadtests.cluster import LocalCluster, seconds_until
from loadtests.experiments.fleet import START_LIMIT_S, started
from loadtests.report import Figure, finish, most, parse
from loadtests.workloads import prompts

REPLICAS = 3
STREAMS, STREAM_TOKENS = 20, 600  # a stream that ends is followed by another one
CLIENT_TOKENS = 48
FEW_CLIENTS, MANY_CLIENTS = 25, 65  # with the streams, more requests than one pool has blocks, than two have
BLOCK_SIZE = 2048  # so that each request holds one block: two cores cannot compute enough KV to fill real pools
POOL_BLOCKS = 40  # of one replica; a second one is asked for beyond 30, and one is enough below 24
DOWN_AFTER_S, SETTLE_S = 20.0, 10.0  # the latter at each number of clients
ALONE_S = 32.0  # of the streams; longer than the policy looks back, or they and the clients are one trend
TARGET_LIMIT_S, DOWN_LIMIT_S, END_LIMIT_S = 20.0, 140.0, 300.0
REACTION_S, INTERVAL_S, ANSWER_LIMIT_S = 3.0, 0.1, 3.0  # the last two are of looks

SMALL = {"block_size": BLOCK_SIZE, "num_blocks": POOL_BLOCKS, "max_num_seqs": POOL_BLOCKS, "token_budget": 128}
SCALING = {"max_replicas": REPLICAS, "scale_down_after_s": DOWN_AFTER_S, "startup_s": 15.0}
# Replicas share two cores here, so that more of them are not faster: time must not decide.
PATIENT = {"dtype": "bfloat16", "scaling_reserve": 0.0, "ttft_target_s": 600.0, "tpot_target_s": 60.0}
ONE = dict.fromkeys(("engine_cpus", "threads", "engine_replicas", "min_replicas"), 1)
OPTIONS: dict[str, Any] = {**ONE, **SMALL, **SCALING, **PATIENT}


@dataclass(frozen=True, slots=True)
class ServeLook:
    """What the controller said of the engine deployment at a moment of ``time.perf_counter``."""

    at: float
    target: int
    running: int


@dataclass(slots=True)
class Recording:
    """One run; times of ``time.perf_counter``."""

    serve: list[ServeLook] = field(default_factory=list)
    waiting: list[tuple[float, int]] = field(default_factory=list)  # when, and requests that waited in engines
    rises: list[float] = field(default_factory=list)  # more clients came
    left: float = math.nan  # the clients were told to leave
    streams: list[Outcome] = field(default_factory=list)
    asked: list[Outcome] = field(default_factory=list)  # by clients


def figures_of(run: Recording) -> list[Figure]:
    after_load = targets(run.serve, run.left)
    return [
        Figure("streams", len(run.streams), "", STREAMS),
        most("streams cut", sum(not one.whole for one in run.streams)),
        Figure("requests of clients", len(run.asked), "", 1),
        most("requests of clients that failed", sum(not one.whole for one in run.asked)),
        Figure("replicas at the peak", max(look.running for look in run.serve), "", REPLICAS),
        most("replicas in the end", run.serve[-1].running, 1),
        most("target in the end", run.serve[-1].target, 1),
        *(
            most(f"up {number}: first request queued to new target", reaction(at, run), REACTION_S, " s")
            for number, at in enumerate(run.rises, 1)
        ),
        most("ups after the load has gone", sum(after > before for before, after in pairwise(after_load))),
    ]


def reaction(rise: float, run: Recording) -> float:
    """Seconds from the first request that waits in an engine after ``rise`` to a higher target.

    Counted from the look before the one that saw it, so rather too much; infinite if either was never seen.
    """
    looks = [(rise, 0), *(look for look in run.waiting if look[0] > rise)]
    since = next((before for (before, _), (_, waiting) in pairwise(looks) if waiting), math.inf)
    before = next((look.target for look in reversed(run.serve) if look.at <= rise), math.inf)
    raised = next((look.at for look in run.serve if look.at > rise and look.target > before), math.inf)
    return math.inf if math.inf in (since, raised) else max(raised - since, 0.0)


def targets(looks: Sequence[ServeLook], began: float, ended: float = math.inf) -> list[int]:
    """The targets from the last look before ``began`` to ``ended``."""
    before = [look.target for look in looks if look.at <= began][-1:]
    return before + [look.target for look in looks if began < look.at <= ended]


class Load:
    """Streams and clients on the running event loop, each of which asks again once it has been answered."""

    def __init__(self, http: Client) -> None:
        self._http = http
        self._streams: list[asyncio.Task[None]] = []
        self._others: list[asyncio.Task[None]] = []
        self._clients = 0  # that are wanted
        self._ending = False
        self.streams: list[Outcome] = []  # in the order of their ends
        self.asked: list[Outcome] = []

    def start_streams(self, number: int, tokens: int) -> None:
        """Keep so many streams open, each one followed by the next."""
        for text in prompts(number, seed=11):
            work = self._repeat(text, tokens, self.streams, lambda: not self._ending)
            self._streams.append(asyncio.create_task(work))

    async def end_streams(self, timeout_s: float) -> None:
        """Wait for the ends of those that are open.

        Raises:
            TimeoutError: one has not ended after ``timeout_s``.
        """
        self._ending = True
        await asyncio.wait_for(asyncio.gather(*self._streams), timeout_s)

    def clients(self, number: int) -> None:
        """Have so many: new ones ask at once, superfluous ones leave when their request has been answered."""
        before, self._clients = self._clients, number
        for place in range(before, number):
            work = self._repeat(f"Client {place}", CLIENT_TOKENS, self.asked, partial(self._wanted, place))
            self._others.append(asyncio.create_task(work))

    async def hang_up(self) -> None:
        for task in (tasks := self._streams + self._others):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _wanted(self, place: int) -> bool:
        return place < self._clients

    async def _repeat(self, text: str, tokens: int, ended: list[Outcome], wanted: Callable[[], bool]) -> None:
        for turn in count():
            ended.append(await self._http.complete(f"{text}, story {turn}: the", tokens))
            if not ended[-1].complete or not wanted():
                return


class Stage:
    """Runs on one cluster, and looks at its controller and engines ten times a second meanwhile."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._began = time.monotonic()
        self._run = Recording()

    async def up_and_down(self) -> Recording:
        """One replica becomes two, then three, then one again.

        What never comes is said and waited for no longer; the recording shows it.
        """
        run = self._run
        async with Client(self._cluster.url, self._cluster.instance) as http:
            load = Load(http)
            looks = (self._look_at_serve, self._look_at_engines)
            watching = [asyncio.create_task(self._repeat(look)) for look in looks]
            try:
                load.start_streams(STREAMS, STREAM_TOKENS)
                await self._await(lambda: bool(run.serve and run.waiting), TARGET_LIMIT_S, "nothing to be seen")
                await asyncio.sleep(ALONE_S)
                await self._rise(load, FEW_CLIENTS, 2)
                await self._rise(load, MANY_CLIENTS, REPLICAS)
                run.left = self._say("clients leave")
                load.clients(0)
                await self._await(lambda: self._last.target <= 1, 2 * DOWN_LIMIT_S, "the target is not 1")
                await self._await(lambda: self._last.running <= 1, START_LIMIT_S, "more than one replica runs")
                self._say(f"{self._last.running} replicas run; waiting for the streams' ends")
                await load.end_streams(END_LIMIT_S)
            finally:
                for task in watching:
                    task.cancel()
                await load.hang_up()
        run.streams, run.asked = load.streams, load.asked
        return run

    async def _rise(self, load: Load, clients: int, target: int) -> None:
        self._run.rises.append(self._say(f"{clients} clients"))
        load.clients(clients)
        await self._await(lambda: self._last.target >= target, TARGET_LIMIT_S, f"the target is not {target}")
        await self._await(lambda: self._last.running >= target, START_LIMIT_S, f"no {target} replicas run")
        self._say(f"target {self._last.target}, {self._last.running} replicas run")
        await asyncio.sleep(SETTLE_S)

    @property
    def _last(self) -> ServeLook:
        return self._run.serve[-1]

    def _say(self, what: str) -> float:
        print(f"{time.monotonic() - self._began:5.0f} s  {what}", flush=True)
        return time.perf_counter()

    async def _await(self, condition: Callable[[], bool], limit_s: float, otherwise: str) -> None:
        if await asyncio.to_thread(seconds_until, condition, limit_s) >= limit_s and not condition():
            self._say(f"after {limit_s:g} s: {otherwise}")

    async def _repeat(self, look: Callable[[], None]) -> None:
        while True:
            # A controller or a replica that does not answer at the moment is asked again.
            with contextlib.suppress(RayError, RayServeException, TimeoutError):
                await asyncio.to_thread(look)
            await asyncio.sleep(INTERVAL_S)

    def _look_at_serve(self) -> None:
        engine = engine_details()
        if engine is not None:
            states = [ReplicaState(replica["state"]) for replica in engine["replicas"]]
            running = states.count(ReplicaState.RUNNING)
            self._run.serve.append(ServeLook(time.perf_counter(), engine["target_num_replicas"], running))

    def _look_at_engines(self) -> None:
        at = time.perf_counter()
        self._run.waiting.append((at, sum(state["waiting"] for state in self._cluster.inspect())))


def engine_details() -> dict[str, Any] | None:
    """What the controller knows of the engine deployment; ``None`` before it knows any.

    Raises:
        RayError: it does not answer.
    """
    asked = _get_global_client()._controller.get_serve_instance_details.remote()
    application = ray.get(asked, timeout=ANSWER_LIMIT_S)["applications"].get(serving.APP_NAME)
    deployments: dict[str, dict[str, Any]] = application["deployments"] if application else {}
    return deployments.get("engine")


def main() -> None:
    arguments = parse("autoscale_live", __doc__)
    with started() as cluster:
        stage = Stage(cluster)
        cluster.deploy(**OPTIONS)
        figures = figures_of(asyncio.run(stage.up_and_down()))
    finish("loadtests.autoscale_live", figures, arguments, "what", options=OPTIONS)
