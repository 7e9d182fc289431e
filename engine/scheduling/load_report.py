"""How busy an engine is: what it reports to routers and the autoscaler after each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.scheduling.pending_prefill import PendingPrefill
from engine.scheduling.slot_ends import Running, SlotEnds, slot_ends
from engine.scheduling.state import SchedulerState
from engine.scheduling.step import StepPlan

ENDS_EVERY_S = 0.05
"""The ends of running sequences are expected anew after so much time in steps, because that takes its time."""

DECODE_AGE_S = 60.0
"""After so much time in steps, the last one that only decoded says nothing of now."""

SCARCE = 1 / 8
"""With less of the pool free or evictable, a new request may have to wait for blocks."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Work and blocks of one engine as of the end of a step."""

    waiting_tokens: int  # to compute before all that is here decodes; shared blocks count once
    running: int  # sequences
    kv_tokens: int  # that the running ones read in each step
    referenced: int  # blocks
    free: int
    evictable: int
    prefill_rate: float  # tokens per second, measured at start; 0 if it was not
    step_seconds: float  # of the last step that only decoded, for a token of each; 0 if that was long ago
    waiting: int  # sequences that do not run: never did, or were preempted; all that their requests want
    num_blocked: int  # of those, how many no newcomer can overtake, for want of sequence slots or blocks
    num_lacking: int  # of those, how many wait for want of slots or blocks: some of them may be overtaken
    max_running: int  # sequences at once
    first_end: float  # see ``SlotEnds``; these three are 0 where there is room for all, and where unknown
    half_ended: float
    all_ended: float


class LoadReporter:
    """Reads the scheduler's state after each step; belongs to the engine's thread."""

    def __init__(self, state: SchedulerState, *, prefill_rate: float) -> None:
        self._state = state
        self._pending_prefill = PendingPrefill(state)
        self._prefill_rate = prefill_rate
        self._step_seconds = 0.0
        self._decode_age_s = 0.0  # seconds of steps since one that only decoded
        self._num_blocked = self._num_lacking = 0
        self._ends, self._ends_age_s = SlotEnds(), math.inf

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """A step has been run and committed; one whose drafts were right made more than a token of each."""
        self._num_blocked, self._num_lacking = plan.num_blocked, plan.num_lacking
        self._ends_age_s += seconds
        self._decode_age_s += seconds
        if not plan.prefill_tokens and not plan.transfers:
            made = len(plan.chunks)
            self._step_seconds, self._decode_age_s = seconds * made / (made + plan.accepted_tokens), 0.0
        elif self._decode_age_s > DECODE_AGE_S:
            self._step_seconds = 0.0

    def read(self) -> EngineLoad:
        """The load now; 50 ns for each running sequence, and what the pending prefill costs.

        Where slots or blocks are scarce, expected ends cost 0.2 ms or more, at most every :data:`ENDS_EVERY_S`.
        """
        state, pool = self._state, self._state.pool
        ends = self._expected_ends()
        return EngineLoad(
            waiting_tokens=self._pending_prefill.tokens(),
            running=len(state.running),
            kv_tokens=sum([sequence.computed for sequence in state.running]),
            referenced=pool.num_referenced,
            free=pool.num_free,
            evictable=pool.num_cached,
            prefill_rate=self._prefill_rate,
            step_seconds=self._step_seconds,
            waiting=state.num_waiting,
            num_blocked=min(self._num_blocked, state.num_waiting),
            num_lacking=min(self._num_lacking, state.num_waiting),
            max_running=state.max_num_seqs,
            first_end=ends.first,
            half_ended=ends.half,
            all_ended=ends.all,
        )

    def _expected_ends(self) -> SlotEnds:
        state, pool = self._state, self._state.pool
        full = state.num_seqs + state.num_waiting >= state.max_num_seqs
        if not full and pool.num_available > SCARCE * (pool.num_free + pool.num_cached + pool.num_referenced):
            self._ends, self._ends_age_s = SlotEnds(), math.inf
        elif self._ends_age_s >= ENDS_EVERY_S:
            running = [
                Running(each.num_generated, max(each.max_total_tokens - len(each.token_ids), 1))
                for each in state.running
            ]
            state.output_lengths.adapt(len(running))
            following = state.waiting[: len(running)]
            limits = [each.max_total_tokens - each.output_start for each in following]
            self._ends, self._ends_age_s = slot_ends(running, state.output_lengths, limits), 0.0
        return self._ends
