"""With drafts or without: the same tokens, log probabilities and bits of logits, whatever else happens."""

from __future__ import annotations

import random
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_engines import make_request

from engine.engine import Engine
from engine.execution.sampler import SampleRow
from engine.request import FinishReason, Request
from engine.scheduling.candidates import Outcome
from engine.scheduling.prompt_lookup import PromptLookup
from engine.scheduling.sequence import ScheduledChunk
from engine.scheduling.speculation import Speculation
from kernels.cpu.build import BuildError, find_compilers

try:
    find_compilers()
except BuildError as error:
    pytest.skip(f"only the CPU kernels promise this: {error}", allow_module_level=True)

MakeEngine = Callable[..., Engine]

Made = dict[tuple[str, int], tuple[list[int], list[float], FinishReason | None]]
"""Tokens, their log probabilities, and how it ended, by request and sequence."""

Seen = dict[tuple[int, int], torch.Tensor]
"""Logits by seed and position: of a row that was rejected, until the right one came."""


def workload(rng: random.Random) -> list[Request]:
    """Prompts that repeat themselves and prompts that do not, with all that may go with drafts."""
    requests = []
    for number in range(8):
        tokens = rng.choices(range(2, 97), k=rng.randint(1, 30))
        if rng.random() < 0.6:
            tokens = (tokens[:8] * 6)[: rng.randint(10, 45)]
        params: dict[str, Any] = {
            "seed": 10 * number,
            "max_tokens": rng.randint(6, 40),
            "temperature": rng.choice([0.0, 0.0, 0.05, 0.8]),
            "ignore_eos": rng.random() < 0.7,
        }
        kind = rng.choice(["", "", "", "n", "logprobs", "penalty", "bias", "stop", "best_of", "beam"])
        params |= {
            "n": {"n": 3},
            "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
            "penalty": {"repetition_penalty": 1.3},
            "bias": {"logit_bias": {7: 4.0}, "min_tokens": 5},
            "stop": {"stop_token_ids": tuple(range(2, 30)), "min_tokens": 6},
            "best_of": {"best_of": 2},
            "beam": {"use_beam_search": True, "beam_width": 2, "temperature": 0.0},
        }.get(kind, {})
        requests.append(replace(make_request(f"r{number}", tokens, **params), priority=rng.choice([0, 0, -1])))
    return requests


def run(
    engine: Engine, requests: abc.Sequence[Request], every: int, screened: bool = False
) -> tuple[Made, Seen]:
    """One request more comes with each ``every`` steps. Screened steps leave out most logits."""
    if not screened:
        engine.runner.decoder.screened_rows = 0
    sample, seen = engine.runner.sampler.sample, Seen()

    def keep(logits: torch.Tensor, rows: abc.Sequence[SampleRow]) -> list[Any]:
        seen.update(((row.seed, row.position), each.clone()) for row, each in zip(rows, logits, strict=True))
        return sample(logits, rows)

    engine.runner.sampler.sample = keep  # type: ignore[method-assign]
    made: Made = {}
    coming, steps = list(requests), 0
    while coming or engine.has_work():
        if coming and steps % every == 0:
            engine.add(coming.pop(0))
        steps += 1
        for delta in engine.step():
            tokens, logprobs, reason = made.setdefault((delta.request_id, delta.sequence), ([], [], None))
            assert reason is None, "something came after the end"
            assert delta.index == len(tokens)
            tokens += delta.token_ids
            logprobs += [entry.logprob for entry in delta.logprobs or ()]
            made[delta.request_id, delta.sequence] = tokens, logprobs, delta.finish_reason
    return made, seen


def guessing(monkeypatch: pytest.MonkeyPatch, requests: abc.Iterable[Request], made: Made) -> None:
    """From now on guesses are often right: tiny random models do not repeat themselves, so one knows it all."""
    prompts = {request.request_id: request.token_ids for request in requests}
    texts = [prompts[name] + tokens for (name, _), (tokens, _, _) in made.items()]
    rng = random.Random(0)

    def guess(_: PromptLookup, tokens: list[int], count: int) -> list[int]:
        rest = next((text[len(tokens) :] for text in texts if text[: len(tokens)] == tokens), [])
        guesses = (rest + rng.choices(range(2, 97), k=count))[:count]
        return [token if rng.random() < 0.8 else 2 for token in guesses]

    monkeypatch.setattr(PromptLookup, "guess", guess)


def speculating(engine: Engine, most: int = 15) -> Engine:
    """Every guess is tried, whatever it costs."""
    engine.scheduler.speculation = Speculation(most)
    return engine


@pytest.mark.parametrize(
    ("options", "model", "seed"),
    [
        ({}, "Llama", 0),
        ({}, "Llama", 1),
        ({"dtype": "bfloat16"}, "Llama", 2),
        ({"num_blocks": 28, "token_budget": 16}, "Llama", 0),
        ({"num_blocks": 28, "recovery": "swap", "swap_space": 1 << 20}, "Llama", 1),
        ({"token_budget": 24}, "Mistral", 0),
    ],
    ids=["float32", "float32 again", "bfloat16", "preempted", "swapped", "windows"],
)
def test_the_output_is_the_same(
    options: dict[str, Any], model: str, seed: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{seed}/{options}")
    requests, every = workload(rng), rng.choice([1, 3])
    expected, plain = run(make_engine(model, **options), requests, every)
    guessing(monkeypatch, requests, expected)
    engine = speculating(make_engine(model, **options))
    made, seen = run(engine, requests, every)
    assert made == expected
    for key, logits in plain.items():
        assert torch.equal(seen[key].view(torch.int32), logits.view(torch.int32)), key
    stats = engine.stats().scheduler
    assert stats.drafted_tokens > stats.accepted_tokens > 0
    if "num_blocks" in options:
        assert stats.preemptions


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_screened_steps_change_nothing(
    dtype: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts and without them."""
    rng = random.Random(dtype)
    requests = workload(rng)
    expected, _ = run(make_engine("Llama", dtype=dtype), requests, 3)
    engine = make_engine("Llama", dtype=dtype)
    if engine.runner.decoder.kernels.prefers_codes:
        assert engine.runner.decoder.screened_rows
    made, _ = run(engine, requests, 3, screened=True)
    assert made == expected
    guessing(monkeypatch, requests, expected)
    made, _ = run(speculating(make_engine("Llama", dtype=dtype), most=3), requests, 3, screened=True)
    assert made == expected


def test_a_request_that_moved_here_goes_on_the_same(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request("r", [5, 6, 7, 8, 9] * 5, max_tokens=30, temperature=0.8, seed=3, ignore_eos=True)
    made, _ = run(make_engine(), [request], 1)
    ((whole, _, _),) = made.values()
    guessing(monkeypatch, [request], made)
    engine = speculating(make_engine())
    moved = replace(request, token_ids=[*request.token_ids, *whole[:11]], generated_before=11)
    engine.add(moved)
    rest: list[int] = []
    while engine.has_work():
        for delta in engine.step():
            assert delta.index == 11 + len(rest)
            rest += delta.token_ids
    assert whole[11:] == rest
    assert engine.stats().scheduler.accepted_tokens


def test_a_step_that_fails_with_drafts_is_run_without(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request("r", [5, 6, 7, 8, 9] * 5, max_tokens=20, ignore_eos=True)
    expected, _ = run(make_engine(), [request], 1)
    guessing(monkeypatch, [request], expected)
    engine = speculating(make_engine())
    compute, failures = engine.runner.run, 0

    def fail(chunks: abc.Sequence[ScheduledChunk]) -> list[Outcome]:
        nonlocal failures
        if any(chunk.drafts for chunk in chunks):
            failures += 1
            raise MemoryError
        return compute(chunks)

    engine.runner.run = fail  # type: ignore[method-assign]
    assert run(engine, [request], 1)[0] == expected
    stats = engine.stats()
    assert failures == stats.failed_steps > 0
    assert (stats.scheduler.drafted_tokens, stats.scheduler.accepted_tokens) == (0, 0)


def test_the_option_decides(make_engine: MakeEngine) -> None:
    assert make_engine(speculation=0).scheduler.speculation is None
    automatic = make_engine(speculation=None).scheduler.speculation
    assert automatic is not None
    assert automatic.max_drafts == 15
    assert automatic.row_cost >= 0.0
    limited = make_engine(speculation=3).scheduler.speculation
    assert limited is not None
    assert limited.max_drafts == 3
