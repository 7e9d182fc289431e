"""Many HTTP streams on a real local Ray Serve whose KV pool holds a quarter of what they need.

One engine replica, fp32 and greedy, so that every stream must say the same to the letter as with an ample pool:
once with host memory to swap to, once without, where all that is lost is computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.scheduling.recovery import Recovery
from loadtests.client import Outcome, complete_all
from loadtests.cluster import LocalCluster, wait_for
from loadtests.experiments.fleet import started
from loadtests.report import Figure, finish, most, print_figures
from loadtests.workloads import prompts

BLOCK_SIZE = 16
PROMPT_TOKENS = 16  # the most of any prompt
STREAMS, TOKENS = 64, 256
SHARE = 4  # the pool holds one part in so many of what all streams need at once
SWAP_SPACE = "1GiB"
LIMIT_S = 1800.0  # of all streams together, on a machine that may be busy with other things


@dataclass(frozen=True, slots=True)
class Pressed:
    """What the streams brought, and what their engine did for it."""

    outcomes: list[Outcome]
    seconds: float
    preemptions: int
    recoveries: dict[str, int]  # complete ones, by kind

    @property
    def refused(self) -> int:
        """Streams whose status was not 200, or that got none."""
        return sum(outcome.status != 200 for outcome in self.outcomes)

    @property
    def texts(self) -> list[str]:
        """What each stream said."""
        return [outcome.text for outcome in self.outcomes]


def blocks_needed(streams: int, tokens: int) -> int:
    """KV blocks that all streams hold when each is at its end, at most."""
    return streams * -(-(PROMPT_TOKENS + tokens) // BLOCK_SIZE)


def redeploy(cluster: LocalCluster, options: dict[str, Any]) -> None:
    """Deploy, and wait until nothing but one replica with the pool of ``options`` is left."""
    cluster.deploy(**options)

    def replaced() -> bool:
        pools = [
            state["referenced_blocks"] + state["cached_blocks"] + state["free_blocks"]
            for state in cluster.inspect()
        ]
        return pools == [options["num_blocks"]]

    wait_for(replaced, 120.0, "the replica with the new pool is not alone")
    cluster.wait_routable(1)


def press(cluster: LocalCluster, texts: Sequence[str], tokens: int) -> Pressed:
    """Run all streams at once, and look at the engine afterwards."""

    async def everything() -> list[Outcome]:
        return await asyncio.wait_for(complete_all(cluster.url, texts, tokens, cluster.model), LIMIT_S)

    began = time.perf_counter()
    outcomes = asyncio.run(everything())
    seconds = time.perf_counter() - began
    wait_for(cluster.idle, 30.0, "requests or blocks are left")
    states = cluster.inspect()
    recoveries = {kind: sum(state["recoveries"][kind] for state in states) for kind in map(str, Recovery)}
    return Pressed(outcomes, seconds, sum(state["preemptions"] for state in states), recoveries)


def figures_of(name: str, pressed: Pressed, said: Sequence[str], tokens: int) -> list[Figure]:
    """What must hold of the streams in a small pool."""
    count = len(said)
    whole = sum(outcome.complete for outcome in pressed.outcomes)
    same = sum(one == other for one, other in zip(pressed.texts, said, strict=True))
    return [
        Figure(f"{name}: streams that ended whole, of {count}", whole, "", count),
        most(f"{name}: streams with another status than 200", pressed.refused),
        Figure(f"{name}: streams with the tokens of the ample pool, of {count}", same, "", count),
        Figure(f"{name}: preemptions", pressed.preemptions, "", 1),
        *(Figure(f"{name}: recoveries by {kind}", count) for kind, count in pressed.recoveries.items()),
        Figure(f"{name}: output", whole * tokens / pressed.seconds, " tokens/s"),
    ]


def compare_http(arguments: argparse.Namespace) -> None:
    """Run the streams with an ample pool and with small ones, and report."""
    needed = blocks_needed(STREAMS, TOKENS)
    texts = prompts(STREAMS, arguments.seed)
    common = {
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "engine_replicas": 1,
        "engine_cpus": 2,
        "threads": 2,
        "check_at_idle": True,
    }
    settings: dict[str, dict[str, Any]] = {
        "ample": {"num_blocks": needed, "swap_space": 0},
        "small with swap space": {"num_blocks": needed // SHARE, "swap_space": SWAP_SPACE},
        "small without swap space": {"num_blocks": needed // SHARE, "swap_space": 0},
    }
    runs: dict[str, Pressed] = {}
    with started() as cluster:
        for name, options in settings.items():
            redeploy(cluster, {**common, **options})
            runs[name] = press(cluster, texts, TOKENS)
    ample = runs.pop("ample")
    figures = [most("ample: preemptions", ample.preemptions)]
    for name, pressed in runs.items():
        figures += figures_of(name, pressed, ample.texts, TOKENS)
    print_figures(f"{STREAMS} streams of {TOKENS} tokens in {needed // SHARE} of {needed} blocks", figures)
    finish("loadtests.recovery --http", figures, arguments)
