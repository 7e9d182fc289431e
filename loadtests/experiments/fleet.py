"""A real fleet under streams to which something happens: what the fault experiments share.

Everything is float32 and greedy: a stream that moved must say the same. No other server's answer counts.
"""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from app.launch import serving
from loadtests.client import Client, Outcome, complete_all
from loadtests.cluster import LocalCluster, seconds_until, wait_for
from loadtests.report import Figure, most

OPTIONS = {"dtype": "float32", "kv_memory": "256MiB", "engine_cpus": 1, "threads": 1, "engine_replicas": 2}
OPTIONS["speculation"] = 0  # long answers repeat themselves: guessed, they would be over too soon
LIMIT_S = 30.0  # of any one wait; beyond it a figure is this, and its bar fails
START_LIMIT_S = 120.0  # of streams and replicas, on a machine that may be busy

State = Mapping[str, Any]
"""Of one replica; see ``inspect`` of both deployments."""

Sample = tuple[float, Mapping[str, int]]
"""When (seconds), and the attempts that each replica had been chosen for by then."""


@contextmanager
def started(import_path: str = serving.IMPORT_PATH) -> Iterator[LocalCluster]:
    """Ray and Serve, stopped at the end, or when the command is told to stop."""
    cluster = LocalCluster(import_path)
    try:
        cluster.start()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ray's handler would skip the clean-up
        yield cluster
    finally:
        cluster.stop()


class Fleet:
    """A deployed application, its clients, and what is left of them."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    def say(self, texts: Sequence[str], tokens: int) -> list[Outcome]:
        return asyncio.run(complete_all(self.cluster.url, texts, tokens, self.cluster.instance))

    def while_streaming(
        self, texts: Sequence[str], tokens: int, engines: int, act: Callable[[], Any]
    ) -> tuple[list[Outcome], Any]:
        """Start the streams, ``act`` once ``engines`` engines run some of them; outcomes, and its result.

        Raises:
            TimeoutError: it never came to that; the message says what ran where.
        """

        async def everything() -> tuple[list[Outcome], Any]:
            streams = asyncio.ensure_future(
                complete_all(self.cluster.url, texts, tokens, self.cluster.instance)
            )
            await asyncio.to_thread(self.wait_running, len(texts), engines)
            await asyncio.sleep(0.3)  # so that each stream has begun
            result = await asyncio.to_thread(act)
            return await streams, result

        return asyncio.run(everything())

    def client(self) -> Client:
        """For one event loop."""
        return Client(self.cluster.url, self.cluster.instance)

    def wait_running(self, count: int, engines: int) -> None:
        """Until ``engines`` engines run some of ``count`` streams."""

        def all_busy() -> bool:
            states = self.cluster.inspect()
            live = sum(state["live_requests"] for state in states)
            return bool(live >= count and sum(state["running"] > 0 for state in states) == engines)

        try:
            wait_for(all_busy, START_LIMIT_S, f"{count} streams are not running on {engines} engines")
        except TimeoutError as error:
            running = {state["replica"]: state["running"] for state in self.cluster.inspect()}
            raise TimeoutError(f"{error}; running are {running}, health is {self.cluster.health()}") from None

    def engines(self) -> list[dict[str, Any]]:
        """Their accounts, once all of them answer: one may just have been killed."""
        return wait_for(self._engines, LIMIT_S, "the engines do not answer")  # type: ignore[no-any-return]

    def ingresses(self) -> list[dict[str, Any]]:
        """Their accounts, once all of them answer."""
        return wait_for(self.cluster.ingresses, LIMIT_S, "the ingresses do not answer")  # type: ignore[no-any-return]

    def nothing_left(self, what: str) -> list[Figure]:
        """What is left of the clients' requests, after ten seconds at most."""

        def left() -> list[Figure]:
            return left_figures(what, self.engines(), self.ingresses())

        seconds_until(lambda: all(figure.holds for figure in left()), 10.0)
        return left()

    def _engines(self) -> list[dict[str, Any]]:
        try:
            return self.cluster.inspect()
        except (RayError, RayServeException):
            return []


def stream_figures(what: str, outcomes: Sequence[Outcome], expected: Sequence[Outcome]) -> list[Figure]:
    """How many are complete, how many of these have the text of an undisturbed run, and the longest pause."""
    same = sum(one.complete and one.text == other.text for one, other in zip(outcomes, expected, strict=True))
    return [
        Figure(f"{what}: streams complete", sum(one.complete for one in outcomes), "", len(outcomes)),
        Figure(f"{what}: with the undisturbed text", same, "", len(outcomes)),
        Figure(f"{what}: longest pause of a client", longest_pause(outcomes), " s"),
    ]


def longest_pause(outcomes: Iterable[Outcome]) -> float:
    """Seconds that some client waited for its next chunk."""
    return max((gap for outcome in outcomes for gap in outcome.gaps), default=0.0)


def left_figures(what: str, engines: Iterable[State], ingresses: Iterable[State]) -> list[Figure]:
    """What is still booked, live or referenced when every stream has ended."""
    engines, ingresses = list(engines), list(ingresses)
    left = {
        "tokens booked": sum(sum(ingress["booked_tokens"].values()) for ingress in ingresses),
        "live requests": sum(state["live_requests"] for state in [*engines, *ingresses]),
        "blocks referenced": sum(state["referenced_blocks"] for state in engines),
    }
    return [most(f"{what}: {name} left", value) for name, value in left.items()]


def wrong_channels(engines: Iterable[State], ingresses: int = 1, expected: int = 2) -> int:
    """By how many channels this differs from one for each ingress and each of the ``expected`` engines."""
    counts = [len(state["channels"]) for state in engines]
    counts += [0] * (expected - len(counts))
    return sum(abs(count - ingresses) for count in counts)


def least_share(before: Mapping[str, int], after: Mapping[str, int], new: Iterable[str]) -> float:
    """Of the attempts between two counts the least that one of the ``new`` replicas got, over an even share."""
    got = {name: after.get(name, 0) - before.get(name, 0) for name in {*before, *after}}
    total = sum(got.values())
    return min(got.get(name, 0) for name in new) * len(got) / total if total else 0.0


def seconds_to_share(samples: Sequence[Sample], new: Sequence[str], bar: float) -> float:
    """Seconds from the first sample until each new replica's share since then is ``bar``, and stays so."""
    began, before = samples[0]
    since = math.inf
    for at, counts in samples[1:]:
        if least_share(before, counts, new) < bar:
            since = math.inf
        elif since == math.inf:
            since = at
    return since - began


def differing_indexes(ingresses: Sequence[State], replicas: Iterable[str]) -> int:
    """Replicas of which not all ingresses hold the same blocks, all of them in step."""
    wrong = 0
    for replica in replicas:
        digests = {str(ingress["index"].get(replica, {}).get("digest")) for ingress in ingresses}
        wrong += len(digests) != 1 or "None" in digests
    return wrong


def seconds_to_step(index: Mapping[str, State]) -> float:
    """From the first channel of an ingress until it knew every replica's blocks."""
    if not index or any(state["synced"] is None for state in index.values()):
        return math.inf
    return float(max(s["synced"] for s in index.values()) - min(s["opened"] for s in index.values()))
