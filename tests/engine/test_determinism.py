"""A row's logits depend on its tokens alone: bit for bit, whatever else happened.

Every case compares the bits of all logits that a request saw with those of the same request run alone, cold,
with its prompt in one chunk, on one thread. Most are in float32; what the kernels promise holds in each dtype
that their own product computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from leftovers import give_back
from logit_bits import PROMPT, TOKENS, Alone, Bits, assert_same, others, record, run, run_interrupted, target
from model_checkpoints import save_tiny
from tiny_engines import TINY_MODELS, made, make_request, run_to_end, tiny_engine_config

from engine.engine import Engine
from engine.request import Request
from engine.scheduling.recovery import Recovery
from kernels.cpu.build import BuildError, find_compilers
from kernels.cpu.linear import prefers_onednn

try:
    find_compilers()
except BuildError as error:
    pytest.skip(f"only the CPU kernels promise this: {error}", allow_module_level=True)

MakeEngine = Callable[..., Engine]

families = pytest.mark.parametrize("model", TINY_MODELS)


@families
def test_warm(model: str, make_engine: MakeEngine, alone: Alone) -> None:
    engine = make_engine(model)
    run_to_end(engine, make_request("first", PROMPT, max_tokens=2))
    seen = record(engine, "target")
    deltas = run_to_end(engine, target())["target"]
    assert deltas[-1].cached_tokens == 36
    assert_same((made(deltas), seen), alone(model))


@families
@pytest.mark.parametrize("budget", [1, 3, 7, 16, 36])
def test_chunked(model: str, budget: int, make_engine: MakeEngine, alone: Alone) -> None:
    assert_same(run(make_engine(model, token_budget=budget)), alone(model))


@families
@pytest.mark.parametrize("rows", [2, 3, 4, 8, 33, 64])
def test_among_others(model: str, rows: int, make_engine: MakeEngine, alone: Alone) -> None:
    engine = make_engine(model, num_blocks=1024, token_budget=256, max_num_seqs=64, check_invariants=False)
    assert_same(run(engine, *others(rows - 1)), alone(model))


@families
def test_two_threads(model: str, make_engine: MakeEngine, alone: Alone) -> None:
    before = torch.get_num_threads()
    try:
        assert_same(
            run(make_engine(model, num_threads=2, num_blocks=512, check_invariants=False), *others(20)),
            alone(model),
        )
    finally:
        torch.set_num_threads(before)


@families
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_other_block_sizes(model: str, block_size: int, make_engine: MakeEngine, alone: Alone) -> None:
    engine = make_engine(model, block_size=block_size, num_blocks=512, check_invariants=False)
    assert_same(run(engine, *others(5)), alone(model))


@families
def test_after_preemption(model: str, make_engine: MakeEngine, alone: Alone) -> None:
    engine = make_engine(model, num_blocks=13)
    seen = record(engine, "target")
    tokens = made(run_interrupted(engine, target(), urgent=37))
    assert engine.stats().scheduler.preemptions > 0
    assert engine.stats().scheduler.recovery.finished[Recovery.RECOMPUTE] > 0
    assert_same((tokens, seen), alone(model))


@pytest.mark.parametrize("model", [model for model in TINY_MODELS if model != "Mistral"])
def test_after_the_blocks_ran_out(model: str, make_engine: MakeEngine, alone: Alone) -> None:
    """Not of the Mistral model: what its requests need shrinks as they go on."""
    engine = make_engine(model, num_blocks=23)
    seen = record(engine, "target")
    deltas = run_to_end(engine, make_request("older", PROMPT[::-1], max_tokens=30), target())
    assert engine.stats().scheduler.preemptions > 0
    assert_same((made(deltas["target"]), seen), alone(model))


@families
@pytest.mark.parametrize("after", [1, 5, TOKENS - 1])
def test_moved_to_another_replica(model: str, after: int, make_engine: MakeEngine, alone: Alone) -> None:
    tokens, bits = alone(model)
    engine = make_engine(model, token_budget=16)
    seen = record(engine, "target")
    request = replace(target(prompt=PROMPT + tokens[:after]), generated_before=after)
    deltas = run_to_end(engine, request, *others(3))["target"]
    assert deltas[0].index == after
    assert made(deltas) == tokens[after:]
    rest = {key: row for key, row in bits.items() if key[-1] >= len(PROMPT) + after}
    assert_same((made(deltas), seen), (tokens[after:], rest))


@families
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [("bfloat16", "model"), ("float16", "model"), ("bfloat16", "int4"), ("float32", "int8")],
)
def test_in_fewer_bits(model: str, dtype: str, weights: str, make_engine: MakeEngine) -> None:
    """Warm, in chunks, in company, on two threads, with other blocks, after a preemption."""
    if weights == "model" and prefers_onednn(getattr(torch, dtype)):
        pytest.skip("oneDNN computes the products of this dtype here")

    def engine(**options: Any) -> Engine:
        defaults = {"num_blocks": 512, "token_budget": 256, "check_invariants": False}
        return make_engine(model, dtype=dtype, weights=weights, **{**defaults, **options})

    one = engine()
    cold = run(one)
    assert_same(run(one), cold)
    assert_same(run(engine(token_budget=7)), cold)
    assert_same(run(engine(block_size=5, max_num_seqs=64), *others(40)), cold)
    interrupted = engine(num_blocks=13)
    seen = record(interrupted, "target")
    assert_same((made(run_interrupted(interrupted, target(), urgent=37)), seen), cold)
    assert interrupted.stats().scheduler.preemptions > 0
    before = torch.get_num_threads()
    try:
        assert_same(run(engine(num_threads=2, token_budget=33), *others(20)), cold)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("family", "changes"), [("Llama", {}), ("Gemma2", {"sliding_window": 1200})])
def test_long_contexts_that_are_split(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Over 2,000 tokens, where attention is cut into splits, whole and in chunks, alone and in company."""
    save_tiny(tmp_path, family, max_position_embeddings=4096, **changes)
    prompt = random.Random(2).choices(range(2, 97), k=2070)

    def engine(budget: int, threads: int) -> Engine:
        return Engine(
            tiny_engine_config(
                tmp_path,
                block_size=16,
                num_blocks=256,
                token_budget=budget,
                num_threads=threads,
                check_invariants=False,
            )
        )

    whole = run(engine(4096, 1), prompt=prompt)
    before = torch.get_num_threads()
    try:
        for budget, threads, company in ((500, 2, 0), (333, 1, 5)):
            assert_same(run(engine(budget, threads), *others(company), prompt=prompt), whole)
    finally:
        torch.set_num_threads(before)


def test_the_bundled_model(bundled_model: Path) -> None:
    """Real sizes: 30 layers, 9 heads over 3, a vocabulary of 49,152."""

    def engine(**options: Any) -> Engine:
        defaults = {"block_size": 16, "num_blocks": 64, "token_budget": 256, "check_invariants": False}
        return Engine(tiny_engine_config(bundled_model, **{**defaults, **options}))

    def few(engine: Engine, *company: Request) -> tuple[list[int], Bits]:
        seen = record(engine, "target")
        request = target(prompt=[token * 400 for token in PROMPT], max_tokens=4)
        return made(run_to_end(engine, *company, request)["target"]), seen

    one = engine()
    cold = few(one)
    assert_same(few(one), cold)
    del one  # one model of this size at a time
    give_back()
    before = torch.get_num_threads()
    try:
        assert_same(few(engine(num_threads=2, token_budget=24), *others(6)), cold)
    finally:
        torch.set_num_threads(before)
