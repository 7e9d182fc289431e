"""What the scheduler tells the rest of the engine: one step's work, and its own figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens ``start:start + length`` of one request to run in this step.

    ``request.block_table`` covers them. ``samples`` says that the chunk reaches the end of ``token_ids``, so
    that one token is sampled from its last row.
    """

    request: Request
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: prefill and decode mixed, oldest running request first, then those admitted now."""

    chunks: list[ScheduledChunk]
    preempted: list[Request] = field(default_factory=list)  # lost their blocks while the plan was made
    admitted: list[Request] = field(default_factory=list)  # run for the first time

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges of now and totals since the start; blocks and tokens."""

    referenced_blocks: int
    cached_blocks: int
    free_blocks: int
    running: int
    waiting: int  # never admitted yet
    preempted: int  # admitted before, waiting to recover
    prompt_tokens: int  # of admitted requests
    generated_tokens: int
    prefix_query_tokens: int  # prompt tokens looked up at first admission
    prefix_hit_tokens: int  # of those, found
    preemptions: int
    finished: dict[FinishReason, int]
