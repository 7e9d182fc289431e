"""Speculation: guessed tokens run as further rows of a step, and those that the model would have made stay.

A step computes the rows of a sequence's last token and of its *drafts*, guesses of what follows. Each row draws
its token as it would without speculation, from its own logits, seed and position. While the token drawn equals
the next draft, the next row has seen the right tokens, so its draw counts, too: verification as in speculative
sampling (Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023; Chen
et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023) for draws that are a
function of seed and position, where accepting needs no chance of its own. So the output is the same, to the
bit where a row's bits do not depend on the other rows.
"""

from __future__ import annotations

from engine.scheduling.prompt_lookup import PromptLookup
from engine.scheduling.sequence import ScheduledChunk, Sequence
from engine.scheduling.state import SchedulerState
from engine.scheduling.step import StepPlan

MAX_DRAFTS = 15
"""Of a sequence in one step, unless the options say less: with its own row, 16."""

MAX_ROWS = 64
"""A step with this many rows gets no drafts, because guessing takes time, too."""


class Speculation:
    """Adds drafts to a step where they are expected to save more than they cost.

    With ``r`` the cost of a row over the fixed cost of a step, a step of ``n`` rows costs ``1 + r * n`` and
    makes ``n`` tokens. A further row pays if it makes a token with a probability of more than the share of the
    rows in the cost, ``r * n / (1 + r * n)``. The probability that all of ``k`` drafts are right is taken as
    the ``k``-th power of the accuracy of the sequence's guesses. So drafts become fewer as the batch grows, and
    there are few or none beside prompts.

    Args:
        max_drafts: of a sequence in one step.
        row_cost: ``r``.
    """

    def __init__(self, max_drafts: int = MAX_DRAFTS, row_cost: float = 0.0) -> None:
        self.max_drafts = max_drafts
        self.row_cost = row_cost

    def add_drafts(self, state: SchedulerState, plan: StepPlan) -> None:
        """Add drafts to a plan that is complete otherwise: they take only what nothing else needs."""
        rows = plan.num_tokens
        if rows >= MAX_ROWS or plan.out_of_blocks:
            return
        share = self.row_cost * rows / (1.0 + self.row_cost * rows)
        for chunk in plan.chunks:
            room = min(self.max_drafts, plan.budget_left, MAX_ROWS - plan.num_tokens)
            if room <= 0:
                return
            sequence = chunk.sequence
            if chunk is not sequence.decode_chunk or not can_draft(sequence):
                continue
            tokens = sequence.token_ids
            lookup = sequence.lookup
            if lookup is None:
                lookup = sequence.lookup = PromptLookup()
            lookup.read(tokens)
            # The last token that may be made is never the input of a row.
            count = _worthwhile(lookup.accuracy, share, min(room, sequence.max_total_tokens - len(tokens) - 1))
            if not count:
                continue
            drafts = lookup.guess(tokens, count)
            if drafts:
                plan.add_drafts(chunk, drafts[: _room(state, chunk, len(drafts))])


def can_draft(sequence: Sequence) -> bool:
    """Whether a decoding sequence draws one token from each row, by the row's logits and position alone.

    Beams draw nothing, and the first row of a group is drawn from for all its sequences. Grammars, penalties,
    and bad words would have to follow each draft.
    """
    if sequence.grammar is not None or sequence.edits is not None or sequence.prompt_logprobs is not None:
        return False
    group = sequence.group
    return group is None or (group.search is None and group.forked)


def _worthwhile(accuracy: float, share: float, most: int) -> int:
    """Drafts that are all right with a probability above ``share``; at most ``most``."""
    count, probability = 0, accuracy
    while count < most and probability > share:
        count += 1
        probability *= accuracy
    return count


def _room(state: SchedulerState, chunk: ScheduledChunk, wanted: int) -> int:
    """Drafts whose KV has room, at most ``wanted``; takes new blocks only if one is left for every sequence."""
    sequence = chunk.sequence
    covered = sequence.writable - chunk.start - chunk.length
    spare = state.pool.num_available - len(state.running)
    if covered < wanted and spare > 0:
        covered = state.block_tables.extend_further(sequence, chunk.length + wanted, spare) - chunk.length
    return min(covered, wanted)
