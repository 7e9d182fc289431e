"""How long faults are felt, on a real local Ray Serve: the bundled model on two engines of one thread each.

Clients vanish, an engine and an ingress are killed, replicas are told to stop. What is left behind is read from
the engines themselves and from ``/health``. All is fp32 and greedy: a stream that moved must say the same.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tqdm import tqdm

from loadtests.cluster import LocalCluster, gone, seconds_until, wait_for
from loadtests.report import Figure, add_arguments, finish, print_table
from loadtests.streams import Outcome, complete, complete_all, prompts, vanish

ENGINES = 2
OPTIONS = {
    "dtype": "float32",
    "kv_memory": "256MiB",
    "engine_cpus": 1,
    "threads": 1,
    "engine_replicas": ENGINES,
}
STREAMS, TOKENS = 16, 64
LONG_S = 8.0  # the least that a long stream takes; it outlives the replica that was told to stop
LIMIT_S = 30.0  # of any one wait; beyond it the figure is this, and its bar fails
START_LIMIT_S = 60.0  # of streams, on a machine that may be busy with other things
POLL_S = 0.002


def latency_figures(delays: Sequence[float], gaps: Sequence[float], look_s: float) -> list[Figure]:
    """``delays`` from hanging up to no referenced block, ``gaps`` between tokens, ``look_s`` of one poll; in s.

    A disconnect may have to wait for the step that runs, whose time is the median gap.
    """
    step = statistics.median(gaps)
    name = "disconnect to free blocks"
    return [
        Figure("one engine step of a stream alone", step, " s"),
        Figure("one look at the engines", look_s, " s"),
        Figure(f"{name}, median of {len(delays)}", statistics.median(delays), " s"),
        Figure(f"{name}, median minus one step", statistics.median(delays) - step, " s", 0.2, at_most=True),
        Figure(f"{name}, max minus one step", max(delays) - step, " s", 0.2, at_most=True),
    ]


def leftover_figures(states: Sequence[dict[str, Any]], health: dict[str, Any]) -> list[Figure]:
    """What the engines' accounts and ``/health`` still show when every client has left."""
    left = {
        "blocks referenced": sum(state["referenced_blocks"] for state in states),
        "live requests on engines": sum(state["live_requests"] for state in states),
        "live requests at the ingress": health["live_requests"],
        "tokens booked by the router": sum(health["booked_tokens"].values()),
        "channels missing or too many": wrong_channels(states),
    }
    return [Figure(f"left behind: {name}", value, "", 0, at_most=True) for name, value in left.items()]


def wrong_channels(states: Iterable[dict[str, Any]], ingresses: int = 1, engines: int = ENGINES) -> int:
    """By how many channels this differs from exactly one for each ingress and engine replica."""
    counts = [len(state["channels"]) for state in states]
    counts += [0] * (engines - len(counts))
    return sum(abs(count - ingresses) for count in counts)


def stream_figures(what: str, outcomes: Sequence[Outcome], expected: Sequence[Outcome]) -> list[Figure]:
    """How many are complete, and how many of these have the text of an undisturbed run."""
    same = sum(one.complete and one.text == other.text for one, other in zip(outcomes, expected, strict=True))
    return [
        Figure(f"{what}: streams complete", sum(one.complete for one in outcomes), "", len(outcomes)),
        Figure(f"{what}: with the undisturbed text", same, "", len(outcomes)),
    ]


def longest_pause(outcomes: Iterable[Outcome]) -> float:
    """Seconds that some client waited for its next chunk."""
    return max((gap for outcome in outcomes for gap in outcome.gaps), default=0.0)


class Faults:
    """All measurements, one after the other on one cluster."""

    def __init__(self, cluster: LocalCluster, bar: tqdm[Any], seed: int) -> None:
        self._cluster = cluster
        self._bar = bar
        self._rng = random.Random(seed)
        self._seed = seed
        self._long = 1000  # tokens of a long stream, until it is known how long they take
        self.delays: list[float] = []

    def run(self, disconnects: int, trials: int) -> list[Figure]:
        """Every figure."""
        parts: list[Callable[[], list[Figure]]] = [
            self.first_client,  # while nobody has used the channels
            lambda: self.lone_disconnects(trials),
            self.undisturbed,
            lambda: self.many_disconnects(disconnects),
            self.engine_killed,
            self.ingress_killed,
            self.idle_stopped,
            self.busy_stopped,
        ]
        figures = []
        for part in parts:
            figures += part()
            self._bar.update()
        return figures

    def first_client(self) -> list[Figure]:
        """The first client of each channel hangs up while others stream on it."""
        self._say("first client of a channel")
        before = self._cluster.channels()

        async def leave() -> list[Outcome]:
            url = self._cluster.url
            first = [
                asyncio.ensure_future(complete(url, text, self._long)) for text in prompts(ENGINES, seed=1)
            ]
            await asyncio.to_thread(self._wait_running, ENGINES)
            others = asyncio.ensure_future(complete_all(url, prompts(2 * ENGINES), TOKENS))
            await asyncio.to_thread(self._wait_running, 3 * ENGINES)
            for client in first:
                client.cancel()
            return await others

        others = asyncio.run(leave())
        failures = sum(not outcome.complete for outcome in others)
        ended = len(before - self._cluster.channels())
        what = "first client of a channel left"
        return [
            Figure(f"{what}: failures of {len(others)} others", failures, "", 0, at_most=True),
            Figure(f"{what}: channels ended", ended, "", 0, at_most=True),
        ]

    def undisturbed(self) -> list[Figure]:
        """What the streams of later parts say when nothing happens to them."""
        self._say("undisturbed streams")
        self._expected = asyncio.run(complete_all(self._cluster.url, prompts(STREAMS), TOKENS))
        self._expected_long = asyncio.run(complete_all(self._cluster.url, prompts(ENGINES), self._long))
        pause = longest_pause(self._expected)
        return [
            *stream_figures("undisturbed", self._expected, self._expected),
            Figure(f"undisturbed: longest pause of {STREAMS} streams", pause, " s"),
        ]

    def lone_disconnects(self, trials: int) -> list[Figure]:
        """One stream alone in decode, hung up; until its blocks are free."""
        self._say("lone disconnects")
        gaps: list[float] = []
        for text in prompts(trials, seed=2):
            wait_for(self._cluster.idle, LIMIT_S, "requests or blocks are left")
            chunks = self._rng.randint(2, 14)

            async def trial(text: str = text, chunks: int = chunks) -> float:
                outcome = await complete(self._cluster.url, text, self._long, leave_after=chunks)
                gaps.extend(outcome.gaps)
                # In a thread, so that the event loop closes the socket.
                return await asyncio.to_thread(seconds_until, self._cluster.idle, LIMIT_S, POLL_S)

            self.delays.append(asyncio.run(trial()))
            self._bar.update()
        self._long = math.ceil(LONG_S / statistics.median(gaps))
        began = time.perf_counter()
        for _ in range(10):
            self._cluster.inspect()
        return latency_figures(self.delays, gaps, (time.perf_counter() - began) / 10)

    def many_disconnects(self, count: int) -> list[Figure]:
        """Clients that vanish at random moments, 32 at once."""
        self._say("random disconnects")
        amid = asyncio.run(vanish(self._cluster.url, count, self._seed, on_left=self._bar.update))

        def left() -> list[Figure]:
            health = wait_for(self._cluster.health, LIMIT_S, "/health does not answer")
            return leftover_figures(self._cluster.inspect(), health)

        def clean() -> bool:
            return all(figure.holds for figure in left())

        seconds = seconds_until(clean, 5.0)
        return [
            Figure("random disconnects", count),
            Figure("random disconnects: in mid-stream", amid),
            Figure("random disconnects: last one to nothing left", seconds, " s"),
            *left(),
        ]

    def engine_killed(self) -> list[Figure]:
        """SIGKILL of an engine replica amid streams."""
        self._say("engine killed")
        victim = self._cluster.inspect()[0]["pid"]

        def kill() -> float:
            self._cluster.kill(victim)
            return time.perf_counter()

        outcomes, killed = asyncio.run(self._while_streaming(STREAMS, TOKENS, kill))
        what = "engine killed"
        return [
            *stream_figures(what, outcomes, self._expected),
            Figure(f"{what}: longest pause of a client", longest_pause(outcomes), " s"),
            Figure(f"{what}: two replicas routable again", self._routable_again(killed), " s"),
        ]

    def ingress_killed(self) -> list[Figure]:
        """SIGKILL of the ingress replica amid streams; its clients lose theirs."""
        self._say("ingress killed")
        before = self._cluster.channels()

        def kill() -> tuple[float, float]:
            self._cluster.kill(self._cluster.ingress_pids()[0])
            killed = time.perf_counter()
            return killed, seconds_until(
                lambda: self._cluster.idle() and not self._cluster.channels() & before, LIMIT_S
            )

        _, (killed, seconds) = asyncio.run(self._while_streaming(8, self._long, kill))
        return [
            Figure("ingress killed: blocks and channels gone", seconds, " s", 10.0, at_most=True),
            Figure("ingress killed: next one has its channels", self._routable_again(killed), " s"),
        ]

    def idle_stopped(self) -> list[Figure]:
        """An idle engine replica is told to stop."""
        self._say("idle engine stops")
        wait_for(self._cluster.idle, LIMIT_S, "requests or blocks are left")
        seconds = self._stop_one()
        self._cluster.scale(ENGINES)
        self._routable_again()
        return [Figure("idle engine told to stop: gone", seconds, " s", 5.0, at_most=True)]

    def busy_stopped(self) -> list[Figure]:
        """An engine replica with a running stream is told to stop; the other has one, too."""
        self._say("busy engine stops")

        def stop() -> tuple[float, float]:
            return self._stop_one(), time.perf_counter()

        outcomes, (seconds, ended) = asyncio.run(self._while_streaming(ENGINES, self._long, stop))
        outlived = sum(outcome.times[-1] > ended for outcome in outcomes if outcome.times)
        what = "busy engine told to stop"
        return [
            Figure(f"{what}: gone", seconds, " s"),
            Figure(f"{what}: streams that outlived it", outlived),
            *stream_figures(what, outcomes, self._expected_long),
            Figure(f"{what}: longest pause of a client", longest_pause(outcomes), " s"),
        ]

    async def _while_streaming(
        self, count: int, tokens: int, act: Callable[[], Any]
    ) -> tuple[list[Outcome], Any]:
        """Start the streams, call ``act`` in a thread once every engine has some running.

        Returns the outcomes (of streams that lost their connection an empty one) and what ``act`` did.
        """
        texts = prompts(STREAMS)[:count]
        streams = asyncio.gather(
            *(complete(self._cluster.url, text, tokens) for text in texts), return_exceptions=True
        )
        await asyncio.to_thread(self._wait_running, count)
        await asyncio.sleep(0.3)
        result = await asyncio.to_thread(act)
        outcomes = []
        for outcome in await streams:
            if isinstance(outcome, Outcome):
                outcomes.append(outcome)
            elif isinstance(outcome, OSError | IndexError | ValueError):  # cut off in a line, or before any
                outcomes.append(Outcome())
            else:
                raise outcome
        return outcomes, result

    def _wait_running(self, count: int) -> None:
        """Until every engine runs some of ``count`` streams.

        Raises:
            TimeoutError: it never came to that; the message says what ran where.
        """

        def all_busy() -> bool:
            states = self._cluster.inspect()
            live = sum(state["live_requests"] for state in states)
            return bool(live >= count and sum(state["running"] > 0 for state in states) == ENGINES)

        try:
            wait_for(all_busy, START_LIMIT_S, f"{count} streams are not running on every engine")
        except TimeoutError as error:
            running = {state["replica"]: state["running"] for state in self._cluster.inspect()}
            raise TimeoutError(f"{error}; running are {running}, health is {self._cluster.health()}") from None

    def _stop_one(self) -> float:
        """Seconds from the order to Serve until one of the engines' processes has ended."""
        before = self._cluster.engine_pids()
        began = time.perf_counter()
        self._cluster.scale(ENGINES - 1)
        seconds_until(lambda: any(gone(pid) for pid in before), LIMIT_S)
        return time.perf_counter() - began

    def _routable_again(self, since: float = 0.0) -> float:
        """Seconds from ``since`` until both engines take requests again."""
        self._cluster.wait_routable(ENGINES)
        wait_for(lambda: wrong_channels(self._cluster.inspect()) == 0, LIMIT_S, "channels are missing")
        return time.perf_counter() - since

    def _say(self, part: str) -> None:
        self._bar.set_description(part)


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
    cluster = LocalCluster()
    began = time.perf_counter()
    with tqdm(total=arguments.disconnects + arguments.trials + 8, unit="", desc="starting") as bar:
        faults = Faults(cluster, bar, arguments.seed)
        try:
            cluster.start()
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ray's handler would skip the clean-up
            cluster.deploy(**OPTIONS)
            figures = faults.run(arguments.disconnects, arguments.trials)
        finally:
            cluster.stop()
    figures.append(Figure("whole command", time.perf_counter() - began, " s"))
    print_table(["fault", "figure"], [[figure.name, f"{figure.value:.3g}{figure.unit}"] for figure in figures])
    finish("loadtests.faults", figures, arguments, delays=faults.delays, options=OPTIONS)


if __name__ == "__main__":
    main()
