"""What prompts and outputs of the past let expect."""

from __future__ import annotations

import pytest
from kv_simulation import KVSimulation, add, make_request, make_scheduler

from engine.request import FinishReason, Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.workload_stats import FIRST_OUTPUT, WINDOW, WorkloadStats


def run(scheduler: Scheduler, model: KVSimulation, request: Request) -> None:
    scheduler.add(request)
    while scheduler.has_work():
        plan = scheduler.schedule()
        scheduler.commit(plan, model.run(plan))


def ended(workload: WorkloadStats, tokens: int, reason: FinishReason = FinishReason.LENGTH) -> None:
    sequence = add(make_scheduler(), make_request("x", [1, 2, 3]))
    sequence.token_ids += [7] * tokens
    workload.ended(sequence, reason)


def test_all_of_a_prompt_arrives_while_nothing_is_known_of_hits() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", list(range(20))))
    assert scheduler.stats().arrived_tokens == 20


def test_what_prefixes_spare_does_not_arrive() -> None:
    scheduler, model = make_scheduler(num_blocks=64), KVSimulation(4)
    for number in range(200):
        run(scheduler, model, make_request(f"r{number}", [*range(16), 20 + number % 20, 1, 2, 3], max_tokens=1))
    before = scheduler.stats().arrived_tokens
    run(scheduler, model, make_request("last", [*range(16), 1, 2, 3, 4], max_tokens=1))
    came = scheduler.stats().arrived_tokens - before
    assert came == pytest.approx(20 * 4 / 20, rel=0.1)
    stats = scheduler.stats()
    computed = stats.prefix_query_tokens - stats.prefix_hit_tokens
    assert stats.arrived_tokens == pytest.approx(computed, rel=0.2)


def test_without_a_cache_all_of_each_prompt_arrives() -> None:
    scheduler, model = make_scheduler(num_blocks=64, prefix_caching=False), KVSimulation(4)
    for number in range(10):
        run(scheduler, model, make_request(f"r{number}", list(range(20)), max_tokens=1))
    assert scheduler.stats().arrived_tokens == 200


def test_arrivals_that_wait_count_and_those_that_leave_stay_counted() -> None:
    scheduler = make_scheduler(num_blocks=16, max_num_seqs=1)
    for number in range(5):
        scheduler.add(make_request(f"r{number}", [number] * 20))
    scheduler.schedule()
    assert scheduler.stats().arrived_tokens == 100
    for number in range(5):
        scheduler.abort(f"r{number}")
    assert scheduler.stats().arrived_tokens == 100


def test_a_moved_request_brings_all_its_tokens() -> None:
    workload = WorkloadStats()
    workload.arrived(make_request("a", [1] * 10))
    workload.arrived(make_request("b", [1] * 10, outputs=((1, 2, 3), None, (4,))))
    assert workload.arrived_tokens == 24


def test_remaining_output_before_any_has_ended() -> None:
    assert WorkloadStats().remaining_output == FIRST_OUTPUT


def test_of_equally_long_outputs_half_remains() -> None:
    workload = WorkloadStats()
    for _ in range(10 * WINDOW):
        ended(workload, 100)
    assert workload.remaining_output == pytest.approx(50, rel=0.01)


def test_of_unequal_outputs_more_remains() -> None:
    workload = WorkloadStats()
    for number in range(10 * WINDOW):
        ended(workload, 10 if number % 2 else 190)
    # One in two has 190 tokens, but 95% of those that run at some moment do.
    assert workload.remaining_output == pytest.approx((10**2 + 190**2) / (2 * 200), rel=0.05)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_what_was_cut_short_says_nothing(reason: FinishReason) -> None:
    workload = WorkloadStats()
    for _ in range(100):
        ended(workload, 1, reason)
    assert workload.remaining_output == FIRST_OUTPUT


def test_running_sequences_may_come_to_their_limits() -> None:
    scheduler, model = make_scheduler(num_blocks=64, max_num_seqs=2), KVSimulation(4)
    for number in range(3):
        scheduler.add(make_request(f"r{number}", [number] * 6, max_tokens=4, ignore_eos=True))
    assert scheduler.stats().running_limit == 0
    plan = scheduler.schedule()
    scheduler.commit(plan, model.run(plan))
    assert scheduler.stats().running_limit == 2 * 10
    scheduler.abort("r0")
    assert scheduler.stats().running_limit == 10
    while scheduler.has_work():
        plan = scheduler.schedule()
        scheduler.commit(plan, model.run(plan))
    assert scheduler.stats().running_limit == 0
