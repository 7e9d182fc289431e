"""What is still to be computed, against a plain count over all tables after every step of the scheduler."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_simulation import KVSimulation, make_request, make_scheduler
from scheduler_operations import CASES, Case, Driver

from engine.scheduling import pending_prefill
from engine.scheduling.pending_prefill import PendingPrefill
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence, SequenceState
from engine.scheduling.step import StepTiming

RUNS = (SequenceState.RUNNING, SequenceState.SWAPPING_IN)


def of(scheduler: Scheduler) -> PendingPrefill:
    return PendingPrefill(scheduler.state)


def counted(scheduler: Scheduler, prefix_caching: bool = True) -> int:
    """All that is to be computed, by sets of whole texts."""
    size = scheduler.state.pool.block_size
    made: set[tuple[Hashable, tuple[int, ...]]] = set()
    wanted: set[tuple[Hashable, tuple[int, ...]]] = set()
    tokens = 0

    def blocks(sequence: Sequence, first: int, most: int) -> Iterator[tuple[Hashable, tuple[int, ...]]]:
        text = tuple(sequence.token_ids)
        return ((sequence.root, text[: (place + 1) * size]) for place in range(first, most // size))

    for sequence in scheduler.state.sequences.values():
        length = len(sequence.token_ids)
        if sequence.state in RUNS or sequence.host_table:
            left = length - sequence.computed
            if left > 1 or sequence.state not in RUNS:
                tokens += left
                made.update(blocks(sequence, sequence.computed // size, length))
        elif prefix_caching:
            node = scheduler.state.index.match(sequence.root, sequence.token_ids, length - 1)
            wanted.update(blocks(sequence, 0 if node is None else node.depth, length - 1))
            tokens += length - (length - 1) // size * size
        else:
            tokens += length
    return tokens + (len(wanted - made) * size if prefix_caching else 0)


def step(scheduler: Scheduler, model: KVSimulation) -> None:
    plan = scheduler.schedule()
    scheduler.commit(plan, model.run(plan), StepTiming(0.01))


class Watched(Driver):
    """Compares after every operation."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__(case, seed)
        self.pending = of(self.scheduler)
        self.most = 0

    def step(self) -> None:
        super().step()
        self.compare()

    def arrive(self) -> None:
        super().arrive()
        if self.rng.random() < 0.5:
            self.compare()

    def compare(self) -> None:
        if len(self.scheduler.state.waiting) > pending_prefill.MAX_REMATCHED:
            self.pending.tokens()
            return
        tokens = self.pending.tokens()
        assert tokens == counted(self.scheduler, self.case.caching)
        self.most = max(self.most, tokens)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.sampled_from(CASES), st.integers(0, 10**6))
def test_pending_prefill_is_what_a_count_over_all_tables_gives(case: Case, seed: int) -> None:
    driver = Watched(case, seed)
    driver.run(150)
    assert driver.most > 0
    driver.simulation.drain(driver.scheduler)
    assert driver.pending.tokens() == 0
    kept = driver.pending
    left = (kept._shares, kept._computing, kept._held, kept._changed, kept._wanted, kept._computed)
    assert not any(left)
    assert kept._own == kept._both == 0


def test_siblings_that_wait_for_one_prefix_count_it_once() -> None:
    scheduler, model = make_scheduler(num_blocks=64, max_num_seqs=1), KVSimulation(4)
    load = of(scheduler)
    for name in range(5):
        scheduler.add(make_request(f"r{name}", [*range(16), 40 + name, 1, 2], max_tokens=2, ignore_eos=True))
    assert load.tokens() == 16 + 5 * 3
    step(scheduler, model)  # the first one has computed it
    assert load.tokens() == 4 * 3


def test_prefix_counts_where_it_is_computed_while_others_wait_for_it() -> None:
    scheduler, model = make_scheduler(num_blocks=64, token_budget=8), KVSimulation(4)
    load = of(scheduler)
    scheduler.add(make_request("a", [*range(22)]))
    step(scheduler, model)
    scheduler.add(make_request("b", [*range(22), 40]))
    assert load.tokens() == 14 + 3  # b finds 20 tokens when a is through
    scheduler.abort("a")
    assert load.tokens() == 15  # 8 of the 23 are cached
    scheduler.reset_prefix_cache()
    assert load.tokens() == 23


def test_equal_texts_of_other_tenants_or_salts_share_nothing() -> None:
    scheduler = make_scheduler(num_blocks=64)
    load = of(scheduler)
    scheduler.add(make_request("a", [*range(10)]))
    scheduler.add(make_request("b", [*range(10)], salt="other"))
    scheduler.add(make_request("c", [*range(10)], salt="other"))
    assert load.tokens() == 10 + 10 + 2


def test_last_block_of_equal_texts_is_computed_by_each() -> None:
    scheduler, model = make_scheduler(num_blocks=64, max_num_seqs=1), KVSimulation(4)
    load = of(scheduler)
    for name in "abc":
        scheduler.add(make_request(name, [*range(12)], max_tokens=1))
    before = model.computed_tokens
    assert load.tokens() == 8 + 3 * 4
    model.drain(scheduler)
    assert model.computed_tokens - before == 8 + 3 * 4


def test_evicted_prefix_is_to_be_computed_again() -> None:
    scheduler, model = make_scheduler(num_blocks=8, max_num_seqs=1), KVSimulation(4)
    load = of(scheduler)
    scheduler.add(make_request("a", [*range(16), 40], max_tokens=1))
    model.drain(scheduler)
    scheduler.add(make_request("b", [30] * 29, max_tokens=1, arrival=1.0))
    scheduler.add(make_request("c", [*range(16), 41], max_tokens=1, arrival=2.0))
    assert load.tokens() == 29 + 1
    step(scheduler, model)
    assert load.tokens() == 17


def test_report_costs_so_many_look_ups_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, model = make_scheduler(num_blocks=2000, max_num_seqs=1, token_budget=64), KVSimulation(4)
    load = of(scheduler)
    count = 5 * pending_prefill.MAX_REMATCHED
    for name in range(count):
        scheduler.add(
            make_request(f"r{name}", [*range(40), 40, name % 50, name // 50], max_tokens=1, arrival=1.0 + name)
        )
    assert load.tokens() == 40 + 3 * count
    step(scheduler, model)
    calls = 0
    match = scheduler.state.index.match

    def counting(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        return match(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(scheduler.state.index, "match", counting)
    left = 3 * (count - 1)
    # The prefix is there; it counts once until all who wait have been asked, and never more than once.
    for _ in range(count // pending_prefill.MAX_REMATCHED - 1):
        calls = 0
        assert load.tokens() == 40 + left
        assert calls == pending_prefill.MAX_REMATCHED
    assert load.tokens() == left
    # Who goes is seen at once.
    scheduler.abort("r77")
    assert load.tokens() == left - 3


def test_report_changes_so_many_blocks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_prefill, "MAX_CHANGED_BLOCKS", 15)
    scheduler, model = make_scheduler(num_blocks=2000, max_num_seqs=1, token_budget=64), KVSimulation(4)
    load = of(scheduler)
    for name in range(9):
        scheduler.add(make_request(f"r{name}", [*range(40), 40 + name], max_tokens=1, arrival=1.0 + name))
    assert load.tokens() == 40 + 9
    step(scheduler, model)
    # Eight find ten blocks each: two of them are worked in each time.
    assert [load.tokens() for _ in range(4)] == [40 + 8, 40 + 8, 40 + 8, 8]


def test_report_hashes_so_many_blocks_of_newcomers_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_prefill, "MAX_NEW_BLOCKS", 15)
    scheduler, model = make_scheduler(num_blocks=2000, max_num_seqs=1, token_budget=64), KVSimulation(4)
    load = of(scheduler)
    for name in range(7):
        scheduler.add(make_request(f"r{name}", [*range(40), 40], max_tokens=1, arrival=1.0 + name))
    # Two of ten blocks each time, the first of which count once; the others count as if they shared nothing.
    assert load.tokens() == 40 + 2 + 5 * 41
    assert load.tokens() == 40 + 4 + 3 * 41
    scheduler.abort("r6")
    assert load.tokens() == 40 + 6
    for name in range(7, 13):
        scheduler.add(make_request(f"r{name}", [*range(40), 40], max_tokens=1, arrival=1.0 + name))
    step(scheduler, model)  # r0 has ended
    assert load.tokens() == 5 + 2 + 4 * 41
    assert load.tokens() == 5 + 4 + 2 * 41
    assert load.tokens() == counted(scheduler) == 5 + 6


def test_nothing_is_kept_of_what_comes_and_goes_without_being_asked() -> None:
    scheduler, model = make_scheduler(num_blocks=64), KVSimulation(4)
    load = of(scheduler)
    draw = random.Random(1)
    for name in range(50):
        scheduler.add(make_request(f"r{name}", [draw.randrange(40) for _ in range(12)]))
        model.drain(scheduler)
    assert not load._changed
    assert not load._shares
