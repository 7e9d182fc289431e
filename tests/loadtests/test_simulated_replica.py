"""The simulated replica against steps worked out by hand; what it runs is the engine's own scheduler."""

from __future__ import annotations

import itertools

import pytest

from engine.request import CacheNamespace, Request, TokenDelta
from engine.sampling_params import SamplingParams
from loadtests.experiments.simulated_replica import ReplicaConfig, SimulatedReplica, StepCost, key_scheme

COST = StepCost(base=0.1, prefill_token=0.001, decode_row=0.01, context_token=0.001)


def make(blocks: int = 64, budget: int = 64, seqs: int = 8) -> SimulatedReplica:
    return SimulatedReplica(ReplicaConfig(COST, blocks, 16, budget, max_num_seqs=seqs, kv_events=True))


def request(number: int, tokens: list[int], output: int, arrival: float = 0.0) -> Request:
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return Request(str(number), list(tokens), params, arrival=arrival + 1e-9)


def own(number: int, count: int) -> list[int]:
    return list(range(1_000 * number, 1_000 * number + count))


def drive(replica: SimulatedReplica, *requests: Request) -> dict[str, list[tuple[float, TokenDelta]]]:
    """Add requests when they arrive and run until all have ended; each one's deltas with their times."""
    now, sampled = 0.0, itertools.count(2**31)
    coming = sorted(requests, key=lambda one: one.arrival)
    made: dict[str, list[tuple[float, TokenDelta]]] = {one.request_id: [] for one in requests}
    while True:
        while coming and coming[0].arrival <= now + 1e-6:
            replica.add(coming.pop(0))
        seconds = replica.begin_step()
        if seconds is None:
            if not coming:
                replica.scheduler.check()
                return made
            now = coming[0].arrival
            continue
        now += seconds
        assert replica.plan is not None
        for delta in replica.end_step(list(itertools.islice(sampled, replica.plan.num_samples))):
            made.setdefault(delta.request_id, []).append((now, delta))


def test_a_step_takes_the_time_of_its_work() -> None:
    assert COST.step(50, 2, 30) == pytest.approx(0.1 + 0.05 + 0.02 + 0.03)
    scaled = StepCost(1.0, 0.5, 0.25, 0.125, 2.0, 4.0).scaled(3, 5)
    assert scaled == StepCost(1.0, 1.5, 0.25, 0.125, 10.0, 20.0)


def test_one_request_takes_its_chunks_and_its_steps() -> None:
    times = [at for at, _ in drive(make(), request(1, own(1, 100), 4))["1"]]
    first = (0.1 + 0.064) + (0.1 + 0.036)  # chunks of 64 and 36 tokens; the second makes the first token
    decodes = [0.1 + 0.01 + 0.001 * context for context in (100, 101, 102)]
    assert times == pytest.approx(list(itertools.accumulate([first, *decodes])))


def test_a_request_that_comes_during_a_step_is_in_the_next_one() -> None:
    replica = make()
    replica.add(request(1, own(1, 16), 10))
    assert replica.begin_step() == pytest.approx(0.116)
    replica.add(request(2, own(2, 8), 1))
    replica.end_step([7])
    assert replica.begin_step() == pytest.approx(0.1 + 0.008 + 0.01 + 0.016)


def test_cached_blocks_are_not_computed_again() -> None:
    replica, system = make(), own(9, 48)
    first, second = (request(n, [*system, *own(n, 16)], 1, arrival=10.0 * n) for n in (1, 2))
    made = drive(replica, first, second)
    assert [made[name][0][1].cached_tokens for name in ("1", "2")] == [0, 48]
    assert made["2"][0][0] == pytest.approx(20.0 + 0.1 + 0.016)


def test_decodes_come_before_prompts_in_the_budget() -> None:
    made = drive(make(budget=16), *(request(n, own(n, 16), 8) for n in (1, 2)))
    # The second prompt has 15 tokens of its first step, and 1 of the next, beside the first one's decodes.
    second = 0.116 + (0.1 + 0.015 + 0.01 + 0.016) + (0.1 + 0.01 + 0.015 + 0.01 + 0.017)
    assert made["2"][0][0] == pytest.approx(second)  # a chunk of one token counts as a decode


def test_full_pool_preempts_the_youngest_and_all_end() -> None:
    replica = make(blocks=8)
    made = drive(replica, *(request(n, own(n, 30), 60, arrival=n / 1000) for n in (1, 2)))
    assert replica.scheduler.stats().preemptions > 0
    assert made["1"][-1][0] < made["2"][-1][0]
    assert [len(deltas) for deltas in made.values()] == [60, 60]


def test_copies_take_time() -> None:
    cost = StepCost(1.0, 0.0, 0.0, 0.0, swapped_block=2.0, swap_call=4.0)
    replica = SimulatedReplica(ReplicaConfig(cost, 4, 32, 64))
    assert replica._copy(0) == 0.0
    assert replica._copy(3) == 4.0 + 3 * 2.0 * 2  # blocks of 32 tokens are twice those that the cost is about


def test_load_counts_each_block_once_until_it_is_computed() -> None:
    replica, system = make(blocks=256), own(9, 64)
    replica.add(request(1, [*system, *own(1, 16)], 1))
    assert replica.load().waiting_tokens == 80
    replica.add(request(2, [*system, *own(2, 16)], 1))
    load = replica.load()
    assert (load.waiting_tokens, load.waiting) == (96, 2)
    assert (load.num_blocks, load.block_size, load.max_running) == (256, 16, 8)
    assert load.prefill_rate == pytest.approx(1_000)
    drive(replica)
    assert replica.load().waiting_tokens == 0


def test_events_tell_the_keys_that_routers_know() -> None:
    replica = make(blocks=16)
    known: set[int] = set()
    for number in range(1, 9):
        drive(replica, request(number, own(number, 96), 20))
        assert replica.kv_events is not None
        batch = replica.kv_events.drain()
        assert batch is not None
        assert set(batch.removed) <= known
        known = (known - set(batch.removed)) | set(batch.stored)
    assert len(known) == batch.count == len(replica.index)
    assert set(key_scheme(16).keys(own(8, 96), CacheNamespace())) <= known
