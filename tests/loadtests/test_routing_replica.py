"""The simulated replica against cases worked out by hand."""

from __future__ import annotations

import inspect

import pytest

from engine.scheduling import admission, growth_reserve
from engine.scheduling.scheduler import Scheduler
from loadtests.experiments.routing import replica as simulated
from loadtests.experiments.routing.arms import report
from loadtests.experiments.routing.constants import Service
from loadtests.experiments.routing.replica import Replica
from loadtests.experiments.routing.row import Row
from loadtests.experiments.routing.workloads import Job, Prompt, Source

SERVICE = Service(prefill_rate=1_000.0, base=0.1, row=0.01, kv_token=0.001)


def make(blocks: int = 64, budget: int = 64, seqs: int = 8) -> Replica:
    return Replica("r", blocks, SERVICE, token_budget=budget, max_num_seqs=seqs)


def row(number: int, prompt: Prompt, output: int, arrival: float = 0.0) -> Row:
    return Row(Job(number, arrival, prompt, output, output), 0, number, 1_000 * number)


def drive(replica: Replica, arrivals: list[tuple[float, Row]]) -> float:
    """Deliver rows at their times and run until all have ended; the time of the last step's end."""
    now = 0.0
    pending = sorted(arrivals, key=lambda at: at[0])
    while True:
        plan = replica.current
        if pending and (plan is None or pending[0][0] < plan.end):
            now, arrived = pending.pop(0)
            replica.deliver(arrived, now)
            if plan is None:
                replica.plan(now)
        elif plan is not None:
            now = plan.end
            replica.settle(now)
            replica.plan(now)
        else:
            replica.pool.check([])
            replica.index.check()
            return now


def test_service_adds_up() -> None:
    assert SERVICE.step(50, 2, 30) == pytest.approx(0.1 + 0.05 + 0.02 + 0.03)


def test_steps_in_a_row_read_one_token_more_each() -> None:
    one_by_one = sum(SERVICE.step(0, 3, 100 + 3 * i) for i in range(7))
    assert SERVICE.steps(7, 3, 100) == pytest.approx(one_by_one)


def test_one_request_takes_its_chunks_and_its_steps() -> None:
    replica = make()
    alone = row(1, Source(1).prompt(100), 4)
    drive(replica, [(0.0, alone)])
    first = (0.1 + 0.064) + (0.1 + 0.036)  # chunks of 64 and 36 tokens; the second makes the first token
    assert alone.first == pytest.approx(first)
    decodes = sum(0.1 + 0.01 + 0.001 * length for length in (101, 102, 103))
    assert alone.last == pytest.approx(first + decodes)
    assert (replica.generated, replica.prefilled) == (4, 100)
    assert (replica.query_tokens, replica.hit_tokens) == (100, 0)


def test_a_delivery_cuts_a_run_of_decodes_at_the_end_of_its_step() -> None:
    replica, source = make(), Source(1)
    long, late = row(1, source.prompt(16), 10), row(2, source.prompt(8), 1)
    arrival = 0.116 + 0.2  # the second decode of the first request: 0.127 + 0.128
    drive(replica, [(0.0, long), (arrival, late)])
    began = 0.116 + 0.127 + 0.128
    # A chunk of 8 tokens beside one decode that reads 19 tokens.
    assert late.first == pytest.approx(began + 0.1 + 0.008 + 0.01 + 0.019)
    assert late.last == late.first


def test_cached_blocks_are_not_computed_again() -> None:
    replica, source = make(), Source(1)
    system = source.prompt(48)
    first, second = row(1, source.prompt(16, system), 1), row(2, source.prompt(16, system), 1)
    drive(replica, [(0.0, first), (10.0, second)])
    assert (first.cached, second.cached) == (0, 48)
    assert second.first == pytest.approx(10.0 + 0.1 + 0.016)


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
    replica = make()
    prompt = Source(1).prompt(48)
    drive(replica, [(0.0, row(1, prompt, 1)), (10.0, again := row(2, prompt, 1, 10.0))])
    assert again.cached == 32
    assert replica.prefilled == 48 + 16


def test_siblings_wait_for_a_prefix_in_the_making() -> None:
    replica, source = make(budget=32), Source(1)
    system = source.prompt(64)
    rows = [row(i, source.prompt(4, system), 1) for i in (1, 2, 3)]
    drive(replica, [(0.0, one) for one in rows])
    assert [one.cached for one in rows] == [0, 64, 64]
    assert replica.prefilled == 64 + 3 * 4


def test_decodes_come_before_prompts_in_the_budget() -> None:
    replica, source = make(budget=16), Source(1)
    rows = [row(i, source.prompt(16), 8) for i in (1, 2)]
    drive(replica, [(0.0, one) for one in rows])
    # The second prompt has 15 tokens of its first step, and 1 of the next, beside the first one's decodes.
    first = 0.1 + 0.016
    second = first + (0.1 + 0.015 + 0.01 + 0.017) + (0.1 + 0.001 + 0.01 + 0.018)
    assert rows[1].first == pytest.approx(second)


def test_seats_are_bounded() -> None:
    replica, source = make(seqs=1), Source(1)
    rows = [row(i, source.prompt(16), 3) for i in (1, 2)]
    drive(replica, [(0.0, one) for one in rows])
    assert rows[1].first == pytest.approx(rows[0].last + 0.1 + 0.016)


def test_full_pool_preempts_the_youngest_and_all_end() -> None:
    replica, source = make(blocks=8), Source(1)
    rows = [row(i, source.prompt(30), 60, arrival=i / 1000) for i in (1, 2)]
    drive(replica, [(one.job.arrival, one) for one in rows])
    assert replica.preemptions > 0
    assert rows[0].last < rows[1].last
    assert [one.generated for one in rows] == [60, 60]
    assert replica.waiting_tokens == 0


def test_a_preempted_row_owes_what_it_does_not_find() -> None:
    replica, source = make(blocks=8), Source(1)
    rows = [row(i, source.prompt(30), 60, arrival=i / 1000) for i in (1, 2)]
    for one in rows:
        replica.deliver(one, one.job.arrival)
    now = owed = 0.0
    while rows[0].left:
        plan = replica.plan(now)
        assert plan is not None
        now = plan.end
        replica.settle(now)
        if replica.waiting == [rows[1]]:
            owed = replica.waiting_tokens
            tokens = rows[1].tokens
            found = replica.index.match("root", tokens, len(tokens) - 1)
            assert owed == len(tokens) - 16 * (0 if found is None else found.depth) > 0
    assert owed >= 64 - 2 * 16  # by then the other one has six of the eight blocks


def test_admission_has_the_engines_limits() -> None:
    defaults = inspect.signature(Scheduler.__init__).parameters
    assert (
        defaults["look_ahead"].default,
        defaults["max_overtakes"].default,
    ) == (simulated._LOOK_AHEAD, simulated._MAX_OVERTAKES)
    assert (simulated._MAX_SHARERS, simulated._MAX_GROWTH) == (
        admission._MAX_DEFERRED,
        growth_reserve._MAX_GROWTH,
    )


def test_waiting_tokens_count_each_block_once() -> None:
    replica, source = make(blocks=256), Source(1)
    system = source.prompt(64)
    replica.deliver(row(1, source.prompt(16, system), 1), 0.0)
    assert replica.waiting_tokens == 80
    replica.deliver(row(2, source.prompt(16, system), 1), 0.0)
    assert replica.waiting_tokens == 96
    replica.plan(0.0)
    replica.settle(1.0)
    assert replica.waiting_tokens == 32
    while (plan := replica.plan(1.0)) is not None:
        replica.settle(plan.end)
    assert replica.waiting_tokens == 0


def test_events_tell_what_is_findable() -> None:
    replica, source = make(blocks=16), Source(1)
    known: set[int] = set()
    for number in range(1, 9):
        drive(replica, [(0.0, row(number, source.prompt(96), 20))])
        stored, removed = replica.pool.drain()
        assert not known & set(stored)
        assert set(removed) <= known
        known = (known - set(removed)) | set(stored)
        assert known == set(replica.pool.resident())
        assert len(known) == len(replica.index)


def test_generated_blocks_have_the_keys_that_the_next_turn_asks_for() -> None:
    replica, source = make(), Source(1)
    first = row(1, source.prompt(40), 40)
    drive(replica, [(0.0, first)])
    said = first.tokens[40:]
    follow = source.extend(first.job.prompt.tokens, first.job.prompt.keys, [*said, *source.fresh(20)])
    held = set(replica.pool.resident())
    # 79 of 80 tokens have a KV: the last one was never run.
    assert [key in held for key in follow.keys] == [True] * 4 + [False] * 2


def test_report_says_who_has_no_seat_or_no_blocks() -> None:
    source = Source(1)

    def report_of(replica: Replica) -> tuple[int, int]:
        for number in range(1, 6):
            replica.deliver(row(number, source.prompt(16), 100), 0.0)
        assert report(replica, 0).held_up == 0
        replica.plan(0.0)
        load = report(replica, 0)
        return load.running, load.held_up

    assert report_of(make(blocks=256, seqs=2)) == (2, 3)
    assert report_of(make(blocks=256, budget=32)) == (2, 0)
    assert report_of(make(blocks=8, budget=128))[1] == 0  # a small one would pass them
