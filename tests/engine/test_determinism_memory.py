"""Bit for bit the same logits, whatever is done with the memory that a request's KV lies in.

Swapped out and in, forked, searched with beams, shared with a request that is still computing it, freed behind
a sliding window, found behind one: float32 logits are those of the request run alone, or of one plain forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from logit_bits import (
    PROMPT,
    TOKENS,
    Alone,
    assert_plain,
    assert_same,
    record,
    run,
    run_interrupted,
    run_preempting,
    same_bits,
    target,
)
from tiny_engines import TINY_MODELS, add, made, make_request, run_to_end

from engine.engine import Engine
from engine.kv.block_pool import NO_BLOCK
from engine.request import Request, TokenDelta
from engine.scheduling.recovery import Recovery
from engine.scheduling.step import StepPlan
from engine.seeds import sequence_seed
from kernels.cpu.build import BuildError, find_compilers

try:
    find_compilers()
except BuildError as error:
    pytest.skip(f"only the CPU kernels promise this: {error}", allow_module_level=True)

MakeEngine = Callable[..., Engine]

families = pytest.mark.parametrize("model", TINY_MODELS)
recoveries = pytest.mark.parametrize("recovery", list(Recovery))

SEQUENCES = 4
ROOM = 30  # blocks: enough for the sequences alone, not for an urgent request beside them
URGENT = 100  # its tokens


def memory_engine(make_engine: MakeEngine, model: str, recovery: Recovery, **options: Any) -> Engine:
    """It has room on the host only if it is to swap."""
    if recovery is Recovery.SWAP:
        options = {"recovery": "swap", "swap_space": 1 << 20, **options}
    else:
        options = {"recovery": "recompute", **options}
    return make_engine(model, **options)


def keep_plans(engine: Engine) -> list[StepPlan]:
    """All plans from now on."""
    schedule, plans = engine.scheduler.schedule, []

    def kept() -> StepPlan:
        plans.append(schedule())
        return plans[-1]

    engine.scheduler.schedule = kept  # type: ignore[method-assign]
    return plans


def recovered_only_by(engine: Engine, recovery: Recovery) -> bool:
    finished = engine.stats().scheduler.recovery.finished
    return finished[recovery] > 0 and sum(finished.values()) == finished[recovery]


def by_sequence(deltas: list[TokenDelta]) -> list[list[int]]:
    sequences: dict[int, list[TokenDelta]] = defaultdict(list)
    for delta in deltas:
        sequences[delta.sequence].append(delta)
    return [made(sequences[sequence]) for sequence in sorted(sequences)]


def left_nothing(engine: Engine) -> bool:
    stats = engine.stats().scheduler
    return (stats.referenced_blocks, stats.host_blocks_used) == (0, 0)


@families
def test_after_swap(model: str, make_engine: MakeEngine, alone: Alone) -> None:
    engine = memory_engine(make_engine, model, Recovery.SWAP, num_blocks=13, prefix_caching=False)
    plans = keep_plans(engine)
    seen = record(engine, "target")
    tokens = made(run_interrupted(engine, target(), urgent=37))
    assert engine.stats().scheduler.preemptions > 0
    assert recovered_only_by(engine, Recovery.SWAP)
    out, back = (sum(len(getattr(plan.transfers, kind)) for plan in plans) for kind in ("swap_out", "swap_in"))
    assert out == back > 2
    assert_same((tokens, seen), alone(model))
    assert left_nothing(engine)


@families
def test_after_many_swaps_among_others(model: str, make_engine: MakeEngine) -> None:
    """Each request is preempted by the next: whose host blocks are whose must not be mixed up."""
    engine = memory_engine(make_engine, model, Recovery.SWAP, num_blocks=17, token_budget=48)
    seen = run_preempting(engine)
    assert engine.stats().scheduler.preemptions >= 4
    assert recovered_only_by(engine, Recovery.SWAP)
    assert len(seen) == 6 * 14
    assert_plain(engine, seen)
    assert left_nothing(engine)


def assert_sequences_as_alone(model: str, alone: Alone, deltas: list[TokenDelta], seen: dict[Any, Any]) -> None:
    """Each sequence is the request that draws with the sequence's seed; the first row is that of all."""
    assert len(seen) == 1 + SEQUENCES * (TOKENS - 1)
    for number, tokens in enumerate(by_sequence(deltas)):
        expected, bits = alone(model, sequence_seed(5, number))
        assert expected == tokens
        for (name, _, position), row in bits.items():
            sequence = number if position > len(PROMPT) else 0
            assert same_bits(seen[name, sequence, position], row), (number, position)


@families
def test_forked_sequences(model: str, make_engine: MakeEngine, alone: Alone) -> None:
    engine = make_engine(model)
    seen = record(engine, "target")
    deltas = run_to_end(engine, target(n=SEQUENCES))["target"]
    assert engine.stats().scheduler.copied_blocks == SEQUENCES - 1  # of the prompt's last block, not full
    assert_sequences_as_alone(model, alone, deltas, seen)


@families
@recoveries
def test_forked_sequences_after_preemption(
    model: str, recovery: Recovery, make_engine: MakeEngine, alone: Alone
) -> None:
    engine = memory_engine(make_engine, model, recovery, num_blocks=ROOM, token_budget=96)
    plans = keep_plans(engine)
    seen = record(engine, "target")
    deltas = run_interrupted(engine, target(n=SEQUENCES), urgent=URGENT)
    assert recovered_only_by(engine, recovery)
    if recovery is Recovery.SWAP:
        swapped = [swap for plan in plans for swap in plan.swaps if swap.blocks_out]
        assert len(swapped) > 1
        assert any(swap.blocks_out < swap.decision.blocks for swap in swapped), "siblings share host blocks"
    assert_sequences_as_alone(model, alone, deltas, seen)
    assert left_nothing(engine)


def search(**params: Any) -> Request:
    beams = {"n": 2, "use_beam_search": True, "beam_width": SEQUENCES, "max_tokens": TOKENS, "ignore_eos": True}
    return make_request("target", PROMPT, **{**beams, **params})


@families
def test_beams(model: str, make_engine: MakeEngine) -> None:
    engine = make_engine(model)
    seen = record(engine, "target")
    run_to_end(engine, search())
    assert len(seen) == 1 + SEQUENCES * (TOKENS - 1)
    assert_plain(engine, seen)


@families
@recoveries
def test_beams_after_preemption(model: str, recovery: Recovery, make_engine: MakeEngine) -> None:
    plain = make_engine(model)
    best = by_sequence(run_to_end(plain, search())["target"])
    engine = memory_engine(make_engine, model, recovery, num_blocks=ROOM, token_budget=96)
    seen = record(engine, "target")
    assert by_sequence(run_interrupted(engine, search(), urgent=URGENT)) == best
    assert recovered_only_by(engine, recovery)
    assert_plain(engine, seen)
    assert left_nothing(engine)


@families
def test_a_prompt_that_another_request_is_computing(model: str, make_engine: MakeEngine, alone: Alone) -> None:
    engine = make_engine(model, token_budget=16)
    plans = keep_plans(engine)
    seen = record(engine, "first", "target")
    deltas = run_to_end(engine, target("first"), target())
    assert deltas["target"][0].cached_tokens == 36
    assert sum(plan.num_tokens for plan in plans) == 37 + 1 + 2 * (TOKENS - 1)
    for name in ("first", "target"):
        own = {("target", *key[1:]): row for key, row in seen.items() if key[0] == name}
        assert_same((made(deltas[name]), own), alone(model))


def test_behind_a_sliding_window(make_engine: MakeEngine) -> None:
    engine = make_engine("Mistral", token_budget=8)
    seen = record(engine, "target")
    sequence = add(engine, target(max_tokens=60))
    held = []
    while engine.has_work():
        engine.step()
        held.append(sum(block != NO_BLOCK for block in sequence.block_table))
    assert 0 < max(held) <= 6  # of 25: a window of 11 tokens, a chunk of 8, blocks of 4
    assert len(seen) == 60
    assert_plain(engine, seen)


def test_a_hit_of_which_only_the_window_is_left(make_engine: MakeEngine) -> None:
    engine = make_engine("Mistral", num_blocks=14)
    first = run_to_end(engine, make_request("first", PROMPT, max_tokens=6, ignore_eos=True))["first"]
    # Takes what the first one had freed before its end: all but what its last tokens saw.
    run_to_end(engine, make_request("second", PROMPT[::-1], max_tokens=2))
    assert engine.scheduler.state.index.num_hollow > 3
    prompt = [*PROMPT, *made(first)][:41]
    seen = record(engine, "target")
    deltas = run_to_end(engine, target(prompt=prompt))["target"]
    assert deltas[0].cached_tokens == 40
    assert_same((made(deltas), seen), run(make_engine("Mistral"), prompt=prompt))
