"""Sequences for tests without a scheduler."""

from __future__ import annotations

from engine.sampling_params import SamplingParams
from engine.scheduling.fair_queue import Account, Level, Ticket
from engine.scheduling.sequence import Sequence, SequenceGroup


def make_sequence(
    tokens: list[int],
    block_table: list[int] | None = None,
    params: SamplingParams | None = None,
    *,
    name: str = "r",
    root: tuple[object, ...] = ("root",),
    group: SequenceGroup | None = None,
    seed: int = 0,
) -> Sequence:
    """A sequence that has its prompt and nothing else."""
    return Sequence(
        name,
        list(tokens),
        params or SamplingParams(),
        priority=0,
        ticket=Ticket(Account(Level(0.0)), name, (0,), arrival=0.0, start=0.0, work=0.0, sequences=1),
        root=root,
        order=(0.0, 0.0, 0.0, name, 0),
        end_token_ids=frozenset(),
        output_start=len(tokens),
        num_prompt_tokens=len(tokens),
        max_total_tokens=len(tokens),
        group=group,
        seed=seed,
        block_table=list(block_table or ()),
    )
