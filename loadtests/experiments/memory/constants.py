"""Everything that the memory experiment assumes. Sigma, step times and seeds were fixed before any result.

The published figures are those of Kwon et al., "Efficient Memory Management for Large Language Model Serving
with PagedAttention" (SOSP 2023): OPT-13B on one A100 with 40 GB.
"""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.experiments.simulated_replica import StepCost

POOL_SLOTS = 15_700
"""Tokens whose K and V fit the memory: 12 GB at 800 KB a token (section 6.1)."""

MAX_LENGTH = 2_048
"""Longest sequence, prompt and output together: the model's context length."""

BLOCK_SIZE = 16

SIGMA = 0.75
"""Of the logarithm of both lengths.

Not published, but implied: Orca (Max) reserves 13.3% of memory for later tokens, half an output for each of 7
requests, so their mean output is 2 x 0.133 x 15,700 / 7 = 597. Long outputs stay longer, which multiplies a
log-normal mean by exp(sigma**2): 597 / 338 gives sigma = 0.75.
"""

SEED = 2_309_06180
MAX_NUM_SEQS = 256
TOKEN_BUDGET = 2_560
"""Rows of one step of the paged scheduler: what the published system allowed."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A workload: mean lengths in tokens, and the rate at which its average batch was published."""

    name: str
    prompt: float
    output: float
    published_rate: float  # requests per second


SHAREGPT = Lengths("161/338", 161, 338, 2.0)
ALPACA = Lengths("19/58", 19, 58, 30.0)
WORKLOADS = (SHAREGPT, ALPACA)

SHARED_PREFIXES = (80, 341)
"""Tokens of the translation prompts with one and with five examples (section 6.4)."""

TRANSLATION = Lengths("translation", 30, 30, 0.0)
"""What follows a shared prefix: one sentence, and its translation."""

WIDTHS = (2, 4, 6)

GPU_LIKE = StepCost(
    base=24e-3,
    prefill_token=0.17e-3,
    decode_row=0.29e-3,
    context_token=0.62e-6,
    swapped_block=0.64e-3,
    swap_call=0.1e-3,
)
"""OPT-13B on an A100: 26 GFLOP a prompt token at half the peak of 312 TFLOP/s; 800 KB of KV a token at
1.3 TB/s; 12.8 MB a block over PCIe at 20 GB/s. ``base`` and ``decode_row`` follow from the two average batches
published at a known rate, by Little's law: 30.42 requests at 2/s make a step of 45 ms, 132.44 at 30/s 76 ms.
"""

CPU_LIKE = StepCost(
    base=12e-3,
    prefill_token=1.2e-3,
    decode_row=2.5e-3,
    context_token=4e-6,
    swapped_block=0.15e-3,
    swap_call=0.05e-3,
)
"""A model of 135 million parameters on two cores: 46 KB of KV a token, copied at 5 GB/s."""

PUBLISHED_TOKENS = {"Orca Max": 20.4, "Orca Pow2": 26.8, "Orca Oracle": 38.2}
"""Percent of memory that holds tokens (figure 2)."""

SATURATION_RATE = 4.0
"""Arrivals at saturation, in multiples of the published rate."""

SATURATION_JOBS = {SHAREGPT.name: 1_500, ALPACA.name: 4_000}

SHARING_JOBS = {SHAREGPT.name: 150, ALPACA.name: 600}
SHARING_SEQUENCE_RATE = {SHAREGPT.name: 1.0, ALPACA.name: 12.0}
"""Sequences per second in the sharing runs, low enough that nobody is preempted: a request for ``n`` sequences
comes ``n`` times more seldom."""

PREFIX_JOBS = 2_000
PREFIX_RATE = 120.0  # requests per second: more than any system serves

HOST_SHARE = 4
"""Size of the host pool in the recovery runs, in KV pools."""

RECOVERY_NOISE = 0.3
"""Sigma of the log-normal factor on the time of every step and every copy."""


@dataclass(frozen=True, slots=True)
class Truth:
    """How a machine differs from the recovery policy's calibration: factors on seconds."""

    name: str
    prefill: float = 1.0
    copy: float = 1.0


TRUTHS = (
    Truth("as calibrated"),
    Truth("copies 8x slower", copy=8.0),
    Truth("copies 64x slower", copy=64.0),
    Truth("prompts 3x slower", prefill=3.0),
    Truth("prompts 4x faster", prefill=0.25),
    Truth("prompts 4x faster, copies 64x slower", prefill=0.25, copy=64.0),
)


@dataclass(frozen=True, slots=True)
class RecoveryLoad:
    """A workload of the recovery runs, with a KV pool so small that requests are preempted all the time."""

    name: str
    lengths: Lengths
    requests: int
    slots: int
    prefix: int = 0
    width: int = 1


RECOVERY_LOADS = (
    RecoveryLoad("161/338", SHAREGPT, 200, 4_000),
    RecoveryLoad("19/58", ALPACA, 600, 1_000),
    RecoveryLoad("161/338 after 341 shared", SHAREGPT, 250, 4_000, prefix=341),
    RecoveryLoad("161/338, 4 samples", SHAREGPT, 50, 4_000, width=4),
)
RECOVERY_RATE = 100.0  # requests per second
