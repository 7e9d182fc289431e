"""Random arrivals, aborts, failures and shortages: every request ends, nothing leaks, every read is its own."""

from __future__ import annotations

import random

import pytest
from kv_simulation import EOS, KVSimulation, add, constant_hash, make_request, make_scheduler, random_prompt
from scheduler_steps import assert_no_idle_budget

from engine.errors import InvalidRequestError
from engine.request import FinishReason
from engine.scheduling.sequence import SequenceState
from engine.scheduling.speculation import Speculation


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
        speculation=Speculation(rng.choice([1, 4, 15])) if seed % 2 else None,
    )
    simulation = KVSimulation(block_size, lambda sequence: rng.choice([0, 0, 1, 1, EOS]))
    capacity = num_blocks * block_size
    sequences = {}
    to_come = 30
    clients = rng.choice([[""], ["a", "b"], ["a", "a", "a", "b"]])
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
                salt=rng.choice(["", "", "salt"]),
                client=rng.choice(clients),
            )
            try:
                sequence = add(scheduler, request)
            except InvalidRequestError:
                assert len(prompt) + (request.params.max_tokens or 1) > capacity
                continue
            sequences[sequence.request_id] = sequence
        if not to_come and not scheduler.has_work():
            break
        oldest = min(
            (s for s in sequences.values() if s.state is SequenceState.RUNNING),
            key=lambda s: s.order,
            default=None,
        )
        not_running = (SequenceState.WAITING, SequenceState.PREEMPTED)
        waiting = [s for s in sequences.values() if s.state in not_running]
        plan = scheduler.schedule()
        assert bool(plan.chunks) == scheduler.has_work()
        assert plan.num_tokens <= token_budget
        assert_no_idle_budget(scheduler, plan)
        assert len({id(chunk.sequence) for chunk in plan.chunks}) == len(plan.chunks) <= max_num_seqs
        if oldest is not None and all(s.order > oldest.order for s in waiting):
            assert oldest not in plan.preempted
        tokens = simulation.run(plan)
        live = [name for name, each in sequences.items() if each.state is not SequenceState.FINISHED]
        if live and rng.random() < 0.05:
            aborted = scheduler.abort(rng.choice(live))
            assert len(aborted) == 1
            simulation.deliver(aborted)
        if plan.chunks and rng.random() < 0.05:
            victim = rng.choice(plan.chunks).sequence.request_id
            simulation.deliver(scheduler.fail([victim], "planted"))
            if rng.random() < 0.5:
                continue  # the step is lost: what it wrote must not be found, and it is planned again
        simulation.deliver(scheduler.commit(plan, tokens))
    else:
        raise AssertionError(f"not done: {scheduler.stats()}")
    stats = scheduler.stats()
    assert set(simulation.ended) == set(sequences)
    assert stats.referenced_blocks == stats.running == stats.waiting == stats.preempted == 0
    assert stats.cached_blocks + stats.free_blocks == num_blocks
    assert sum(stats.finished.values()) == len(sequences)
    assert stats.preemptions == sum(sequence.num_preemptions for sequence in sequences.values())
    assert stats.generated_tokens == sum(map(len, simulation.output.values()))
    assert stats.prefix_hit_tokens == sum(
        sequence.cached_tokens or 0 for sequence in sequences.values()
    ) or not (prefix_caching)
    for name, sequence in sequences.items():
        reason = simulation.ended[name].finish_reason
        assert sequence.finish_reason is reason
        assert sequence.token_ids[sequence.num_prompt_tokens :] == simulation.output[name]
        if reason is FinishReason.STOP:
            assert simulation.output[name][-1] == EOS
        if reason is FinishReason.LENGTH:
            assert len(sequence.token_ids) == sequence.max_total_tokens
