"""What the scheduler tells the rest of the engine: one step's work, and its own figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.request import FinishReason, Request
from engine.scheduling.recovery import Decision, RecoveryStats

if TYPE_CHECKING:
    from engine.scheduling.request_table import Entry


@dataclass(slots=True)
class ScheduledChunk:
    """Tokens ``start:start + length`` of one request to run in this step.

    ``request.block_table`` covers them. ``samples`` says that the chunk reaches the end of ``token_ids``, so
    that one token is sampled from its last row. Only the scheduler changes a chunk: it uses that of a sequence
    that decodes again in each step, so a chunk means something until the next step is planned.
    """

    request: Request
    start: int
    length: int
    samples: bool
    entry: Entry | None = None  # the scheduler's own


@dataclass(frozen=True, slots=True)
class Swap:
    """One sequence's part in a step's swaps."""

    decision: Decision
    blocks_out: int
    blocks_in: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """Several tokens from one row of logits, with the log probabilities that the model gave them.

    The draws of a family's first step, one for each sequence; one draw, where sequences are ranked; or the
    likeliest tokens of a beam, best first.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(slots=True)
class Transfers:
    """Block copies that a step begins with, in this order of kinds; pairs are (source, destination).

    Sources hold what the step before left in them: within a kind all sources are read before any
    destination is written. They must be carried out even if the step itself fails.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)  # device block, host block
    copies: list[tuple[int, int]] = field(default_factory=list)  # copy-on-write, both on the device
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # host block, device block

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.copies or self.swap_in)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """How long the parts of a step took, in seconds."""

    compute: float
    swap_out: float = 0.0
    swap_in: float = 0.0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: prefill and decode mixed, oldest running request first, then those admitted now."""

    chunks: list[ScheduledChunk]
    num_tokens: int  # rows of the step
    num_samples: int  # chunks that sample
    transfers: Transfers = field(default_factory=Transfers)
    preempted: list[Request] = field(default_factory=list)  # lost their blocks while the plan was made
    admitted: list[Request] = field(default_factory=list)  # run for the first time
    swaps: list[Swap] = field(default_factory=list)  # whose blocks the transfers move
    prefill: int = 0  # tokens of chunks longer than one
    held_up: int = 0  # waiting sequences that nobody passes: no seat for them, or no blocks for too many


@dataclass(slots=True)  # not frozen: one is made in each step, and that would cost four times as much
class SchedulerStats:
    """Gauges of now and totals since the start; blocks and tokens. Nobody changes it."""

    referenced_blocks: int
    cached_blocks: int
    free_blocks: int
    running: int
    waiting: int  # never admitted yet
    preempted: int  # admitted before, waiting to compute their KV again
    swapped: int  # admitted before, waiting with their KV in host blocks
    prompt_tokens: int  # of admitted requests
    generated_tokens: int
    prefix_query_tokens: int  # prompt tokens looked up at first admission
    prefix_hit_tokens: int  # of those, found
    preemptions: int
    host_blocks: int
    host_blocks_used: int
    copied_blocks: int  # by copy-on-write
    recovery: RecoveryStats
    finished: dict[FinishReason, int]  # sequences
    arrived_tokens: float = 0.0  # of prompts that ever came, without what their prefixes are expected to spare
    remaining_output: float = 0.0  # tokens that a running sequence is expected to get still
    running_limit: int = 0  # tokens that the running sequences may come to together
