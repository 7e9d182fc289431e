"""Random arrivals, aborts, failures and shortages: every request ends, nothing leaks, every read is its own."""

from __future__ import annotations

import random

import pytest
from kv_simulation import EOS, KVSimulation, constant_hash, make_request, make_scheduler, random_prompt

from engine.errors import InvalidRequestError
from engine.request import FinishReason, RequestState


@pytest.mark.parametrize("hash_tokens", [hash, constant_hash], ids=["hash", "constant"])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize(
    ("num_blocks", "block_size", "max_num_seqs", "token_budget"),
    [(3, 1, 2, 3), (3, 4, 3, 8), (5, 2, 4, 4), (8, 4, 8, 16), (12, 3, 6, 64), (40, 4, 16, 24)],
)
@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends(
    seed: int,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    token_budget: int,
    prefix_caching: bool,
    hash_tokens: object,
) -> None:
    rng = random.Random(f"{seed}/{num_blocks}/{block_size}")
    scheduler = make_scheduler(
        num_blocks,
        block_size,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        prefix_caching=prefix_caching,
        hash_tokens=constant_hash if hash_tokens is constant_hash else hash,
        look_ahead=rng.choice([0, 2, 8]),
        max_overtakes=rng.choice([1, 32]),
    )
    simulation = KVSimulation(block_size, lambda request: rng.choice([0, 0, 1, 1, EOS]))
    capacity = num_blocks * block_size
    requests = {}
    to_come = 30
    for _ in range(5_000):
        while to_come and rng.random() < 0.5:
            to_come -= 1
            prompt = random_prompt(rng, capacity)
            request = make_request(
                f"r{to_come}",
                prompt,
                rng.choice([None, rng.randint(1, capacity)]),
                arrival=rng.choice([1.0, 2.0, 3.0]),
                priority=rng.choice([0, 0, 0, 1]),
                salt=rng.choice(["", "", "tenant"]),
            )
            try:
                scheduler.add(request)
            except InvalidRequestError:
                assert len(prompt) + (request.params.max_tokens or 1) > capacity
                continue
            requests[request.request_id] = request
        if not to_come and not scheduler.has_work():
            break
        oldest = min(
            (r for r in requests.values() if r.state is RequestState.RUNNING),
            key=lambda r: (r.priority, r.arrival, r.request_id),
            default=None,
        )
        waiting = [r for r in requests.values() if r.state in (RequestState.WAITING, RequestState.PREEMPTED)]
        plan = scheduler.schedule()
        assert bool(plan.chunks) == scheduler.has_work()
        assert plan.num_tokens <= token_budget
        assert len({id(chunk.request) for chunk in plan.chunks}) == len(plan.chunks) <= max_num_seqs
        if oldest is not None and all(r.priority >= oldest.priority for r in waiting):
            assert oldest not in plan.preempted
        tokens = simulation.run(plan)
        live = [name for name, request in requests.items() if request.state is not RequestState.FINISHED]
        if live and rng.random() < 0.05:
            aborted = scheduler.abort(rng.choice(live))
            assert len(aborted) == 1
            simulation.deliver(aborted)
        if plan.chunks and rng.random() < 0.05:
            victim = rng.choice(plan.chunks).request.request_id
            simulation.deliver(scheduler.fail([victim], "planted"))
            if rng.random() < 0.5:
                continue  # the step is lost: what it wrote must not be found, and it is planned again
        simulation.deliver(scheduler.commit(plan, tokens))
    else:
        raise AssertionError(f"not done: {scheduler.stats()}")
    stats = scheduler.stats()
    assert set(simulation.ended) == set(requests)
    assert stats.referenced_blocks == stats.running == stats.waiting == stats.preempted == 0
    assert stats.cached_blocks + stats.free_blocks == num_blocks
    assert sum(stats.finished.values()) == len(requests)
    assert stats.preemptions == sum(request.num_preemptions for request in requests.values())
    assert stats.generated_tokens == sum(map(len, simulation.output.values()))
    assert stats.prefix_hit_tokens == sum(request.cached_tokens or 0 for request in requests.values()) or not (
        prefix_caching
    )
    for name, request in requests.items():
        reason = simulation.ended[name].finish_reason
        assert request.finish_reason is reason
        assert request.token_ids[request.num_prompt_tokens :] == simulation.output[name]
        if reason is FinishReason.STOP:
            assert simulation.output[name][-1] == EOS
        if reason is FinishReason.LENGTH:
            assert len(request.token_ids) == request.max_total_tokens
