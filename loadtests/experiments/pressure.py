"""Many HTTP streams on a real local Ray Serve whose KV pool holds a quarter of what they need.

One engine replica, fp32 and greedy, so that every stream must say the same to the letter as with an ample pool:
once with host memory to swap to, once without, where all that is lost is computed again.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.scheduling.recovery import Recovery
from loadtests.client import Outcome, complete_all
from loadtests.cluster import LocalCluster, wait_for
from loadtests.experiments.fleet import OPTIONS, started
from loadtests.report import Figure, finish, most, print_figures
from loadtests.workloads import prompts

BLOCK_SIZE = 16
PROMPT_TOKENS = 16  # the most of any prompt
STREAMS, TOKENS = 64, 256
SHARE = 4  # the pool holds one part in so many of what all streams need at once


@dataclass(frozen=True, slots=True)
class Pressed:
    """What the streams brought, and what their engine did for it."""

    outcomes: list[Outcome]
    preemptions: int
    recoveries: dict[str, int]  # complete ones, by kind

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
    pool = ("referenced_blocks", "cached_blocks", "free_blocks")

    def replaced() -> bool:
        return [sum(state[part] for part in pool) for state in cluster.inspect()] == [options["num_blocks"]]

    wait_for(replaced, 120.0, "the replica with the new pool is not alone")
    cluster.wait_routable(1)


def press(cluster: LocalCluster, texts: Sequence[str], tokens: int) -> Pressed:
    """Run all streams at once, and look at the engine afterwards."""
    outcomes = asyncio.run(complete_all(cluster.url, texts, tokens, cluster.instance))
    wait_for(cluster.idle, 30.0, "requests or blocks are left")
    states = cluster.inspect()
    recoveries = {kind: sum(state["recoveries"][kind] for state in states) for kind in map(str, Recovery)}
    return Pressed(outcomes, sum(state["preemptions"] for state in states), recoveries)


def figures_of(name: str, pressed: Pressed, said: Sequence[str]) -> list[Figure]:
    """What must hold of the streams in a small pool."""
    count = len(said)
    same = sum(one.complete and one.text == text for one, text in zip(pressed.outcomes, said, strict=True))
    return [
        Figure(f"{name}: whole streams with the tokens of the ample pool, of {count}", same, "", count),
        Figure(f"{name}: preemptions", pressed.preemptions, "", 1),
        *(Figure(f"{name}: recoveries by {kind}", count) for kind, count in pressed.recoveries.items()),
    ]


def compare_http(arguments: argparse.Namespace) -> None:
    """Run the streams with an ample pool and with small ones, and report."""
    needed, texts = blocks_needed(STREAMS, TOKENS), prompts(STREAMS, arguments.seed)
    common = {**OPTIONS, "engine_replicas": 1, "engine_cpus": 2, "threads": 2, "block_size": BLOCK_SIZE}
    del common["kv_memory"]
    figures: list[Figure] = []
    with started() as cluster:

        def pressed(blocks: int, swap_space: int | str) -> Pressed:
            redeploy(cluster, {**common, "num_blocks": blocks, "swap_space": swap_space, "check_at_idle": True})
            return press(cluster, texts, TOKENS)

        ample = pressed(needed, 0)
        figures.append(most("ample: preemptions", ample.preemptions))
        for name, space in (("with swap space", "1GiB"), ("without", 0)):
            figures += figures_of(name, pressed(needed // SHARE, space), ample.texts)
    print_figures(f"{STREAMS} streams of {TOKENS} tokens in {needed // SHARE} of {needed} blocks", figures)
    finish("loadtests.recovery --http", figures, arguments)
