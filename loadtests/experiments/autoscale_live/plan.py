"""How long each part of the run is, and the sizes that make KV memory what decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

REPLICAS = 3
STREAMS = 20

BLOCK_SIZE = 2048
"""Tokens. So many that each request holds one block: two cores cannot compute enough KV to fill real pools.

Routing takes replicas for equally good whose costs differ by less than the computation of a block, which is
always here: it evens out booked tokens, and requests may wait at one replica while another one has free blocks.
"""

POOL_BLOCKS = 40
"""Of one replica. A second one is asked for beyond 30, and one is enough below 24."""

MOST_TOKENS = 1900
"""Of one stream, so that with its prompt it stays within one block."""

FEW_CLIENTS, MANY_CLIENTS = 25, 65
"""Beside the streams: more requests than one pool has blocks, and more than two have."""

CLIENT_TOKENS = 48
"""Of one answer to a client, who then asks again: such requests come and end all the time."""

DOWN_AFTER_S = 20.0

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "engine_cpus": 1,
    "threads": 1,
    "engine_replicas": 1,
    "max_replicas": REPLICAS,
    "min_replicas": 1,
    "block_size": BLOCK_SIZE,
    "num_blocks": POOL_BLOCKS,
    "token_budget": 128,
    "max_num_seqs": POOL_BLOCKS,
    "scale_down_after_s": DOWN_AFTER_S,
    "startup_s": 15.0,
    "scaling_reserve": 0.0,
    # Replicas share two cores here, so that more of them are not faster: time must not decide.
    "ttft_target_s": 600.0,
    "tpot_target_s": 60.0,
}

SLEEPING = {**OPTIONS, "min_replicas": 0, "scale_down_after_s": 3.0}
"""Options of the part that begins without any replica."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Times in seconds."""

    alone_s: float = (
        32.0  # the streams; longer than the policy looks back, or they and the clients are one trend
    )
    settle_s: float = 8.0  # with two replicas
    after_kill_s: float = 60.0  # that the target must stay as it was
    hold_s: float = 15.0  # with all replicas
    expected_s: float = 240.0  # that the streams should last

    def stream_tokens(self, pace: float) -> int:
        """Of one stream; ``pace`` is what it gets a second while the streams are alone.

        With all the clients it gets a half or less.
        """
        return max(100, min(MOST_TOKENS, round(0.6 * pace * self.expected_s)))


FULL = Plan()
QUICK = Plan(settle_s=4.0, after_kill_s=15.0, hold_s=5.0, expected_s=160.0)
