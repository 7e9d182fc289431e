"""Float32 logits of a request on a GPU: to the bit those of the request alone, whatever else happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_engines import GPU, gpu_engine
from logit_bits import (
    PROMPT,
    TOKENS,
    Bits,
    assert_plain,
    assert_same,
    others,
    record,
    run,
    run_interrupted,
    target,
)
from model_checkpoints import save_tiny
from tiny_engines import TINY_MODELS, made, make_request, run_to_end

from engine.engine import Engine
from engine.scheduling.recovery import Recovery

pytestmark = [*GPU]

MakeEngine = Callable[..., Engine]
families = pytest.mark.parametrize("model", TINY_MODELS)


@pytest.fixture
def make(tiny_models: dict[str, Path]) -> MakeEngine:
    return lambda model, **options: gpu_engine(tiny_models[model], **options)


@pytest.fixture
def alone(make: MakeEngine) -> Callable[[str], tuple[list[int], Bits]]:
    return lambda model: run(make(model))


Alone = Callable[[str], tuple[list[int], Bits]]


@families
def test_again_and_warm(model: str, make: MakeEngine, alone: Alone) -> None:
    expected = alone(model)
    assert_same(alone(model), expected)
    engine = make(model)
    run_to_end(engine, make_request("first", PROMPT, max_tokens=2))
    seen = record(engine, "target")
    deltas = run_to_end(engine, target())["target"]
    assert deltas[-1].cached_tokens == 36
    assert_same((made(deltas), seen), expected)


@families
@pytest.mark.parametrize("budget", [1, 3, 7, 16, 36])
def test_chunked(model: str, budget: int, make: MakeEngine, alone: Alone) -> None:
    assert_same(run(make(model, token_budget=budget)), alone(model))


@families
@pytest.mark.parametrize("rows", [2, 3, 8, 33, 64])
def test_among_others(model: str, rows: int, make: MakeEngine, alone: Alone) -> None:
    engine = make(model, num_blocks=1024, token_budget=256, max_num_seqs=64, check_invariants=False)
    assert_same(run(engine, *others(rows - 1)), alone(model))


@families
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_other_block_sizes(model: str, block_size: int, make: MakeEngine, alone: Alone) -> None:
    engine = make(model, block_size=block_size, num_blocks=512, check_invariants=False)
    assert_same(run(engine, *others(5)), alone(model))


@families
@pytest.mark.parametrize("recovery", list(Recovery))
def test_after_preemption(model: str, recovery: Recovery, make: MakeEngine, alone: Alone) -> None:
    swap = {"swap_space": 1 << 20, "prefix_caching": False} if recovery is Recovery.SWAP else {}
    engine = make(model, num_blocks=13, recovery=recovery.value, **swap)
    seen = record(engine, "target")
    tokens = made(run_interrupted(engine, target(), urgent=37))
    assert engine.stats().scheduler.preemptions > 0
    assert engine.stats().scheduler.recovery.finished[recovery] > 0
    assert_same((tokens, seen), alone(model))


@families
def test_forked_sequences_and_beams(model: str, make: MakeEngine) -> None:
    engine = make(model)
    seen = record(engine, "target")
    run_to_end(engine, target(n=4))
    assert engine.stats().scheduler.copied_blocks == 3
    assert len(seen) == 1 + 4 * (TOKENS - 1)
    assert_plain(engine, seen)
    engine = make(model)
    seen = record(engine, "beams")
    beams = {"n": 2, "use_beam_search": True, "beam_width": 4, "max_tokens": TOKENS, "ignore_eos": True}
    run_to_end(engine, make_request("beams", PROMPT, **beams))
    assert_plain(engine, seen)


def test_long_contexts_that_are_split(tmp_path: Path) -> None:
    """Over 2,000 tokens, where attention is cut into splits, whole and in chunks, alone and in company."""
    save_tiny(tmp_path, "Llama", max_position_embeddings=4096)
    prompt = random.Random(2).choices(range(2, 97), k=2070)
    options = {"block_size": 16, "num_blocks": 256, "check_invariants": False}
    whole = run(gpu_engine(tmp_path, token_budget=4096, **options), prompt=prompt)
    for budget, company in ((500, 0), (333, 5)):
        engine = gpu_engine(tmp_path, token_budget=budget, **options)
        assert_same(run(engine, *others(company), prompt=prompt), whole)


@families
def test_the_cpu_makes_the_same_tokens(model: str, make: MakeEngine) -> None:
    """Nearly the same logits, so the same likeliest tokens."""
    prompts = [PROMPT, PROMPT[::-1], PROMPT[5:9]]
    tokens = []
    for device in ("cuda", "cpu"):
        engine = make(model, device=device)
        requests = [make_request(f"r{number}", prompt, max_tokens=20) for number, prompt in enumerate(prompts)]
        tokens.append([made(deltas) for deltas in run_to_end(engine, *requests).values()])
    assert tokens[0] == tokens[1]
