"""One step's work, and how long it took."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from engine.kv.transfers import Transfers
from engine.scheduling.recovery import RecoveryDecision
from engine.scheduling.sequence import ScheduledChunk, Sequence


@dataclass(frozen=True, slots=True)
class Swap:
    """One sequence's part in a step's swaps."""

    decision: RecoveryDecision
    blocks_out: int
    blocks_in: int


@dataclass(frozen=True, slots=True)
class StepTiming:
    """How long the parts of a step took, in seconds."""

    compute: float
    swap_out: float = 0.0
    swap_in: float = 0.0


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step, prefill and decode mixed: running sequences in their order, then those admitted now.

    ``schedule()`` fills it in; it is read-only afterwards.
    """

    token_budget: int
    chunks: list[ScheduledChunk] = field(default_factory=list)
    transfers: Transfers = field(default_factory=Transfers)
    swaps: list[Swap] = field(default_factory=list)  # whose blocks the transfers move
    preempted: list[Sequence] = field(default_factory=list)  # lost their blocks while the plan was made
    admitted: list[Sequence] = field(default_factory=list)  # run for the first time
    prefilling: list[Sequence] = field(default_factory=list)  # had more than one token left to compute
    prefill_tokens: int = 0  # of these, in this step
    out_of_blocks: bool = False  # so that the running sequences could not all grow
    num_blocked: int = 0  # waiting sequences that no newcomer can overtake: the engine is full
    num_lacking: int = 0  # sequences that lack slots or blocks, including those passed over
    drafted_tokens: int = 0  # drafts that ran; known, as the next, once the step is committed
    accepted_tokens: int = 0  # of these, those that were right
    _extra_tokens: int = 0  # of all chunks, beyond one of each
    _num_without_sample: int = 0  # chunks that end before their sequences do

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return len(self.chunks) + self._extra_tokens

    @property
    def num_samples(self) -> int:
        """Chunks that sample."""
        return len(self.chunks) - self._num_without_sample

    @property
    def budget_left(self) -> int:
        """Tokens that can still be added."""
        return self.token_budget - len(self.chunks) - self._extra_tokens

    def add(self, sequence: Sequence, length: int) -> None:
        """Run the next ``length`` tokens of a sequence whose block table covers them."""
        start = sequence.computed
        remaining = len(sequence.token_ids) - start
        if remaining > 1:
            self.prefilling.append(sequence)
            self.prefill_tokens += length
        self.chunks.append(ScheduledChunk(sequence, start, length, length == remaining))
        self._extra_tokens += length - 1
        self._num_without_sample += length < remaining

    def add_drafts(self, chunk: ScheduledChunk, drafts: abc.Sequence[int]) -> None:
        """Run ``drafts`` behind a chunk that samples; the block table covers them."""
        chunk.drafts = drafts
        self._extra_tokens += len(drafts)

    def lengthen(self, chunk: ScheduledChunk, length: int) -> None:
        """Run ``length`` tokens in a chunk that does not reach the end yet; the block table covers them."""
        more = length - chunk.length
        chunk.length = length
        chunk.samples = chunk.start + length == len(chunk.sequence.token_ids)
        self.prefill_tokens += more
        self._extra_tokens += more
        self._num_without_sample -= chunk.samples
