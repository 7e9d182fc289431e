"""Which sequences run in a step and with how many tokens; preemption and priority."""

from __future__ import annotations

import random
from typing import Any

import pytest
from kv_simulation import EOS, KVSimulation, add, make_request, make_scheduler
from scheduler_steps import shape, tokens

from engine.kv.block_pool import NO_BLOCK
from engine.scheduling.admission import admit_waiting, reserve_bound
from engine.scheduling.preemption import preempt
from engine.scheduling.sequence import Order, SequenceState
from engine.scheduling.state import SchedulerState
from engine.scheduling.step import StepPlan


def test_decode_rows_get_their_token_before_prefill_takes_the_rest() -> None:
    scheduler = make_scheduler(32, 4, token_budget=6)
    simulation = KVSimulation(4, lambda sequence: 7)
    scheduler.add(make_request("prefill", tokens(20, 20), arrival=1.0))
    scheduler.add(make_request("late", tokens(4), arrival=2.0, max_tokens=9))
    scheduler.add(make_request("later", tokens(4, 9), arrival=3.0, max_tokens=9))
    assert shape(simulation.step(scheduler)) == [("prefill", 0, 6, False)]
    for _ in range(2):
        simulation.step(scheduler)
    assert shape(simulation.step(scheduler)) == [("prefill", 18, 2, True), ("late", 0, 4, True)]
    assert shape(simulation.step(scheduler)) == [
        ("prefill", 20, 1, True),
        ("late", 4, 1, True),
        ("later", 0, 4, True),
    ]
    scheduler.add(make_request("first", tokens(20, 5), arrival=0.5))
    assert shape(simulation.step(scheduler)) == [
        ("prefill", 21, 1, True),
        ("late", 5, 1, True),
        ("later", 4, 1, True),
        ("first", 0, 3, False),
    ]
    # Now the oldest of all prefills, and still each decode has its token.
    assert shape(simulation.step(scheduler)) == [
        ("first", 3, 3, False),
        ("prefill", 22, 1, True),
        ("late", 6, 1, True),
        ("later", 5, 1, True),
    ]


def test_a_prompt_takes_longer_steps_only_while_it_is_alone() -> None:
    scheduler = make_scheduler(32, 4, token_budget=6, lone_budget=10)
    simulation = KVSimulation(4, lambda sequence: 7)
    scheduler.add(make_request("long", tokens(50, 20), arrival=1.0))
    assert shape(simulation.step(scheduler)) == [("long", 0, 10, False)]
    scheduler.add(make_request("short", tokens(2), arrival=2.0, max_tokens=2))
    assert shape(simulation.step(scheduler)) == [("long", 10, 4, False), ("short", 0, 2, True)]
    assert shape(simulation.step(scheduler)) == [("long", 14, 5, False), ("short", 2, 1, True)]
    assert shape(simulation.step(scheduler)) == [("long", 19, 10, False)]


def test_max_num_seqs_and_never_more_than_the_budget_can_decode() -> None:
    for max_num_seqs, token_budget in [(2, 16), (16, 2)]:
        scheduler = make_scheduler(16, 4, max_num_seqs=max_num_seqs, token_budget=token_budget)
        simulation = KVSimulation(4)
        for name in "abc":
            scheduler.add(make_request(name, [ord(name) - 97]))
        assert shape(simulation.step(scheduler)) == [("a", 0, 1, True), ("b", 0, 1, True)]
        assert (scheduler.stats().running, scheduler.stats().waiting) == (2, 1)
        simulation.drain(scheduler)


def test_the_last_in_order_is_preempted_and_recovers_with_the_same_tokens() -> None:
    scheduler = make_scheduler(6, 4)
    simulation = KVSimulation(4, lambda sequence: sum(sequence.token_ids) % EOS)
    requests = [
        make_request(name, tokens(7, 10 * first), 12, arrival=float(first)) for first, name in enumerate("abc")
    ]
    sequences = [add(scheduler, request) for request in requests]
    alone = KVSimulation(4, simulation.sample)
    for request in requests:
        reference = make_scheduler(6, 4)
        reference.add(make_request(request.request_id, request.token_ids, 12))
        alone.drain(reference)
    preempted = []
    while scheduler.has_work():
        preempted += [sequence.request_id for sequence in simulation.step(scheduler).preempted]
    assert [sequence.num_preemptions for sequence in sequences] == [
        0,
        preempted.count("b"),
        preempted.count("c"),
    ]
    assert preempted
    assert [sequence.cached_tokens for sequence in sequences] == [0, 0, 0]
    assert scheduler.stats().preemptions == len(preempted)
    assert [len(simulation.output[name]) for name in "abc"] == [12, 12, 12]
    assert [simulation.output[name] for name in "abc"] == [alone.output[name] for name in "abc"]


def test_fewer_tokens_are_better_than_a_preemption() -> None:
    scheduler = make_scheduler(12, 4, token_budget=4)
    simulation = KVSimulation(4, lambda sequence: 7)
    young = add(scheduler, make_request("young", tokens(4), 40, arrival=2.0))
    simulation.step(scheduler)
    scheduler.add(make_request("old", tokens(34, 20), 2, arrival=1.0))
    plans = []
    while not young.num_preemptions:
        plans.append(shape(simulation.step(scheduler)))
    # Two of three tokens still fit the last block; only for the third is there a preemption.
    assert plans[-3:] == [
        [("old", 27, 3, False), ("young", 13, 1, True)],
        [("old", 30, 2, False), ("young", 14, 1, True)],
        [("old", 32, 2, True)],
    ]


def test_preempted_requests_find_what_survived() -> None:
    scheduler = make_scheduler(6, 4)
    simulation = KVSimulation(4, lambda sequence: 7)
    scheduler.add(make_request("old", tokens(7), 13, arrival=1.0))
    simulation.step(scheduler)
    young = add(scheduler, make_request("young", tokens(6, 20), 9, arrival=2.0))
    starts = []
    while scheduler.has_work():
        plan = simulation.step(scheduler)
        starts += [chunk.start for chunk in plan.chunks if chunk.sequence is young and chunk.length > 1]
    assert young.num_preemptions == 1
    assert starts == [0, 4]
    assert young.cached_tokens == simulation.ended["young"].cached_tokens == 0


def test_priority_decides_and_takes_blocks_or_a_slot_from_lower_ones() -> None:
    changes: list[dict[str, Any]] = [{"max_num_seqs": 1}, {"num_blocks": 4}, {"token_budget": 1}]
    for options in changes:
        scheduler = make_scheduler(**{"num_blocks": 16, "block_size": 4, **options})
        simulation = KVSimulation(4, lambda sequence: 7)
        low = add(scheduler, make_request("low", tokens(8), 6, arrival=1.0, priority=1))
        simulation.step(scheduler)
        equal = add(scheduler, make_request("equal", tokens(8, 10), 6, arrival=0.5, priority=1))
        assert [chunk.sequence for chunk in simulation.step(scheduler).chunks] == [low]
        high = add(scheduler, make_request("high", tokens(8, 20), 6, arrival=9.0, priority=0))
        plan = simulation.step(scheduler)
        assert plan.preempted == [low]
        assert [chunk.sequence for chunk in plan.chunks] == [high]
        simulation.drain(scheduler)
        assert [low.num_preemptions, equal.num_preemptions, high.num_preemptions] == [1, 0, 0]
        assert list(simulation.ended) == ["high", "equal", "low"]


def test_priority_preempts_nobody_in_vain() -> None:
    scheduler = make_scheduler(6, 4)
    simulation = KVSimulation(4, lambda sequence: 7)
    scheduler.add(make_request("same", tokens(8), 8, arrival=1.0, priority=0))
    scheduler.add(make_request("low", tokens(2, 10), 3, arrival=2.0, priority=1))
    simulation.step(scheduler)
    scheduler.add(make_request("high", tokens(16, 20), 6, arrival=3.0, priority=0))
    assert simulation.step(scheduler).preempted == []


def test_priority_takes_blocks_that_just_suffice() -> None:
    scheduler = make_scheduler(6, 4)
    simulation = KVSimulation(4, lambda sequence: 7)
    scheduler.add(make_request("same", tokens(8), 8, arrival=1.0, priority=0))
    low = add(scheduler, make_request("low", tokens(2, 10), 3, arrival=2.0, priority=1))
    simulation.step(scheduler)
    # Of 2 blocks left and the victim's, one is kept for growth of the first.
    scheduler.add(make_request("high", tokens(6, 20), 2, arrival=3.0, priority=0))
    plan = simulation.step(scheduler)
    assert (plan.preempted, [each.request_id for each in plan.admitted]) == ([low], ["high"])


def test_cached_blocks_that_nobody_holds_are_needed_too() -> None:
    scheduler = make_scheduler(8, 4)
    simulation = KVSimulation(4, lambda sequence: 7)
    scheduler.add(make_request("old", tokens(13), 1))
    simulation.drain(scheduler)
    low = add(scheduler, make_request("low", tokens(14, 20), 4, priority=1))
    simulation.step(scheduler)
    # The new one finds 3 blocks and needs 5; with the free one, 4 are left.
    high = add(scheduler, make_request("high", [*tokens(12), *tokens(5, 30)], 2))
    plan = simulation.step(scheduler)
    assert (plan.preempted, plan.admitted, high.cached_tokens) == ([low], [high], 12)


def test_priority_counts_a_victims_blocks_once() -> None:
    scheduler = make_scheduler(6, 4)
    simulation = KVSimulation(4, lambda sequence: 7)
    scheduler.add(make_request("same", tokens(7, 10), 5, arrival=1.0, priority=0))
    scheduler.add(make_request("low", tokens(7), 5, arrival=2.0, priority=1))
    simulation.step(scheduler)
    # Blocks: 2 for each of them, one kept for growth of the first, one more free. The new one needs 4 and would
    # find one of the victim's: preempting frees one that it does not count on already.
    scheduler.add(make_request("high", [*tokens(4), *tokens(9, 30)], 3, arrival=3.0, priority=0))
    assert simulation.step(scheduler).preempted == []


def test_victims_free_the_blocks_that_only_they_share() -> None:
    """Otherwise a family of forks would seem to free nothing, and the better request would wait for its end."""
    prompt = tokens(24)
    families: list[list[Any]] = [
        [make_request("low", prompt, 30, priority=1, n=4, ignore_eos=True)],
        [  # one system prompt
            make_request(f"low{i}", [*prompt, 30 + i], 30, arrival=1.0 + i, priority=1, ignore_eos=True)
            for i in range(3)
        ],
    ]
    for family in families:
        scheduler = make_scheduler(16, 4, token_budget=32)
        simulation = KVSimulation(4, lambda sequence: 7)
        scheduler.add(make_request("same", [9], 30, priority=0, ignore_eos=True))
        for request in family:
            scheduler.add(request)
            simulation.step(scheduler)
            simulation.step(scheduler)
        assert scheduler.stats().running >= 4
        high = add(scheduler, make_request("high", tokens(36, 20), 4, arrival=99.0, priority=0))
        simulation.step(scheduler)
        assert high.state is SequenceState.RUNNING
        simulation.drain(scheduler)


def test_blocks_that_others_hold_too_are_not_freed_by_victims() -> None:
    scheduler = make_scheduler(12, 4, token_budget=32)
    simulation = KVSimulation(4, lambda sequence: 7)
    prompt = tokens(24)
    for name, priority in [("same", 0), ("low", 2)]:
        scheduler.add(make_request(name, [*prompt, 30 + priority], 15, priority=priority, ignore_eos=True))
        simulation.step(scheduler)
    # Of 12 blocks 6 are shared, and each has one of its own: without the victim 5 are left, one of them kept.
    scheduler.add(make_request("high", tokens(19, 20), 4, arrival=99.0, priority=1))
    assert simulation.step(scheduler).preempted == []


@pytest.mark.parametrize("window", [None, 6])
def test_the_quick_bound_of_the_reserve_is_never_too_low(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    scheduler = make_scheduler(12, 4, max_num_seqs=8, token_budget=12, window=window)
    slack = []

    def checked(state: SchedulerState, plan: StepPlan, before: Order | None = None) -> tuple[int, int]:
        bound = reserve_bound(state, plan)
        slack.append(bound - state.reserve.blocks(state.running))
        return admit_waiting(state, plan, before)

    monkeypatch.setattr("engine.scheduling.scheduler.admit_waiting", checked)
    simulation = KVSimulation(4, lambda sequence: rng.randrange(40), window)
    for number in range(120):
        beams = rng.random() < 0.2
        scheduler.add(
            make_request(
                f"r{number}",
                tokens(rng.randint(1, 20), rng.randrange(40)),
                rng.choice([1, 9]) if beams else rng.choice([1, 9, 20]),
                arrival=1.0 + number,
                n=2 if beams else rng.choice([1, 1, 3]),
                use_beam_search=beams,
            )
        )
        for _ in range(3):
            simulation.step(scheduler)
    simulation.drain(scheduler)
    assert len(slack) > 100
    assert min(slack) >= 0
    assert scheduler.stats().preemptions > 0


def test_a_sequence_that_decodes_has_one_chunk_for_all_steps() -> None:
    scheduler = make_scheduler(16, 4)
    simulation = KVSimulation(4, lambda sequence: 7)
    sequence = add(scheduler, make_request("a", tokens(6), max_tokens=5))
    chunks = [simulation.step(scheduler).chunks[0] for _ in range(5)]
    assert chunks[0] is not chunks[1]
    assert all(chunk is chunks[1] for chunk in chunks[1:])
    assert sequence.token_ids[6:] == [7] * 5
    # A finished sequence drops its chunk: no reference cycle keeps the tokens of ended requests in memory.
    assert sequence.decode_chunk is None


@pytest.mark.parametrize(("recovery", "host_blocks"), [("recompute", 0), ("swap", 40)])
@pytest.mark.parametrize(("width", "max_num_seqs"), [(4, 1), (4, 3), (8, 3)])
def test_more_beams_than_slots_take_turns(
    width: int, max_num_seqs: int, recovery: str, host_blocks: int
) -> None:
    def results(max_num_seqs: int) -> list[list[int]]:
        scheduler = make_scheduler(60, 4, max_num_seqs=max_num_seqs, recovery=recovery, host_blocks=host_blocks)
        simulation = KVSimulation(4)
        scheduler.add(make_request("a", tokens(5), 8, n=width, use_beam_search=True))
        simulation.drain(scheduler)
        return [simulation.output[key] for key in sorted(simulation.output)]

    assert results(max_num_seqs) == results(width)


def test_siblings_behind_a_window_share_their_host_blocks() -> None:
    """A swapped sequence has no host block where its window has left the device's."""
    scheduler = make_scheduler(8, 2, window=3, recovery="swap", host_blocks=8)
    state = scheduler.state
    scheduler.add(make_request("a", tokens(6)))
    KVSimulation(2, window=3).step(scheduler)
    (sequence,) = state.running
    state.block_tables.release_before(sequence, 2)
    preempt(state, 0, StepPlan(8))
    assert sequence.host_table[:2] == [NO_BLOCK, NO_BLOCK]
    state.settle_swaps()
    child = state.fork(sequence, number=1, seed=0)
    assert child.state is SequenceState.SWAPPED
    assert child.host_table == sequence.host_table
    scheduler.check()


def test_what_nobody_sees_is_not_swapped_in() -> None:
    """Its blocks would be given up, and perhaps given to another, in the step that fills them."""
    scheduler = make_scheduler(16, 2, window=3, recovery="swap", host_blocks=16, prefix_caching=False)
    simulation = KVSimulation(2, window=3)
    for number, name in enumerate("ab"):
        scheduler.add(make_request(name, tokens(12, 20 * number), priority=1, ignore_eos=True))
    simulation.step(scheduler)
    scheduler.add(make_request("c", tokens(30), max_tokens=1))
    simulation.step(scheduler)
    assert scheduler.stats().swapped == 2
    plan = simulation.step(scheduler)
    assert {chunk.sequence.request_id for chunk in plan.chunks} == {"a", "b"}
    assert 0 < len(plan.transfers.swap_in) <= 4
    assert {chunk.sequence.state for chunk in plan.chunks} == {SequenceState.RUNNING}
    simulation.drain(scheduler)
    assert scheduler.stats().host_blocks_used == 0


def test_blocks_that_the_window_has_left_are_given_up() -> None:
    scheduler = make_scheduler(16, 2, window=3, prefix_caching=False)
    simulation = KVSimulation(2, window=3)
    scheduler.add(make_request("a", tokens(2), 24, ignore_eos=True))
    held = set()
    while scheduler.has_work():
        simulation.step(scheduler)
        held.add(scheduler.stats().referenced_blocks)
    assert held == {0, 1, 2}
