"""The live state of the sequences that the scheduler runs: their tokens, block tables and place in a step."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from engine.kv.prefix_node import PrefixNode
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from engine.scheduling.beam_search import BeamSearch
from engine.scheduling.candidates import Candidates
from engine.scheduling.recovery import RecoveryDecision

Order = tuple[float, float, str, int]


class SequenceState(enum.Enum):
    """Where a sequence is; only the scheduler changes it."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # lost its blocks; waits to recompute their KV
    SWAPPING_OUT = "swapping_out"  # lost its blocks in this step, which copies them to the host
    SWAPPED = "swapped"  # its KV is in host blocks; waits to copy it back
    SWAPPING_IN = "swapping_in"  # has blocks that this step fills from the host; runs in the same step
    FINISHED = "finished"


RUNS = (SequenceState.RUNNING, SequenceState.SWAPPING_IN)
"""The states of sequences in the running list."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of a request: ``token_ids`` is the prompt followed by the output.

    A request for several sequences (``params.width`` above 1) runs as one until its prompt is computed; then it
    becomes sequence 0 of its group and the others are forked from it.

    Invariants: ``0 <= computed <= len(token_ids)``; ``block_table`` covers at least ``computed`` tokens; tokens
    below ``computed`` have their K and V in the pool, or in host blocks while swapped out.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    priority: int
    root: tuple[object, ...]  # of its prefix tree
    order: Order  # smaller is older and is served first; kept for life
    end_token_ids: frozenset[int]  # they end it, once it has ``min_tokens``
    output_start: int  # tokens of the prompt, before its output's first one
    num_prompt_tokens: int  # tokens not generated here
    max_total_tokens: int  # the prompt and all tokens that may be generated
    number: int = 0  # in its group; no two sequences of a request have the same
    group: SequenceGroup | None = None  # of a request for several sequences
    seed: int = 0  # of its random draws
    num_seqs: int = 1  # sequences that it counts for against ``max_num_seqs``: more until its group is forked

    state: SequenceState = SequenceState.WAITING
    computed: int = 0  # tokens whose KV is computed
    block_table: list[int] = field(default_factory=list)  # logical to physical block
    host_table: list[int] = field(default_factory=list)  # the same for host blocks, while swapped out
    writable: int = 0  # tokens up to which its table can be written without asking the pool
    node: PrefixNode | None = None  # running: of its last indexed block; waiting: where the next match starts
    indexed: int = 0  # leading blocks that the prefix index has been given
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache at first admission
    overtakes: int = 0  # admissions past it while it did not fit
    num_preemptions: int = 0
    decision: RecoveryDecision | None = None  # of a recovery that is not complete
    candidates: Candidates | None = None  # a beam's; it is held until all beams of its group have theirs
    logprob: float = 0.0  # sum over the output's tokens; only kept where sequences are ranked
    decode_chunk: ScheduledChunk | None = None  # its chunk of one token, made once for all its decode steps
    finish_reason: FinishReason | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What names a live sequence: no two have the same."""
        return (self.request_id, self.number)

    @property
    def remaining(self) -> int:
        """Tokens still to be computed."""
        return len(self.token_ids) - self.computed

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated here."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_generated(self) -> int:
        """Tokens generated in all, on earlier replicas too."""
        return len(self.token_ids) - self.output_start


@dataclass(slots=True)
class ScheduledChunk:
    """Tokens ``start:start + length`` of one sequence to run in this step.

    ``sequence.block_table`` covers them. ``samples`` says that the chunk reaches the end of ``token_ids``, so
    that one token is sampled from its last row. Only the scheduler changes a chunk: it uses that of a decoding
    sequence in every step, so a chunk is valid until the next step is planned.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence of a ranked group; ``score`` decides its rank, higher is better."""

    token_ids: tuple[int, ...]
    score: float
    reason: FinishReason


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The live sequences of one request for several, by number, and the finished ones that are to be ranked.

    ``search`` is set for beam search. ``forked`` says that the prompt's first tokens have been drawn, so that
    all sequences exist.
    """

    request_id: str
    params: SamplingParams
    search: BeamSearch | None
    seed: int = 0  # the request's; each further sequence draws with one of its own
    sequences: dict[int, Sequence] = field(default_factory=dict)
    finished: list[Hypothesis] = field(default_factory=list)
    forked: bool = False
    next_number: int = 1  # numbers are never used twice

    def best(self) -> list[Hypothesis]:
        """The ``n`` finished sequences with the highest scores, best first; equal scores keep their order."""
        return sorted(self.finished, key=lambda hypothesis: -hypothesis.score)[: self.params.n]
