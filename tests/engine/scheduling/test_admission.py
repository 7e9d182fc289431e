"""Who is let in, past whom, and with which cached blocks."""

from __future__ import annotations

import zlib

import pytest
from kv_simulation import KVSimulation, add, make_request, make_scheduler
from scheduler_steps import run_until_preempted, shape, tokens

from engine.scheduling import admission
from engine.scheduling.admission import Hits, blocks_needed
from engine.scheduling.sequence import SequenceState

RUNNING = SequenceState.RUNNING


@pytest.mark.parametrize(
    ("length", "cached"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12)]
)
def test_a_prompt_seen_before_hits_all_but_its_last_token(length: int, cached: int) -> None:
    scheduler = make_scheduler(16, 4)
    simulation = KVSimulation(4)
    scheduler.add(make_request("first", tokens(length), max_tokens=4))
    simulation.drain(scheduler)
    sequence = add(scheduler, make_request("second", tokens(length), max_tokens=4))
    plan = simulation.step(scheduler)
    assert shape(plan) == [("second", cached, length - cached, True)]
    simulation.drain(scheduler)
    assert sequence.cached_tokens == simulation.ended["second"].cached_tokens == cached
    assert simulation.output["first"] == simulation.output["second"]
    stats = scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (2 * length, cached)


def test_the_next_turn_hits_the_answer_too() -> None:
    scheduler = make_scheduler(16, 4)
    simulation = KVSimulation(4)
    first = add(scheduler, make_request("first", tokens(6), max_tokens=8))
    simulation.drain(scheduler)
    second = add(scheduler, make_request("second", [*first.token_ids, 1, 2, 3]))
    simulation.drain(scheduler)
    assert second.cached_tokens == 12  # of 14 tokens the last was never run, and only full blocks count


def test_tenants_do_not_share() -> None:
    scheduler = make_scheduler(16, 4)
    simulation = KVSimulation(4)
    for name, salt in [("first", ""), ("second", "x"), ("third", "x")]:
        sequence = add(scheduler, make_request(name, tokens(9), salt=salt))
        simulation.drain(scheduler)
        assert sequence.cached_tokens == (8 if name == "third" else 0)


def test_without_prefix_caching_nothing_is_kept() -> None:
    scheduler = make_scheduler(16, 4, prefix_caching=False)
    simulation = KVSimulation(4)
    for name in "ab":
        sequence = add(scheduler, make_request(name, tokens(9)))
        simulation.drain(scheduler)
        assert sequence.cached_tokens == 0
    stats = scheduler.stats()
    assert (stats.cached_blocks, stats.free_blocks, stats.prefix_query_tokens) == (0, 16, 0)


def test_requests_in_flight_share_what_is_being_computed() -> None:
    scheduler = make_scheduler(64, 4, token_budget=8)
    simulation = KVSimulation(4)
    requests = [make_request(name, [*tokens(16), ord(name) % 40], arrival=float(ord(name))) for name in "abc"]
    other = make_request("z", tokens(4, 30), arrival=999.0)
    sequences = [add(scheduler, request) for request in requests]
    scheduler.add(other)
    # Nobody computes a's blocks again: b and c wait for them, and z is not held up.
    assert shape(simulation.step(scheduler)) == [("a", 0, 4, False), ("z", 0, 4, True)]
    assert shape(simulation.step(scheduler)) == [("a", 4, 7, False), ("z", 4, 1, True)]
    assert shape(simulation.step(scheduler)) == [("a", 11, 6, True), ("z", 5, 1, True)]
    assert shape(simulation.step(scheduler)) == [
        ("a", 17, 1, True),
        ("z", 6, 1, True),
        ("b", 16, 1, True),
        ("c", 16, 1, True),
    ]
    simulation.drain(scheduler)
    assert [sequence.cached_tokens for sequence in sequences] == [0, 16, 16]
    assert scheduler.stats().referenced_blocks == 0


def test_in_flight_sharing_does_not_hold_up_others_or_outlive_the_owner() -> None:
    scheduler = make_scheduler(64, 4, token_budget=8)
    simulation = KVSimulation(4)
    scheduler.add(make_request("a", tokens(7), arrival=1.0))
    scheduler.add(make_request("b", tokens(7), arrival=2.0))
    scheduler.add(make_request("c", tokens(1, 20), arrival=3.0))
    assert shape(simulation.step(scheduler)) == [("a", 0, 7, True), ("c", 0, 1, True)]
    scheduler.abort("a")
    assert shape(simulation.step(scheduler))[1] == ("b", 4, 3, True)  # a's first block stays cached

    scheduler = make_scheduler(64, 4, token_budget=3)
    scheduler.add(make_request("a", tokens(7), arrival=1.0))
    scheduler.add(make_request("b", tokens(7), arrival=2.0))
    plan = scheduler.schedule()
    scheduler.abort("a")
    assert scheduler.commit(plan, []) == []
    assert shape(scheduler.schedule()) == [("b", 0, 3, False)]


def test_only_the_same_block_after_the_same_text_is_waited_for() -> None:
    scheduler = make_scheduler(64, 4, token_budget=64)
    simulation = KVSimulation(4)
    for name, first in [("x", 10), ("y", 20)]:
        scheduler.add(make_request(name, tokens(5, first), 1))
    simulation.drain(scheduler)
    scheduler.add(make_request("after x", [*tokens(4, 10), *tokens(5)], arrival=1.0))
    scheduler.add(make_request("after y", [*tokens(4, 20), *tokens(5)], arrival=2.0))
    scheduler.add(make_request("tenant", [*tokens(4, 10), *tokens(5)], arrival=3.0, salt="t"))
    scheduler.add(make_request("after x too", [*tokens(4, 10), *tokens(5)], arrival=4.0))
    assert shape(simulation.step(scheduler)) == [
        ("after x", 4, 5, True),
        ("after y", 4, 5, True),
        ("tenant", 0, 9, True),
    ]

    scheduler = make_scheduler(64, 4, token_budget=64)
    for salt in ("", "t"):
        scheduler.add(make_request(f"cold{salt}", tokens(5), salt=salt))
    assert len(scheduler.schedule().chunks) == 2


def test_shortage_makes_admission_more_careful() -> None:
    def admitted(shortage: bool) -> bool:
        scheduler = make_scheduler(8, 4)
        simulation = KVSimulation(4, lambda sequence: 7)
        old = add(scheduler, make_request("old", tokens(7), 25, arrival=1.0))
        simulation.step(scheduler)
        if shortage:
            young = add(scheduler, make_request("young", tokens(14, 20), 10, arrival=2.0))
            run_until_preempted(scheduler, simulation, young)
            scheduler.abort("young")
        while len(old.token_ids) < 14:
            simulation.step(scheduler)
        assert len(old.block_table) == 4
        scheduler.add(make_request("new", tokens(8, 30), 1, arrival=3.0))
        return len(simulation.step(scheduler).admitted) == 1

    # Of 4 blocks left the new one needs 3; one, and after a shortage two, are kept for growth.
    assert admitted(shortage=False)
    assert not admitted(shortage=True)


def test_a_head_that_does_not_fit_is_passed_within_bounds_and_then_served() -> None:
    def run(look_ahead: int, max_overtakes: int) -> list[str]:
        scheduler = make_scheduler(8, 4, look_ahead=look_ahead, max_overtakes=max_overtakes, max_num_seqs=3)
        simulation = KVSimulation(4, lambda sequence: 7)
        scheduler.add(make_request("runs", tokens(7), 2, arrival=1.0))
        started = [sequence.request_id for sequence in simulation.step(scheduler).admitted]
        scheduler.add(make_request("large", tokens(25, 20), 2, arrival=2.0))
        small = [make_request(f"s{i}", [30 + i], 4, arrival=3.0 + i) for i in range(6)]
        for request in small:
            scheduler.add(request)
        while scheduler.has_work():
            started += [sequence.request_id for sequence in simulation.step(scheduler).admitted]
        return started[1:]

    every_small = [f"s{i}" for i in range(6)]
    assert run(0, 32) == ["large", *every_small]
    assert run(8, 32) == ["s0", "s1", "s2", "large", "s3", "s4", "s5"]  # s2 has to give way to it
    assert run(8, 2) == ["s0", "s1", "large", "s2", "s3", "s4", "s5"]
    assert run(8, 0) == ["large", *every_small]


def test_a_group_starts_with_the_slots_that_are_free_and_its_other_sequences_get_the_next() -> None:
    scheduler = make_scheduler(64, 4, max_num_seqs=4)
    simulation = KVSimulation(4, lambda sequence: 7)
    for number, name in enumerate("ab"):
        scheduler.add(make_request(name, tokens(5, 10 * number), 20, arrival=float(number)))
    simulation.step(scheduler)
    scheduler.add(make_request("group", tokens(5, 30), 6, arrival=9.0, n=3))
    scheduler.add(make_request("later", tokens(5, 20), 4, arrival=10.0))
    assert [sequence.request_id for sequence in simulation.step(scheduler).admitted] == ["group"]
    assert scheduler.state.num_seqs == 4  # what is free is kept for its forks
    simulation.step(scheduler)
    first, second, third = [scheduler.state.sequences["group", number] for number in range(3)]
    assert (first.state, second.state, third.state) == (RUNNING, RUNNING, SequenceState.PREEMPTED)
    scheduler.abort("a")
    computed = simulation.computed_tokens
    assert simulation.step(scheduler).admitted == []
    assert third.state is RUNNING
    # It shares the prompt's full block, and computes the rest of the prompt and its first token.
    assert first.block_table[0] == second.block_table[0] == third.block_table[0]
    assert simulation.computed_tokens - computed == 3 + 2
    simulation.drain(scheduler)
    assert scheduler.stats().preemptions == 0
    assert [len(simulation.output[name]) for name in ("group", "group#1", "group#2")] == [6, 6, 6]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(
    ("kind", "choices"),
    [({"n": 9}, 9), ({"n": 1, "best_of": 9}, 1), ({"n": 2, "use_beam_search": True, "beam_width": 9}, 2)],
)
def test_a_group_wider_than_all_slots_gives_the_same_results(
    kind: dict[str, object], choices: int, prefix_caching: bool
) -> None:
    def results(max_num_seqs: int) -> list[list[int]]:
        scheduler = make_scheduler(64, 4, max_num_seqs=max_num_seqs, prefix_caching=prefix_caching)
        simulation = KVSimulation(4, lambda sequence: zlib.crc32(bytes(sequence.token_ids)) % 40)
        scheduler.add(make_request("group", tokens(10), 5, ignore_eos=True, **kind))
        simulation.drain(scheduler)
        assert len(simulation.output) == choices
        return list(dict(sorted(simulation.output.items())).values())

    assert results(1) == results(4) == results(16)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_beams_that_lack_slots_take_turns_beside_requests_that_run_on(prefix_caching: bool) -> None:
    scheduler = make_scheduler(128, 4, max_num_seqs=4, prefix_caching=prefix_caching)
    simulation = KVSimulation(4, lambda sequence: 7)
    scheduler.add(make_request("long", tokens(5), 200, arrival=1.0))
    simulation.step(scheduler)
    scheduler.add(make_request("beams", tokens(9, 20), 8, arrival=2.0, n=4, use_beam_search=True))
    for _ in range(8 * 3):
        simulation.step(scheduler)
    assert "beams" in simulation.over
    assert scheduler.state.sequences["long", 0].num_preemptions == 0


def test_a_group_that_is_preempted_before_its_forks_waits_for_all_their_slots_again() -> None:
    scheduler = make_scheduler(64, 4, max_num_seqs=3, token_budget=8)
    simulation = KVSimulation(4, lambda sequence: 7)
    scheduler.add(make_request("old", tokens(5), 20, arrival=1.0))
    simulation.step(scheduler)
    group = add(scheduler, make_request("group", tokens(30, 10), 4, arrival=2.0, priority=1, n=3))
    simulation.step(scheduler)
    assert (group.num_seqs, scheduler.state.num_seqs) == (2, 3)
    for number in range(2):
        scheduler.add(make_request(f"urgent{number}", tokens(3, 30 + number), 4, arrival=3.0))
        simulation.step(scheduler)
    assert (group.num_preemptions, group.num_seqs, scheduler.state.num_waiting) == (2, 3, 3)
    simulation.drain(scheduler)
    assert [len(simulation.output[name]) for name in ("group", "group#1", "group#2")] == [4, 4, 4]


def test_a_group_needs_a_block_for_each_of_its_sequences() -> None:
    scheduler = make_scheduler(8, 4)
    simulation = KVSimulation(4, lambda sequence: 7)
    scheduler.add(make_request("old", tokens(13), 3, arrival=1.0))
    simulation.step(scheduler)
    # Two blocks for its prompt, and one for the first token of each of three forks: one more than there are.
    scheduler.add(make_request("group", tokens(7, 20), 2, arrival=2.0, n=4))
    assert simulation.step(scheduler).admitted == []
    while "old" not in simulation.ended:
        assert simulation.step(scheduler).admitted == []
    assert [sequence.request_id for sequence in simulation.step(scheduler).admitted] == ["group"]


def test_nothing_passes_a_preempted_request_into_blocks_that_it_needs() -> None:
    scheduler = make_scheduler(8, 4)
    simulation = KVSimulation(4, lambda sequence: 7)
    scheduler.add(make_request("old", tokens(7), 25, arrival=1.0))
    simulation.step(scheduler)
    young = add(scheduler, make_request("young", tokens(14, 20), 10, arrival=2.0))
    run_until_preempted(scheduler, simulation, young)
    small = add(scheduler, make_request("small", [39], 1, arrival=3.0))
    simulation.step(scheduler)
    stats = scheduler.stats()
    assert stats.free_blocks + stats.cached_blocks == 4  # enough for the small one, not for both
    assert (stats.preempted, stats.waiting, stats.running) == (1, 1, 1)
    simulation.drain(scheduler)
    assert list(simulation.ended) == ["old", "small", "young"]
    assert small.num_preemptions == 0


@pytest.mark.parametrize("together", [True, False])
def test_each_that_starts_leaves_the_next_less_room(together: bool) -> None:
    for num_blocks in range(10, 20):
        scheduler = make_scheduler(num_blocks, 4, max_num_seqs=10)
        for number in range(10):
            scheduler.add(make_request(f"r{number}", tokens(3, number), 30, arrival=1.0 + number))
            if not together:
                scheduler.schedule()
        scheduler.schedule()
        # A block for each, and one to grow into for each of those before the last.
        assert len(scheduler.state.running) == (num_blocks + 1) // 2


def test_those_that_start_together_share_a_cached_prefix() -> None:
    scheduler = make_scheduler(12, 4)
    simulation = KVSimulation(4)
    scheduler.add(make_request("first", tokens(33), max_tokens=1))
    simulation.drain(scheduler)
    for name in "ab":
        scheduler.add(make_request(name, [*tokens(32), ord(name) % 40], arrival=float(ord(name)), max_tokens=2))
    assert shape(simulation.step(scheduler)) == [("a", 32, 1, True), ("b", 32, 1, True)]


@pytest.mark.parametrize("recovery", ["recompute", "swap"])
def test_nothing_passes_a_request_in_the_step_that_preempts_it(recovery: str) -> None:
    scheduler = make_scheduler(8, 4, recovery=recovery, host_blocks=8)
    simulation = KVSimulation(4, lambda sequence: 7)
    victim = add(scheduler, make_request("victim", tokens(15), 10, arrival=1.0, priority=1))
    simulation.step(scheduler)
    scheduler.add(make_request("first", tokens(17, 20), 4, arrival=2.0, priority=0))
    scheduler.add(make_request("small", [39], 4, arrival=3.0, priority=2))
    plan = simulation.step(scheduler)
    assert plan.preempted == [victim]
    assert [sequence.request_id for sequence in plan.admitted] == ["first"]  # it leaves 3 blocks of 5 needed
    simulation.drain(scheduler)


def test_a_step_matches_a_bounded_number_of_cached_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_MAX_MATCHED", 4)
    scheduler = make_scheduler(64, 4)
    simulation = KVSimulation(4)
    scheduler.add(make_request("first", tokens(33), max_tokens=1))
    simulation.drain(scheduler)
    for name in "abc":
        scheduler.add(make_request(name, [*tokens(32), ord(name) % 40], arrival=float(ord(name)), max_tokens=4))
    assert shape(simulation.step(scheduler)) == [("a", 32, 1, True)]  # it has matched 8 blocks
    assert shape(simulation.step(scheduler)) == [("a", 33, 1, True), ("b", 32, 1, True)]
    assert shape(simulation.step(scheduler))[2:] == [("c", 32, 1, True)]
    simulation.drain(scheduler)


def test_a_step_looks_up_a_bounded_number_of_cached_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_MAX_COUNTED", 10)
    scheduler = make_scheduler(64, 4)
    simulation = KVSimulation(4)
    for first in (0, 20):
        scheduler.add(make_request(f"runs {first}", tokens(33, first), max_tokens=20))
    while scheduler.state.waiting or scheduler.state.running[-1].remaining > 1:
        simulation.step(scheduler)
    one, same, other = (
        add(scheduler, make_request(f"waits {i}", [*tokens(32, first), 1, 2]))
        for i, first in enumerate((0, 0, 20))
    )
    hits = Hits()
    # 35 tokens are 9 blocks, of which 8 are cached and referenced.
    assert [blocks_needed(scheduler.state, sequence, hits) for sequence in (one, same, other)] == [1, 1, 9]
    assert (hits.matched, hits.counted) == (24, 8)
    hits.clear()
    assert blocks_needed(scheduler.state, other, hits) == 1
    assert hits.matched == 24
    simulation.drain(scheduler)
