"""How long faults are felt, on a real local Ray Serve: the bundled model on two engines of one thread each.

Clients vanish, an engine and an ingress are killed, replicas are told to stop. What is left behind is read from
the engines and ingresses themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from loadtests.client import Outcome, vanish
from loadtests.cluster import LocalCluster, gone, seconds_until, wait_for
from loadtests.experiments.fleet import (
    LIMIT_S,
    OPTIONS,
    Fleet,
    left_figures,
    started,
    stream_figures,
    wrong_channels,
)
from loadtests.report import Figure, add_arguments, finish, most, print_figures
from loadtests.stats import median
from loadtests.workloads import prompts

ENGINES = 2
STREAMS, TOKENS = 16, 64
LONG_S = 8.0  # the least that a long stream takes; it outlives the replica that was told to stop
POLL_S = 0.002


def latency_figures(delays: Sequence[float], gaps: Sequence[float], look_s: float) -> list[Figure]:
    """``delays`` from hanging up to no referenced block, ``gaps`` between tokens, ``look_s`` of one poll; in s.

    A disconnect may have to wait for the step that runs, whose time is the median gap. HAProxy sees one
    whose request came in two packets, as clients send it, only as it writes the next chunks: some steps pass.
    """
    step = median(gaps)
    name = "disconnect to free blocks"
    return [
        Figure("one engine step of a stream alone", step, " s"),
        Figure("one look at the engines", look_s, " s"),
        Figure(f"{name}, median of {len(delays)}", median(delays), " s"),
        most(f"{name}, median minus one step", median(delays) - step, 0.2, " s"),
        most(f"{name}, max minus one step", max(delays) - step, 0.5, " s"),
    ]


class Faults(Fleet):
    """All measurements, one after the other on one cluster."""

    def __init__(self, cluster: LocalCluster, bar: tqdm[Any], seed: int) -> None:
        super().__init__(cluster)
        self._bar = bar
        self._rng = random.Random(seed)
        self._seed = seed
        self._long = 1000  # tokens of a long stream, until it is known how long they take
        self._expected: list[Outcome] = []
        self._expected_long: list[Outcome] = []
        self.delays: list[float] = []

    def run(self, disconnects: int, trials: int) -> list[Figure]:
        """Every figure."""
        parts: dict[str, Callable[[], list[Figure]]] = {
            "first client of a channel": self.first_client,  # while nobody has used the channels
            "lone disconnects": lambda: self.lone_disconnects(trials),
            "undisturbed streams": self.undisturbed,
            "random disconnects": lambda: self.many_disconnects(disconnects),
            "engine killed": self.engine_killed,
            "ingress killed": self.ingress_killed,
            "idle engine stops": self.idle_stopped,
            "busy engine stops": self.busy_stopped,
        }
        figures = []
        for name, part in parts.items():
            self._bar.set_description(name)
            figures += part()
            self._bar.update()
        return figures

    def first_client(self) -> list[Figure]:
        """The first client of each channel hangs up while others stream on it."""
        before = self.cluster.channels()

        async def leave() -> list[Outcome]:
            async with self.client() as client:
                texts = prompts(ENGINES, seed=1)
                streams = [asyncio.ensure_future(client.complete(text, self._long)) for text in texts]
                await asyncio.to_thread(self.wait_running, ENGINES, ENGINES)
                others = [client.complete(text, TOKENS) for text in prompts(2 * ENGINES)]
                gathered = asyncio.gather(*others)
                await asyncio.to_thread(self.wait_running, 3 * ENGINES, ENGINES)
                for stream in streams:
                    stream.cancel()
                return await gathered

        outcomes = asyncio.run(leave())
        what = "first client of a channel left"
        failures = sum(not outcome.complete for outcome in outcomes)
        return [
            most(f"{what}: failures of {len(outcomes)} others", failures),
            most(f"{what}: channels ended", len(before - self.cluster.channels())),
        ]

    def undisturbed(self) -> list[Figure]:
        """What the streams of later parts say when nothing happens to them."""
        self._expected = self.say(prompts(STREAMS), TOKENS)
        self._expected_long = self.say(prompts(ENGINES), self._long)
        return stream_figures("undisturbed", self._expected, self._expected)

    def lone_disconnects(self, trials: int) -> list[Figure]:
        """One stream alone in decode, hung up; until its blocks are free."""
        gaps: list[float] = []

        async def trial(text: str) -> float:
            async with self.client() as client:
                outcome = await client.complete(text, self._long, leave_after=self._rng.randint(2, 14))
                gaps.extend(outcome.gaps)
                return await asyncio.to_thread(seconds_until, self.cluster.idle, LIMIT_S, POLL_S)

        for text in prompts(trials, seed=2):
            wait_for(self.cluster.idle, LIMIT_S, "requests or blocks are left")
            self.delays.append(asyncio.run(trial(text)))
            self._bar.update()
        self._long = math.ceil(LONG_S / median(gaps))
        began = time.perf_counter()
        for _ in range(10):
            self.cluster.inspect()
        return latency_figures(self.delays, gaps, (time.perf_counter() - began) / 10)

    def many_disconnects(self, count: int) -> list[Figure]:
        """Clients that vanish at random moments, 32 at once."""
        url, model = self.cluster.url, self.cluster.model
        amid = asyncio.run(vanish(url, count, self._seed, on_left=self._bar.update, model=model))
        what = "random disconnects"

        def left() -> list[Figure]:
            engines = self.engines()
            channels = most(f"{what}: channels missing or too many", wrong_channels(engines))
            return [*left_figures(what, engines, self.ingresses()), channels]

        seconds = seconds_until(lambda: all(figure.holds for figure in left()), 5.0)
        return [
            Figure(what, count),
            Figure(f"{what}: in mid-stream", amid),
            Figure(f"{what}: last one to nothing left", seconds, " s"),
            *left(),
        ]

    def engine_killed(self) -> list[Figure]:
        """SIGKILL of an engine replica amid streams."""
        victim = self.cluster.inspect()[0]["pid"]

        def kill() -> float:
            self.cluster.kill(victim)
            return time.perf_counter()

        outcomes, killed = self.while_streaming(prompts(STREAMS), TOKENS, ENGINES, kill)
        return [
            *stream_figures("engine killed", outcomes, self._expected),
            Figure("engine killed: two replicas routable again", self._routable_again(killed), " s"),
        ]

    def ingress_killed(self) -> list[Figure]:
        """SIGKILL of the ingress replica amid streams; its clients lose theirs."""
        before = self.cluster.channels()

        def kill() -> tuple[float, float]:
            self.cluster.kill(self.cluster.ingress_pids()[0])
            killed = time.perf_counter()
            return killed, seconds_until(
                lambda: self.cluster.idle() and not self.cluster.channels() & before, LIMIT_S
            )

        _, (killed, seconds) = self.while_streaming(prompts(8), self._long, ENGINES, kill)
        return [
            most("ingress killed: blocks and channels gone", seconds, 10.0, " s"),
            Figure("ingress killed: next one has its channels", self._routable_again(killed), " s"),
        ]

    def idle_stopped(self) -> list[Figure]:
        """An idle engine replica is told to stop."""
        wait_for(self.cluster.idle, LIMIT_S, "requests or blocks are left")
        seconds = self._stop_one()
        self.cluster.scale(ENGINES)
        self._routable_again()
        return [most("idle engine told to stop: gone", seconds, 5.0, " s")]

    def busy_stopped(self) -> list[Figure]:
        """An engine replica with a running stream is told to stop; the other has one, too."""
        outcomes, (seconds, ended) = self.while_streaming(
            prompts(ENGINES), self._long, ENGINES, lambda: (self._stop_one(), time.perf_counter())
        )
        what = "busy engine told to stop"
        return [
            Figure(f"{what}: gone", seconds, " s"),
            Figure(f"{what}: streams that outlived it", sum(outcome.last > ended for outcome in outcomes)),
            *stream_figures(what, outcomes, self._expected_long),
        ]

    def _stop_one(self) -> float:
        """Seconds from the order to Serve until one of the engines' processes has ended."""
        before = self.cluster.engine_pids()
        began = time.perf_counter()
        self.cluster.scale(ENGINES - 1)
        seconds_until(lambda: any(gone(pid) for pid in before), LIMIT_S)
        return time.perf_counter() - began

    def _routable_again(self, since: float = 0.0) -> float:
        """Seconds from ``since`` until both engines take requests again."""
        self.cluster.wait_routable(ENGINES)
        wait_for(lambda: wrong_channels(self.cluster.inspect()) == 0, LIMIT_S, "channels are missing")
        return time.perf_counter() - since


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.faults", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--disconnects", type=int, default=1000, help="clients that vanish at random moments")
    parser.add_argument("--trials", type=int, default=30, help="of a lone stream's disconnect")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.disconnects < 1 or arguments.trials < 1:
        parser.error("--disconnects and --trials must be at least 1")
    began = time.perf_counter()
    with tqdm(total=arguments.disconnects + arguments.trials + 8, unit="") as bar, started() as cluster:
        faults = Faults(cluster, bar, arguments.seed)
        cluster.deploy(**OPTIONS)
        figures = faults.run(arguments.disconnects, arguments.trials)
    figures.append(Figure("whole command", time.perf_counter() - began, " s"))
    print_figures("fault", figures)
    finish("loadtests.faults", figures, arguments, delays=faults.delays, options=OPTIONS)


if __name__ == "__main__":
    main()
