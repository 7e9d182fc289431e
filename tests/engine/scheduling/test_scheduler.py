"""Steps from plan to commit, how requests end, failed steps and aborts, with exact values."""

from __future__ import annotations

import pytest
from kv_simulation import EOS, KVSimulation, add, make_request, make_scheduler
from scheduler_steps import run_until_preempted, shape, tokens

from engine.errors import ConfigError
from engine.kv.block_pool import BlockPool, InvariantError
from engine.kv.prefix_index import PrefixIndex
from engine.request import FinishReason, ModelLimits
from engine.scheduling.recovery import Rates, RecoveryMode, RecoveryPolicy
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_config import ModelTraits, SchedulerConfig
from engine.scheduling.sequence import SequenceState


def test_prefill_decode_and_end_of_one_request() -> None:
    scheduler = make_scheduler(16, 4)
    simulation = KVSimulation(4, lambda sequence: 7)
    sequence = add(scheduler, make_request("a", tokens(6), max_tokens=3))
    assert sequence.max_total_tokens == 9
    assert shape(simulation.step(scheduler)) == [("a", 0, 6, True)]
    assert (sequence.computed, sequence.token_ids[-1], sequence.state) == (6, 7, SequenceState.RUNNING)
    assert scheduler.stats().referenced_blocks == 2
    assert shape(simulation.step(scheduler)) == [("a", 6, 1, True)]
    assert shape(simulation.step(scheduler)) == [("a", 7, 1, True)]
    assert simulation.output["a"] == [7, 7, 7]
    assert simulation.ended["a"].finish_reason is FinishReason.LENGTH
    assert not scheduler.has_work()
    stats = scheduler.stats()
    assert (stats.referenced_blocks, stats.cached_blocks, stats.free_blocks) == (0, 2, 14)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.finished[FinishReason.LENGTH]) == (6, 3, 1)


def test_long_prompts_run_in_chunks_and_sample_once() -> None:
    scheduler = make_scheduler(16, 4, token_budget=5)
    simulation = KVSimulation(4)
    scheduler.add(make_request("a", tokens(12), max_tokens=1))
    steps = [shape(simulation.step(scheduler)) for _ in range(3)]
    assert steps == [[("a", 0, 5, False)], [("a", 5, 5, False)], [("a", 10, 2, True)]]
    assert not scheduler.has_work()


def test_a_plan_that_is_not_committed_is_planned_again() -> None:
    scheduler = make_scheduler(16, 4)
    scheduler.add(make_request("a", tokens(6)))
    first = scheduler.schedule()
    assert shape(scheduler.schedule()) == shape(first) == [("a", 0, 6, True)]
    assert scheduler.stats().referenced_blocks == 2
    assert scheduler.stats().prompt_tokens == 6


def test_wrong_commits_are_refused_whole() -> None:
    scheduler = make_scheduler(16, 4)
    sequence = add(scheduler, make_request("a", tokens(6)))
    plan = scheduler.schedule()
    with pytest.raises(InvariantError, match="samples 1 tokens was committed with 0"):
        scheduler.commit(plan, [])
    assert sequence.computed == 0
    scheduler.commit(plan, [1])
    with pytest.raises(InvariantError, match="the plan is stale"):
        scheduler.commit(plan, [1])
    old = scheduler.schedule()
    new = scheduler.schedule()
    with pytest.raises(InvariantError, match="the plan is stale"):
        scheduler.commit(old, [1])
    assert (sequence.computed, len(sequence.token_ids)) == (6, 7)
    scheduler.commit(new, [1])


def run_one(script: list[int], **options: object) -> tuple[list[int], FinishReason | None]:
    scheduler = make_scheduler(16, 4)
    simulation = KVSimulation(4, lambda sequence: script[sequence.num_output_tokens])
    scheduler.add(make_request("a", tokens(3), **options))  # type: ignore[arg-type]
    simulation.drain(scheduler)
    return simulation.output["a"], simulation.ended["a"].finish_reason


def test_end_of_sequence_and_stop_tokens_end_and_are_delivered() -> None:
    assert run_one([1, EOS, 2, 2], max_tokens=4) == ([1, EOS], FinishReason.STOP)
    assert run_one([1, 5, 2, 2], max_tokens=4, stop=(5, 6)) == ([1, 5], FinishReason.STOP)
    assert run_one([1, 2, 3, EOS], max_tokens=4) == ([1, 2, 3, EOS], FinishReason.STOP)
    assert run_one([EOS, EOS, 5], max_tokens=4, ignore_eos=True, stop=(5,)) == (
        [EOS, EOS, 5],
        FinishReason.STOP,
    )
    assert run_one([EOS] * 4, max_tokens=4, ignore_eos=True) == ([EOS] * 4, FinishReason.LENGTH)


def test_min_tokens_holds_off_every_stop_token() -> None:
    assert run_one([EOS, 5, EOS, 5], max_tokens=4, min_tokens=2, stop=(5,)) == (
        [EOS, 5, EOS],
        FinishReason.STOP,
    )
    assert run_one([EOS, 5, EOS, 5], max_tokens=4, min_tokens=3, stop=(5,)) == (
        [EOS, 5, EOS, 5],
        FinishReason.STOP,
    )
    assert run_one([EOS, EOS], max_tokens=2, min_tokens=2) == ([EOS, EOS], FinishReason.LENGTH)


def test_one_token_ends_in_the_prefill_step() -> None:
    scheduler = make_scheduler(16, 4)
    simulation = KVSimulation(4)
    scheduler.add(make_request("a", tokens(8), max_tokens=1))
    assert simulation.drain(scheduler) == 1
    assert simulation.ended["a"].finish_reason is FinishReason.LENGTH
    assert len(simulation.output["a"]) == 1


def test_without_max_tokens_the_context_length_or_the_pool_ends_it() -> None:
    for num_blocks, max_model_len, length in [(16, 20, 20), (3, 4096, 12)]:
        scheduler = make_scheduler(num_blocks, 4, max_model_len=max_model_len)
        simulation = KVSimulation(4, lambda sequence: 7)
        sequence = add(scheduler, make_request("a", tokens(5), max_tokens=None))
        simulation.drain(scheduler)
        assert len(sequence.token_ids) == sequence.max_total_tokens == length
        assert sequence.finish_reason is FinishReason.LENGTH


def test_a_request_that_moved_here_goes_on_counting() -> None:
    scheduler = make_scheduler(16, 4)
    sequence = add(scheduler, make_request("a", tokens(5), max_tokens=4, generated_before=2, min_tokens=3))
    assert sequence.max_total_tokens == 7
    deltas = []
    while scheduler.has_work():
        deltas += scheduler.commit(scheduler.schedule(), [EOS])
    assert [(delta.index, delta.token_ids, delta.finish_reason) for delta in deltas] == [
        (2, (EOS,), None),
        (3, (EOS,), FinishReason.STOP),
    ]


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs is 0"):
        make_scheduler(max_num_seqs=0)
    with pytest.raises(ConfigError, match="token_budget is 0"):
        make_scheduler(token_budget=0)
    pool = BlockPool(4, 4)
    with pytest.raises(ConfigError, match="limits name 8 blocks"):
        Scheduler(
            pool,
            PrefixIndex(pool),
            RecoveryPolicy(RecoveryMode.RECOMPUTE, 4, Rates()),
            ModelTraits(ModelLimits(50, 100, 8, 4)),
            SchedulerConfig(max_num_seqs=1, token_budget=1),
        )


def test_what_a_lost_step_wrote_is_never_found() -> None:
    scheduler = make_scheduler(16, 4, token_budget=8)
    simulation = KVSimulation(4)
    scheduler.add(make_request("bad", tokens(14)))
    simulation.step(scheduler)
    assert scheduler.stats().cached_blocks == 0
    plan = scheduler.schedule()
    assert shape(plan) == [("bad", 8, 6, True)]
    [delta] = scheduler.fail(["bad", "bad", "unknown"], "the step raised")
    assert (delta.finish_reason, delta.error, delta.token_ids) == (FinishReason.ERROR, "the step raised", ())
    stats = scheduler.stats()
    assert (stats.referenced_blocks, stats.cached_blocks, stats.finished[FinishReason.ERROR]) == (0, 2, 1)
    sequence = add(scheduler, make_request("good", tokens(14)))
    simulation.drain(scheduler)
    assert sequence.cached_tokens == 8


def test_the_others_of_a_failed_step_are_committed() -> None:
    scheduler = make_scheduler(16, 4)
    simulation = KVSimulation(4)
    for name in "abc":
        scheduler.add(make_request(name, tokens(3, ord(name)), max_tokens=2))
    plan = scheduler.schedule()
    made = simulation.run(plan)
    simulation.deliver(scheduler.fail(["b"], "no"))
    simulation.deliver(scheduler.commit(plan, made))
    simulation.drain(scheduler)
    assert {name: len(output) for name, output in simulation.output.items()} == {"a": 2, "b": 0, "c": 2}
    assert simulation.ended["b"].error == "no"


def test_abort_in_every_state_frees_everything() -> None:
    scheduler = make_scheduler(6, 4)
    simulation = KVSimulation(4, lambda sequence: 7)
    add(scheduler, make_request("old", tokens(7), 17, arrival=1.0))
    simulation.step(scheduler)
    young = add(scheduler, make_request("young", tokens(6, 20), 9, arrival=2.0))
    scheduler.add(make_request("waits", tokens(6, 30), 9, arrival=3.0))
    run_until_preempted(scheduler, simulation, young)
    stats = scheduler.stats()
    assert (stats.running, stats.preempted, stats.waiting) == (1, 1, 1)
    made = len(simulation.output["young"])
    (delta,) = scheduler.abort("young")
    assert delta is not None
    assert (delta.finish_reason, delta.index, delta.token_ids) == (FinishReason.ABORT, made, ())
    assert scheduler.stats().preempted == 0
    (delta,) = scheduler.abort("waits")
    assert delta is not None
    assert delta.cached_tokens == 0
    assert scheduler.abort("old")
    assert scheduler.abort("old") == []
    assert scheduler.abort("never") == []
    stats = scheduler.stats()
    assert not scheduler.has_work()
    assert (stats.referenced_blocks, stats.finished[FinishReason.ABORT]) == (0, 3)


def test_abort_between_schedule_and_commit_drops_the_token() -> None:
    scheduler = make_scheduler(16, 4)
    for name in "ab":
        scheduler.add(make_request(name, tokens(3, ord(name))))
    plan = scheduler.schedule()
    scheduler.abort("a")
    twin = add(scheduler, make_request("a", tokens(5)))  # the same id again, in the same step
    deltas = scheduler.commit(plan, [1, 2])
    assert [(delta.request_id, delta.token_ids) for delta in deltas] == [("b", (2,))]
    assert (twin.computed, twin.token_ids) == (0, tokens(5))


@pytest.mark.parametrize("fault", ["table", "state", "counter", "list", "order", "computed", "shared"])
def test_check_finds_planted_faults(fault: str) -> None:
    scheduler = make_scheduler(16, 4)
    simulation = KVSimulation(4)
    sequence = add(scheduler, make_request("a", tokens(6)))
    scheduler.add(make_request("b", tokens(6, 20), arrival=2.0))
    simulation.step(scheduler)
    scheduler.check()
    state = scheduler.state
    match fault:
        case "table":
            sequence.block_table = sequence.block_table[:-1]
        case "state":
            sequence.state = SequenceState.WAITING
        case "counter":
            state.num_preempted = 1
        case "list":
            state.waiting.append(state.running[0])
        case "order":
            state.running.reverse()
        case "computed":
            sequence.computed = 9
        case "shared":
            state.running[1].block_table[1] = sequence.block_table[1]
            scheduler.state.pool.share([sequence.block_table[1]])
            scheduler.state.pool.release([3])
    with pytest.raises(InvariantError):
        scheduler.check()
