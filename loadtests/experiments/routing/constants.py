"""Everything that the routing experiment assumes. Fixed before any result was looked at.

The fleet is that of the best published measurements of prefix-aware routing: eight replicas, each serving a
dense model of 32 billion parameters in 16 bits (64 layers, 8 KV heads of 128) on two H100.
"""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.experiments.simulated_replica import ReplicaConfig, StepCost

BLOCK_SIZE = 16
TOKEN_BUDGET = 2_048
SEEDS = 3
"""With which figures are published."""

COST = StepCost(base=14e-3, prefill_token=1 / 16_000, decode_row=30e-6, context_token=56e-9)
"""Rooflines of two H100 (989 TFLOP/s and 3.35 TB/s each): 64 GFLOP a prompt token at half the peak; 65.6 GB of
weights and 262 KB of K and V a token at 70% of the bandwidth; 30 us to sample one row."""

SEND_DELAY = 2e-3
"""Seconds from an ingress's choice to the replica's queue."""

FLUSH_INTERVAL = 45e-3
"""Seconds that KV events and load wait for a step that makes tokens for the ingress: they leave with these."""

CHANNEL_DELAY = 5e-3
"""Seconds from there to the ingress; together an event is at most 50 ms old."""


@dataclass(frozen=True, slots=True)
class Shape:
    """System prompts of Zipf-distributed popularity, each followed by questions of its own.

    ``questions`` is how many there are for each system prompt; 0 makes every question a new one.
    """

    groups: int
    system: int
    questions: int
    question: int
    output: int
    zipf: float = 1.0

    @property
    def prompt(self) -> int:
        return self.system + self.question

    @property
    def working_set(self) -> int:
        """Tokens that come back."""
        return self.groups * (self.system + self.questions * self.question)

    def blocks(self, ratio: float, replicas: int) -> int:
        """Blocks of each replica, so that the working set is ``ratio`` of the fleet's KV memory."""
        return round(self.working_set / ratio / replicas / BLOCK_SIZE)


SHARED = Shape(groups=150, system=6_000, questions=5, question=1_200, output=1_000)
"""The published workload, with Zipf's popularity instead of equal ones.

Its working set, 1.8 million tokens, is 73% of eight times 308 thousand, the KV memory of the published fleet.
"""

EQUAL = Shape(groups=150, system=6_000, questions=5, question=1_200, output=1_000, zipf=0.0)
"""As published: every system prompt is as popular as any other."""

REPLICAS = 8
RATIO = 0.73
PRESSURE_RATIO = 1.3
INGRESSES = 4

RAMP_FROM, RAMP_TO = 0.3, 1.3
RAMP_SECONDS = 270.0
RAMP_STEPS = 27
RAMP_WINDOW = 6
RAMP_FULL = 3
"""How saturation is found: the offered rate, open loop, rises evenly from ``RAMP_FROM`` to ``RAMP_TO`` times
the saturating rate in ``RAMP_STEPS`` steps, and an arm's capacity is the most tokens per second that it made in
any ``RAMP_WINDOW`` steps in a row: 60 s, about as long as a request stays. The run ends after ``RAMP_FULL``
steps in a row at whose ends more requests wait than run: beyond that, blocks are gone when their requests come.
"""

SERVED_SHARE = 0.3
"""Of the saturating rate: a rate that round robin still serves, to compare the time between tokens."""

SERVED_WARM_UP, SERVED_WINDOW = 60.0, 120.0


def saturating_rate(shape: Shape, replicas: int) -> float:
    """Requests per second that reading the KV alone would allow, so more than any fleet of these can serve."""
    return replicas / (COST.context_token * (shape.prompt + shape.output / 2) * shape.output)


@dataclass(frozen=True, slots=True)
class Load:
    """A fleet and what comes to it: arrivals for ``warm_up`` and then ``seconds``."""

    replicas: int
    blocks: int
    rate: float  # requests per second
    warm_up: float
    seconds: float

    @property
    def replica(self) -> ReplicaConfig:
        return ReplicaConfig(COST, self.blocks, BLOCK_SIZE, TOKEN_BUDGET, kv_events=True)


HOT = Shape(groups=1, system=6_000, questions=0, question=1_200, output=200)
HOT_RUN = Load(replicas=4, blocks=19_264, rate=16.0, warm_up=30.0, seconds=210.0)
"""One system prompt for all. With it cached, prompts and KV reads take 63% of each replica's time."""

UNIQUE = Shape(groups=0, system=0, questions=0, question=2_400, output=200)
UNIQUE_RUN = Load(replicas=4, blocks=19_264, rate=14.0, warm_up=30.0, seconds=210.0)
"""No two prompts begin alike. Prompts and KV reads take 62% of each replica's time."""

LENGTH_SPREAD = (0.5, 1.5)
"""Outputs, and prompts that share nothing, are between these multiples of their mean, all equally likely.
Only below saturation: the published workload fixes them."""

COLD_SHARE = 0.05
COLD_LENGTHS = (16_000, 32_000)
COLD_SHORT = Shape(groups=0, system=0, questions=0, question=500, output=100)
COLD_RUN = Load(replicas=8, blocks=19_264, rate=48.0, warm_up=20.0, seconds=100.0)
"""Short and cold prompts together have 1,675 tokens on average; they and KV reads take 70% of the time."""

BURST = 64
BURST_SECONDS = 5e-3
BURST_REPLICAS = 4
BURST_SHAPE = Shape(groups=BURST, system=6_000, questions=0, question=100, output=64)
BURST_TRIALS = 20

TURNS = 8
CHAT = Shape(groups=20, system=2_000, questions=0, question=2_000, output=200)
CHAT_TURN = 100
"""Tokens that the user adds in each turn after the first."""

CHAT_THINK = (5.0, 15.0)
"""Seconds between the end of an answer and the next turn."""

CHAT_RUN = Load(replicas=8, blocks=19_264, rate=3.0, warm_up=60.0, seconds=150.0)
"""Conversations per second; each has ``TURNS`` turns."""

SCALE = Shape(groups=20, system=6_000, questions=0, question=1_200, output=200)
SCALE_RUN = Load(replicas=4, blocks=19_264, rate=14.0, warm_up=60.0, seconds=120.0)
"""More than two replicas serve, 55% of the time of four; two join after the warm-up."""

SCALE_FIRST = 2
SCALE_LIMIT = 20.0
SCALE_WINDOW = 10.0
"""A share of the requests is taken over so many seconds."""
