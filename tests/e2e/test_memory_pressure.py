"""Streams in a KV pool that holds a quarter of what they need say what they say with room for all."""

from __future__ import annotations

import pytest
from local_cluster import BreakableCluster

from loadtests.experiments.recovery import Pressed, blocks_needed, press, redeploy
from loadtests.workloads import prompts

STREAMS, TOKENS = 16, 48
PROMPTS = prompts(STREAMS, seed=3)
BLOCKS = blocks_needed(STREAMS, TOKENS) // 4


@pytest.fixture(scope="module")
def said(deployed: BreakableCluster) -> list[str]:
    """What the streams say on the session's two engines, whose pools have room for all."""
    deployed.wait_routable(2)
    with_room = press(deployed, PROMPTS, TOKENS)
    assert with_room.preemptions == 0
    assert len(set(with_room.texts)) > STREAMS // 2  # greedy, so that some may end up alike
    return with_room.texts


def test_all_streams_end_with_the_same_tokens(deployed: BreakableCluster, said: list[str]) -> None:
    # Room to swap to for a few of the preempted ones only: the others are computed again.
    changes = {"engine_replicas": 1, "num_blocks": BLOCKS, "recovery": "swap", "swap_space": "6MiB"}
    redeploy(deployed, {**deployed.options, **changes})
    pressed: Pressed = press(deployed, PROMPTS, TOKENS)
    assert all(outcome.complete for outcome in pressed.outcomes)
    assert pressed.texts == said
    assert pressed.preemptions > 0
    assert pressed.recoveries["swap"] > 0
    (state,) = deployed.inspect()
    assert (state["swapped"], state["host_blocks_used"]) == (0, 0)
