"""Which drafts a step gets, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
from kv_simulation import KVSimulation, add, make_request, make_scheduler

from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from engine.scheduling.candidates import Candidates
from engine.scheduling.load_report import LoadReporter
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence, SequenceGroup
from engine.scheduling.speculation import MAX_ROWS, Speculation, can_draft
from engine.scheduling.step import StepPlan

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]  # the first token made is 3, so that 4 and so on are the guesses


def decoding(
    speculation: Speculation | None = None, max_tokens: int | None = 40, **options: Any
) -> tuple[Scheduler, Sequence]:
    """One sequence whose next step decodes."""
    scheduler = make_scheduler(speculation=speculation or Speculation(), **{"num_blocks": 64, **options})
    sequence = add(scheduler, make_request("a", PROMPT, max_tokens))
    scheduler.commit(scheduler.schedule(), [3])
    return scheduler, sequence


def drafts(plan: StepPlan) -> list[list[int]]:
    return [list(chunk.drafts) for chunk in plan.chunks]


def test_a_step_has_a_row_for_each_draft() -> None:
    scheduler, sequence = decoding(Speculation(4))
    plan = scheduler.schedule()
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.length, chunk.samples, chunk.drafts) == (10, 1, True, [4, 5, 6, 7])
    assert (chunk.num_rows, plan.num_tokens, plan.num_samples) == (5, 5, 1)
    assert len(sequence.block_table) == 4  # 15 tokens
    assert len(sequence.token_ids) == 11


def test_tokens_that_the_model_would_have_made_stay() -> None:
    scheduler, sequence = decoding(Speculation(4))
    plan = scheduler.schedule()
    (delta,) = scheduler.commit(plan, [(4, 5, 9)])
    assert (delta.index, delta.token_ids, delta.finish_reason) == (1, (4, 5, 9), None)
    assert sequence.token_ids == [*PROMPT, 3, 4, 5, 9]
    assert sequence.computed == 13
    assert sequence.indexed == 3  # 12 tokens: not the block that holds what was rejected
    stats = scheduler.stats()
    assert (stats.drafted_tokens, stats.accepted_tokens, stats.generated_tokens) == (4, 2, 4)


def test_a_step_that_failed_may_be_committed_without_its_drafts() -> None:
    scheduler, sequence = decoding(Speculation(4))
    plan = scheduler.schedule()
    for chunk in plan.chunks:
        chunk.drafts = ()  # as the engine drops them
    scheduler.commit(plan, [4])
    assert (sequence.token_ids[-2:], sequence.computed) == ([3, 4], 11)
    stats = scheduler.stats()
    assert (stats.drafted_tokens, stats.accepted_tokens) == (0, 0)


def test_nothing_comes_after_the_end() -> None:
    scheduler, _ = decoding(Speculation(4))
    plan = scheduler.schedule()
    stop = add(scheduler, make_request("b", PROMPT, 40, stop=(5,)))
    scheduler.commit(plan, [(4,)])
    scheduler.commit(scheduler.schedule(), [5, 3])
    plan = scheduler.schedule()
    index = [chunk.sequence for chunk in plan.chunks].index(stop)
    assert drafts(plan)[index] == [4, 5, 6, 7]
    outcomes: list[Any] = [0, 0]
    outcomes[index] = (4, 5, 6, 7, 8)
    delta = next(delta for delta in scheduler.commit(plan, outcomes) if delta.request_id == "b")
    assert (delta.index, delta.token_ids, delta.finish_reason) == (1, (4, 5), FinishReason.STOP)
    assert delta.final
    assert stop.token_ids == [*PROMPT, 3, 4, 5]


@pytest.mark.parametrize(("max_tokens", "expected"), [(2, []), (3, [4]), (5, [4, 5, 6])])
def test_no_more_drafts_than_tokens_may_come(max_tokens: int, expected: list[int]) -> None:
    scheduler, sequence = decoding(Speculation(15), max_tokens)
    plan = scheduler.schedule()
    assert drafts(plan) == [expected]
    (delta,) = scheduler.commit(plan, [(*expected, 0) if expected else 4])
    assert delta.finish_reason is FinishReason.LENGTH
    assert len(sequence.token_ids) == len(PROMPT) + max_tokens


def test_log_probabilities_come_with_each_token() -> None:
    scheduler, _ = decoding(Speculation(2))
    choices = tuple(Candidates((token,), (-1.0,), (f"detail {token}",)) for token in (4, 5, 9))  # type: ignore[arg-type]
    (delta,) = scheduler.commit(scheduler.schedule(), [choices])
    assert delta.token_ids == (4, 5, 9)
    assert delta.logprobs == ("detail 4", "detail 5", "detail 9")


def test_drafts_take_what_is_left_of_the_budget() -> None:
    scheduler, _ = decoding(Speculation(15), token_budget=12)
    scheduler.add(make_request("b", [20 + number for number in range(8)]))
    plan = scheduler.schedule()
    assert [chunk.length for chunk in plan.chunks] == [1, 8]
    assert drafts(plan) == [[4, 5, 6], []]
    assert plan.budget_left == 0


def test_drafts_take_no_block_that_others_may_need() -> None:
    scheduler, sequence = decoding(Speculation(15), 8, num_blocks=5)
    scheduler.state.pool.allocate(1)
    scheduler._check_invariants = False  # the pool does not know whose that block is
    assert scheduler.state.pool.num_available == 1 == len(scheduler.state.running)
    assert drafts(scheduler.schedule()) == [[4]]  # of 12 tokens that three blocks hold
    assert len(sequence.block_table) == 3


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_block_is_left_for_every_sequence(block_size: int) -> None:
    """Two sequences at a block's end want 15 drafts each: of six blocks that are left, two stay."""
    scheduler = make_scheduler(speculation=Speculation(15), num_blocks=64, block_size=block_size)
    for name, above in (("a", 0), ("b", 20)):
        add(scheduler, make_request(name, [token + above for token in PROMPT], 40))
    scheduler.commit(scheduler.schedule(), [3, 23])
    pool = scheduler.state.pool
    scheduler._check_invariants = False  # the pool does not know whose these blocks are
    pool.allocate(pool.num_available - 6)
    plan = scheduler.schedule()
    assert any(drafts(plan))
    assert pool.num_available >= len(scheduler.state.running) == 2


def test_the_cost_of_rows_decides() -> None:
    """A row costs a fifth of a step: at one row drafts must be right in 1 of 6 cases, at 10 rows in 2 of 3."""
    scheduler, sequence = decoding(Speculation(15, row_cost=0.2))
    assert drafts(scheduler.schedule()) == [[4, 5]]  # 1/2, 1/4; 1/8 is too little
    assert sequence.lookup is not None
    sequence.lookup.accuracy = 0.9
    assert len(scheduler.schedule().chunks[0].drafts) == 15  # 0.9 ** 15 is 0.21
    sequence.lookup.accuracy = 0.1
    assert drafts(scheduler.schedule()) == [[]]
    sequence.lookup.accuracy = 0.6
    scheduler.add(make_request("b", [20 + number for number in range(9)]))
    plan = scheduler.schedule()
    assert plan.num_tokens == 10
    assert drafts(plan) == [[], []]


def test_a_large_step_is_left_alone() -> None:
    scheduler, sequence = decoding(Speculation(15), token_budget=200)
    scheduler.add(make_request("b", [20] * (MAX_ROWS - 1), 1))
    assert drafts(scheduler.schedule()) == [[], []]
    assert sequence.lookup is None  # nor read
    scheduler.abort("b")
    scheduler.add(make_request("c", [20] * (MAX_ROWS - 4), 1))
    assert drafts(scheduler.schedule()) == [[4, 5, 6], []]


def test_a_plan_made_anew_has_its_own_drafts() -> None:
    scheduler, _ = decoding(Speculation(4))
    assert drafts(scheduler.schedule()) == [[4, 5, 6, 7]]
    scheduler.speculation = None
    plan = scheduler.schedule()
    assert drafts(plan) == [[]]
    assert plan.num_tokens == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"grammar": object()},
        {"edits": object()},
        {"prompt_logprobs": object()},
        {"group": SequenceGroup("a", SamplingParams(), search=object(), forked=True)},  # type: ignore[arg-type]
        {"group": SequenceGroup("a", SamplingParams(), search=None)},
    ],
    ids=["grammar", "edits", "prompt_logprobs", "beam", "first of a group"],
)
def test_sequences_whose_draws_depend_on_more_than_logits_have_no_drafts(changes: dict[str, Any]) -> None:
    _, sequence = decoding()
    assert can_draft(sequence)
    for name, value in changes.items():
        setattr(sequence, name, value)
    assert not can_draft(sequence)


def test_each_fork_guesses_for_itself() -> None:
    scheduler = make_scheduler(num_blocks=64, speculation=Speculation(2))
    scheduler.add(make_request("a", PROMPT, 40, n=2))
    scheduler.commit(scheduler.schedule(), [Candidates((3, 9), (-1.0, -1.0))])
    plan = scheduler.schedule()
    assert drafts(plan) == [[4, 5], []]
    deltas = scheduler.commit(plan, [(4, 9), 9])
    assert [(delta.sequence, delta.index, delta.token_ids) for delta in deltas] == [
        (0, 1, (4, 9)),
        (1, 1, (9,)),
    ]


def test_the_time_of_a_step_is_that_of_a_token_of_each_sequence() -> None:
    scheduler, _ = decoding(Speculation(3))
    reporter = LoadReporter(scheduler.state, prefill_rate=1.0)
    lengths = scheduler.state.output_lengths
    before = lengths.clock
    plan = scheduler.schedule()
    scheduler.commit(plan, [(4, 5, 6, 9)])
    reporter.stepped(plan, 0.5)
    assert reporter.read().step_seconds == 0.125
    assert lengths.clock - before == 4.0


def test_rejected_kv_is_not_found() -> None:
    """Another prompt with the drafts that were rejected gets none of their blocks, one with the text all."""
    model = KVSimulation(4, lambda sequence: [3, 4, 5, 0, 0, 0, 0][sequence.num_generated])
    scheduler = make_scheduler(num_blocks=64, speculation=Speculation(15))
    scheduler.add(make_request("a", PROMPT, 7))
    model.drain(scheduler)
    assert scheduler.stats().drafted_tokens > scheduler.stats().accepted_tokens > 0
    wrong = add(scheduler, make_request("wrong", [*PROMPT, 3, 4, 5, 6, 7, 8, 9], 1))
    right = add(scheduler, make_request("right", [*PROMPT, 3, 4, 5, 0, 0, 0, 0], 1))
    model.drain(scheduler)
    assert (wrong.cached_tokens, right.cached_tokens) == (12, 16)
