"""Keeps the logits that requests saw, to the bit, and computes those of a plain forward."""

from __future__ import annotations

import random
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from tiny_engines import add, made, make_request, run_to_end

from engine.engine import Engine
from engine.kv.kv_cache import KVCache
from engine.request import Request, TokenDelta
from engine.scheduling.sequence import Sequence

PROMPT = random.Random(0).choices(range(2, 97), k=37)
TOKENS = 12
SAMPLING: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 5,
    "max_tokens": TOKENS,
    "ignore_eos": True,
}


@dataclass(frozen=True)
class Row:
    """What one sequence saw after ``tokens``: logits ``[vocab]``."""

    tokens: tuple[int, ...]
    logits: torch.Tensor


Bits = dict[tuple[str, int, int], Row]  # by request, sequence and position of the token that was sampled
Alone = Callable[..., tuple[list[int], Bits]]
"""Of a model's name: the target's tokens and logits, cold, in one chunk, without company."""


def target(name: str = "target", prompt: list[int] = PROMPT, **params: Any) -> Request:
    return make_request(name, prompt, **{**SAMPLING, **params})


def record(engine: Engine, *names: str) -> Bits:
    """From now on keep all logits of the requests called ``names``."""
    seen: Bits = {}

    def keep(sequences: abc.Sequence[Sequence], logits: torch.Tensor) -> None:
        for sequence, row in zip(sequences, logits, strict=True):
            if sequence.request_id in names:
                key = (*sequence.key, len(sequence.token_ids))
                assert key not in seen, f"{key} was sampled twice"
                seen[key] = Row(tuple(sequence.token_ids), row.clone())

    engine.runner.on_logits = keep
    return seen


def run(engine: Engine, *others: Request, **params: Any) -> tuple[list[int], Bits]:
    """The target's tokens and logits in company of ``others``, which are older; ``params`` are the target's."""
    seen = record(engine, "target")
    tokens = made(run_to_end(engine, *others, target(**params))["target"])
    return tokens, seen


def same_bits(a: Row, b: Row) -> bool:
    return a.tokens == b.tokens and torch.equal(a.logits.view(torch.int32), b.logits.view(torch.int32))


def assert_same(a: tuple[list[int], Bits], b: tuple[list[int], Bits]) -> None:
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    for key, row in a[1].items():
        assert same_bits(row, b[1][key]), f"position {key[-1]}"


def assert_plain(engine: Engine, seen: Bits) -> None:
    """Every row must be that of one forward over its tokens alone, all at once, in a cache of its own."""
    assert seen
    runner = engine.runner
    size = engine.limits.block_size
    longest = max(len(row.tokens) for row in seen.values())
    cache = KVCache(runner.model, -(-longest // size), size, runner.dtype, runner.device)
    with torch.inference_mode():
        for key, row in seen.items():
            logits = runner.forward_alone(list(row.tokens), cache)[0]
            assert same_bits(row, Row(row.tokens, logits)), key


def others(count: int, seed: int = 1) -> list[Request]:
    rng = random.Random(seed)
    prompts = [rng.choices(range(2, 97), k=rng.randint(1, 40)) for _ in range(count)]
    return [
        make_request(f"other{index:02d}", prompt, max_tokens=rng.randint(1, 20), temperature=0.7)
        for index, prompt in enumerate(prompts)
    ]


def run_interrupted(engine: Engine, request: Request, urgent: int, after: int = 4) -> list[TokenDelta]:
    """Run ``request``; ``after`` steps a more urgent one of ``urgent`` tokens comes and takes its blocks."""
    deltas = []
    engine.add(request)
    prompt = random.Random(3).choices(range(2, 97), k=urgent)
    interruption = replace(make_request("urgent", prompt, max_tokens=5), priority=-1)
    urgent_sequence: Sequence | None = None
    step = 0
    while engine.has_work():
        if step == after:
            urgent_sequence = add(engine, interruption)
        step += 1
        deltas += [delta for delta in engine.step() if delta.request_id == request.request_id]
    assert urgent_sequence is not None
    assert urgent_sequence.num_preemptions == 0
    return deltas


def run_preempting(engine: Engine) -> Bits:
    """Each request is preempted by the next, and their blocks are handed on at once."""
    names = [f"request{number}" for number in range(6)]
    seen = record(engine, *names)
    for number, name in enumerate(names):
        request = make_request(name, PROMPT[number:] + PROMPT[:number], max_tokens=14, ignore_eos=True)
        engine.add(replace(request, priority=-number))
        for _ in range(3):
            engine.step()
    while engine.has_work():
        engine.step()
    assert len(seen) == 6 * 14
    return seen
