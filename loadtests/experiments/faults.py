"""How long faults are felt, on a real local Ray Serve: the bundled model on two engines of one thread each.

Clients vanish, an engine and an ingress are killed, replicas are told to stop. What is left behind is read from
the engines and ingresses themselves.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence

from tqdm import tqdm

from loadtests.client import Outcome, vanish
from loadtests.cluster import gone, seconds_until, wait_for
from loadtests.experiments.fleet import LIMIT_S, OPTIONS, Fleet, started, stream_figures, wrong_channels
from loadtests.report import Figure, finish, most, parse
from loadtests.stats import median, quantile
from loadtests.workloads import prompts

ENGINES = 2
STREAMS, TOKENS = 16, 64
LONG_STREAMS = 8  # enough to be on both engines, whatever the router has learned of these
AT_ONCE = 128  # clients that vanish: each then takes an eighth less of the processors than with 32
LONG_S = 8.0  # the least that a long stream takes; it outlives the replica that was told to stop


def latency_figures(delays: Sequence[float], gaps: Sequence[float]) -> list[Figure]:
    """``delays`` from hanging up to no referenced block, ``gaps`` between tokens; in s.

    A disconnect may have to wait for the step that runs, whose time is the median gap.
    """
    step, name = median(gaps), "disconnect to free blocks"
    return [
        most(f"{name}, median of {len(delays)} minus one step", median(delays) - step, 0.2, " s"),
        most(f"{name}, p99 minus one step", quantile(delays, 0.99) - step, 0.2, " s"),
    ]


def delay(outcome: Outcome, freed: float) -> float:
    """Seconds from hanging up to ``freed``; infinite, which fails, if the answer ended before that."""
    left = bool(outcome.broken or outcome.events) and not outcome.done
    return freed - outcome.ended if left and freed > outcome.ended else math.inf


class Faults(Fleet):
    """All measurements, one after the other on one cluster."""

    _long = 1000  # tokens of a long stream, until it is known how long they take
    _expected: Sequence[Outcome] = ()
    _expected_long: Sequence[Outcome] = ()

    def run(self, disconnects: int, trials: int) -> list[Figure]:
        parts: list[Callable[[], list[Figure]]] = [
            lambda: self.lone_disconnects(trials),
            self.undisturbed,
            lambda: self.many_disconnects(disconnects),
            self.engine_killed,
            self.ingress_killed,
            self.busy_stopped,
        ]
        return [figure for part in tqdm(parts, unit="part") for figure in part()]

    def undisturbed(self) -> list[Figure]:
        """What the streams of later parts say when nothing happens to them."""
        self._expected = self.say(prompts(STREAMS), TOKENS)
        self._expected_long = self.say(prompts(LONG_STREAMS), self._long)
        return stream_figures("undisturbed", self._expected, self._expected)

    def lone_disconnects(self, trials: int) -> list[Figure]:
        """A stream or a whole answer alone in decode, hung up; until its blocks are free."""
        delays: list[float] = []
        gaps: list[float] = []
        draw = random.Random(7)

        async def trial(text: str, stream: bool) -> Outcome:
            how = {"leave_after": draw.randint(2, 14)} if stream else {"leave_s": 0.5 + draw.random()}
            async with self.client() as client:
                return await client.complete(text, self._long, stream=stream, **how)

        for index, text in enumerate(prompts(trials, seed=2)):
            outcome = asyncio.run(trial(text, stream=index % 2 == 0))
            gaps.extend(outcome.gaps)
            wait_for(self.cluster.idle, LIMIT_S, "requests or blocks are left")
            # The engine's own time, by the same clock: to ask an engine takes longer than it takes to free.
            delays.append(delay(outcome, max(float(state["turned_at"]) for state in self.cluster.inspect())))
        self._long = math.ceil(LONG_S / median(gaps))
        return latency_figures(delays, gaps)

    def many_disconnects(self, count: int) -> list[Figure]:
        """Clients of streams and whole answers that vanish at random moments; each costs 20 ms of a core."""
        asyncio.run(vanish(self.cluster.url, count, 7, self.cluster.instance, AT_ONCE))
        what = f"{count} random disconnects"
        found = self.nothing_left(what)
        seconds_until(lambda: self.cluster.connections() == 0, 5.0)
        channels = most(f"{what}: channels missing or too many", wrong_channels(self.engines()))
        return [*found, channels, most(f"{what}: connections left", self.cluster.connections())]

    def engine_killed(self) -> list[Figure]:
        """SIGKILL of an engine replica amid streams."""
        victim = self.cluster.inspect()[0]["pid"]
        outcomes, _ = self.while_streaming(prompts(STREAMS), TOKENS, ENGINES, lambda: self.cluster.kill(victim))
        self._routable_again()
        return stream_figures("engine killed", outcomes, self._expected)

    def ingress_killed(self) -> list[Figure]:
        """SIGKILL of the ingress replica amid streams; its clients lose theirs."""
        before = self.cluster.channels()

        def kill() -> float:
            self.cluster.kill(self.cluster.ingress_pids()[0])
            return seconds_until(lambda: self.cluster.idle() and not self.cluster.channels() & before, LIMIT_S)

        _, seconds = self.while_streaming(prompts(LONG_STREAMS), self._long, ENGINES, kill)
        self._routable_again()
        return [most("ingress killed: blocks and channels gone", seconds, 10.0, " s")]

    def busy_stopped(self) -> list[Figure]:
        """An engine replica with running streams is told to stop; the other has some, too."""
        outcomes, seconds = self.while_streaming(prompts(LONG_STREAMS), self._long, ENGINES, self._stop_one)
        what = "busy engine told to stop"
        return [Figure(f"{what}: gone", seconds, " s"), *stream_figures(what, outcomes, self._expected_long)]

    def _stop_one(self) -> float:
        """Seconds from the order to Serve until one of the engines' processes has ended."""
        before = self.cluster.engine_pids()
        self.cluster.scale(ENGINES - 1)
        return seconds_until(lambda: any(gone(pid) for pid in before), LIMIT_S)

    def _routable_again(self) -> None:
        self.cluster.wait_routable(ENGINES)
        wait_for(lambda: wrong_channels(self.cluster.inspect()) == 0, LIMIT_S, "channels are missing")


def main() -> None:
    options = {
        "--disconnects": (1000, "clients that vanish at random moments"),
        "--trials": (30, "of a lone stream's disconnect"),
    }
    arguments = parse("faults", __doc__, options)
    with started() as cluster:
        cluster.deploy(**OPTIONS)
        figures = Faults(cluster).run(arguments.disconnects, arguments.trials)
    finish("loadtests.faults", figures, arguments, "fault", options=OPTIONS)
