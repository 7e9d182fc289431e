"""Times in the queue, of prompts and of decoding, each request once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from kv_simulation import KVSimulation, make_request, make_scheduler

from engine.request import RequestStats
from engine.scheduling.scheduler import Scheduler


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def step(
    scheduler: Scheduler, model: KVSimulation, clock: Clock, seconds: float = 1.0
) -> list[RequestStats | None]:
    """One step, which takes ``seconds``; returns the times of all that it makes."""
    plan = scheduler.schedule()
    outcomes = model.run(plan)
    clock.now += seconds
    return [delta.stats for delta in scheduler.commit(plan, outcomes)]


def test_each_part_of_a_request_is_timed() -> None:
    clock = Clock()
    scheduler, model = make_scheduler(token_budget=8, clock=clock), KVSimulation(4)
    scheduler.add(replace(make_request("a", list(range(20)), max_tokens=4), arrival=97.0))
    told = [step(scheduler, model, clock) for _ in range(6)]  # three for the prompt; the last makes a token
    assert not scheduler.has_work()
    # With the first token, and again at the end, as the histograms have them.
    assert told == [[], [], [RequestStats(3.0, 3.0)], [None], [None], [RequestStats(3.0, 3.0)]]
    latency = scheduler.stats().latency
    assert latency.queue.totals.sum == 3.0
    assert latency.prefill.totals.sum == 3.0
    assert latency.decode.totals.sum == 3.0
    for histogram in (latency.queue, latency.prefill, latency.decode):
        assert sum(histogram.totals.counts) == 1


def test_a_request_for_several_sequences_counts_once() -> None:
    clock = Clock()
    scheduler, model = make_scheduler(num_blocks=64, clock=clock), KVSimulation(4)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=3, n=3))
    while scheduler.has_work():
        step(scheduler, model, clock)
    latency = scheduler.stats().latency
    assert [sum(h.totals.counts) for h in (latency.queue, latency.prefill, latency.decode)] == [1, 1, 1]


def test_an_output_of_one_token_decodes_for_no_time() -> None:
    clock = Clock()
    scheduler, model = make_scheduler(clock=clock), KVSimulation(4)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=1))
    assert step(scheduler, model, clock) == [RequestStats(99.0, 1.0)]
    latency = scheduler.stats().latency
    assert (sum(latency.decode.totals.counts), latency.decode.totals.sum) == (1, 0.0)


def test_what_is_cut_short_has_no_time_of_decoding() -> None:
    clock = Clock()
    scheduler, model = make_scheduler(clock=clock, token_budget=8), KVSimulation(4)
    scheduler.add(make_request("begun", [1, 2, 3], max_tokens=9))
    step(scheduler, model, clock)
    scheduler.abort("begun")
    scheduler.add(make_request("prompt", list(range(20)), max_tokens=9))
    step(scheduler, model, clock)
    scheduler.abort("prompt")
    scheduler.add(make_request("c", [4, 5, 6], max_tokens=1))
    step(scheduler, model, clock)
    latency = scheduler.stats().latency
    assert sum(latency.queue.totals.counts) == 3
    assert sum(latency.prefill.totals.counts) == 2
    assert sum(latency.decode.totals.counts) == 1


def test_a_moved_request_waits_from_its_arrival_here() -> None:
    clock = Clock()
    scheduler, model = make_scheduler(clock=clock), KVSimulation(4)
    moved = replace(make_request("a", [1, 2, 3, 4], max_tokens=4), arrival=1.0, generated_before=1)
    scheduler.add(moved)
    clock.now += 2.0
    step(scheduler, model, clock)
    latency = scheduler.stats().latency
    assert latency.queue.totals.sum == 2.0
    assert latency.prefill.totals.sum == 1.0


def test_a_moved_request_for_several_sequences_counts_once_there() -> None:
    clock = Clock()
    scheduler, model = make_scheduler(num_blocks=64, clock=clock), KVSimulation(4)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=4, n=2, outputs=((5,), (6,))))
    step(scheduler, model, clock)
    assert sum(scheduler.stats().latency.queue.totals.counts) == 1


def test_ranked_sequences_tell_their_times_with_the_results() -> None:
    for form in ({"use_beam_search": True, "beam_width": 3}, {"best_of": 3}):
        clock = Clock()
        scheduler, model = make_scheduler(num_blocks=64, clock=clock), KVSimulation(4)
        scheduler.add(make_request("a", [1, 2, 3], max_tokens=4, n=2, **form))
        told: list[RequestStats | None] = []
        while scheduler.has_work():
            told += step(scheduler, model, clock)
        assert told == [RequestStats(99.0, 1.0, generated=12), None]


@pytest.mark.parametrize("form", [{"use_beam_search": True, "beam_width": 3}, {"best_of": 3}])
def test_ranked_sequences_tell_how_many_tokens_they_have(form: dict[str, Any]) -> None:
    clock = Clock()
    scheduler, model = make_scheduler(num_blocks=64, clock=clock), KVSimulation(4)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=30, ignore_eos=True, n=2, **form))
    told: list[RequestStats | None] = []
    while scheduler.has_work():
        told += step(scheduler, model, clock)
    generated = [stats.generated for stats in told if stats is not None]
    assert generated[-1] == 90
    assert len(generated) == 3
    assert all(
        32 <= after - before < 35 for before, after in zip([0, *generated], generated[:-1], strict=False)
    )


def test_preemptions_are_told_at_the_end() -> None:
    clock = Clock()
    scheduler, model = make_scheduler(num_blocks=5, clock=clock), KVSimulation(4)
    for name in "ab":
        scheduler.add(make_request(name, [1, 2, 3, 4], max_tokens=9))
    told: list[RequestStats | None] = []
    while scheduler.has_work():
        told += step(scheduler, model, clock)
    assert [times.preemptions for times in told if times is not None] == [0, 0, 0, 1]
