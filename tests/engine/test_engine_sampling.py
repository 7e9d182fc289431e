"""Penalties, bias and log probabilities through the engine: alone, in a batch, and after whatever happens."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_checkpoints import VOCAB
from tiny_engines import add, made, make_request, run_to_end, tiny_engine_config
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequestError
from engine.execution import model_runner
from engine.request import FinishReason, Request, TokenDelta
from engine.sampling_params import SamplingParams
from engine.token_logprobs import TokenLogprobs

PROMPT = [5, 17, 60, 3, 42, 8, 8, 71, 30, 2, 19]
EDITED: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.7,
    "presence_penalty": 0.3,
    "logit_bias": {7: 3.0, 60: -2.0},
    "bad_words": ((9,), (7, 7)),
    "ignore_eos": True,
}

FEW: dict[str, Any] = {
    "frequency_penalty": 2.0,
    "presence_penalty": 2.0,
    "allowed_token_ids": (7, 9, 30, 60),
    "ignore_eos": True,
}
"""Each token has been generated before, so that all choices depend on how often."""


@pytest.fixture
def engine(tiny_models: dict[str, Path]) -> Engine:
    return Engine(tiny_engine_config(tiny_models["Llama"]), offline=True)


def another(engine: Engine, **options: Any) -> Engine:
    config: EngineConfig = replace(engine.config, **options)
    return Engine(config, offline=True)


def scores(deltas: list[TokenDelta]) -> list[TokenLogprobs]:
    return [score for delta in deltas for score in delta.logprobs or ()]


def of_prompt(deltas: list[TokenDelta]) -> list[TokenLogprobs]:
    (found,) = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    return list(found)


def logits_after(engine: Engine, tokens: list[int]) -> Tensor:
    """The model's raw logits at every position, float64 ``[len(tokens), vocab]``."""
    rows = [
        engine.runner.forward_alone(tokens[: end + 1], engine.runner.kv_cache) for end in range(len(tokens))
    ]
    return torch.cat(rows).double()


def edited(logits: Tensor, output: list[int]) -> Tensor:
    """What ``EDITED`` makes of one row after ``PROMPT`` and ``output``, by the definition."""
    row = logits.clone()
    counts = Counter(output)
    row[9] = -math.inf
    if output and output[-1] == 7:
        row[7] = -math.inf
    row[7] += 3.0
    row[60] -= 2.0
    for token in {*PROMPT, *output}:
        row[token] = row[token] / 1.4 if row[token] > 0 else row[token] * 1.4
        row[token] -= 0.7 * counts[token] + 0.3 * (counts[token] > 0)
    return row


def test_choices_and_log_probabilities_equal_a_plain_reference(engine: Engine) -> None:
    params: dict[str, Any] = {**EDITED, "max_tokens": 24, "logprobs": 3}
    deltas = run_to_end(engine, make_request("a", PROMPT, **params))["a"]
    output, found = made(deltas), scores(deltas)
    assert len(output) == len(found) == 24
    logits = logits_after(engine, [*PROMPT, *output])[len(PROMPT) - 1 : -1]
    raw = logits.log_softmax(dim=1)
    for place, (token, score) in enumerate(zip(output, found, strict=True)):
        assert token == int(edited(logits[place], output[:place]).argmax())
        assert score.logprob == pytest.approx(raw[place, token].item(), abs=1e-5)
        best = raw[place].topk(3)
        assert list(score.top_ids) == best.indices.tolist()
        assert score.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)
        assert score.rank == 1 + int((logits[place] > logits[place, token]).sum())


def test_a_batch_changes_nothing(engine: Engine) -> None:
    """Rows with every option beside each other, and beside rows with none."""
    each: list[dict[str, Any]] = [
        {},
        {**EDITED, "temperature": 1.0, "seed": 3},
        {"logprobs": 20},
        {"presence_penalty": 2.0, "temperature": 0.7, "seed": 4, "logprobs": 0},
        {"allowed_token_ids": (3, 4, 5), "temperature": 1.0, "seed": 5},
        {"prompt_logprobs": 2},
    ]
    requests = [
        make_request(str(place), PROMPT[place:], max_tokens=9, **params) for place, params in enumerate(each)
    ]
    together = run_to_end(engine, *requests)
    for request in requests:
        alone = run_to_end(another(engine), request)[request.request_id]
        deltas = together[request.request_id]
        assert (made(deltas), scores(deltas)) == (made(alone), scores(alone))
        assert [d.prompt_logprobs for d in deltas] == [d.prompt_logprobs for d in alone]


@pytest.mark.parametrize("recovery", ["recompute", "swap"])
def test_a_preemption_changes_nothing(engine: Engine, recovery: str) -> None:
    params: dict[str, Any] = {**EDITED, "max_tokens": 30, "logprobs": 2, "prompt_logprobs": 1}
    requests = [make_request(name, PROMPT, **params, temperature=1.0, seed=ord(name)) for name in "abcd"]
    swap: dict[str, Any] = {"swap_space": "1MiB"} if recovery == "swap" else {}
    small = another(engine, num_blocks=24, recovery=recovery, **swap)
    crowded = run_to_end(small, *requests)
    assert small.stats().scheduler.preemptions > 0
    for request in requests:
        alone = run_to_end(engine, request)[request.request_id]
        deltas = crowded[request.request_id]
        assert (made(deltas), scores(deltas)) == (made(alone), scores(alone))
        assert of_prompt(deltas) == of_prompt(alone)


def test_looking_at_the_load_shortens_no_prompts_log_probabilities(engine: Engine) -> None:
    """A cached prompt that waits is matched for the load report; its log probabilities must be computed."""
    requests = [make_request(name, PROMPT * 3, max_tokens=1, prompt_logprobs=0) for name in "abc"]
    alone = run_to_end(engine, requests[0])["a"]
    narrow = another(engine, token_budget=len(PROMPT))
    run_to_end(narrow, make_request("caches", PROMPT * 3, max_tokens=1))
    deltas: dict[str, list[TokenDelta]] = {request.request_id: [] for request in requests}
    for request in requests:
        narrow.add(request)
    while narrow.has_work():
        narrow.load.read()
        for delta in narrow.step():
            deltas[delta.request_id].append(delta)
    assert {name: of_prompt(each) for name, each in deltas.items()} == dict.fromkeys("abc", of_prompt(alone))


@pytest.mark.parametrize("edited", [EDITED, FEW], ids=["edited", "few"])
def test_a_move_changes_nothing(engine: Engine, edited: dict[str, Any]) -> None:
    """The tokens generated elsewhere count as output, not as prompt."""
    params = SamplingParams(**edited, max_tokens=20, temperature=1.0, seed=8, logprobs=1, prompt_logprobs=1)
    whole = run_to_end(engine, Request("a", PROMPT, params))["a"]
    output = made(whole)
    for before in (1, 7, 19):
        moved = Request("a", [*PROMPT, *output[:before]], params, generated_before=before)
        deltas = run_to_end(another(engine), moved)["a"]
        assert made(deltas) == output[before:]
        assert scores(deltas) == scores(whole)[before:]
        assert all(delta.prompt_logprobs is None for delta in deltas)  # they have been sent


def test_choices_fork_with_their_counts(engine: Engine) -> None:
    """Each of several sequences makes what a request alone with its seed makes, moved or not."""
    params = SamplingParams(
        **EDITED, max_tokens=12, temperature=1.0, seed=8, n=3, logprobs=2, prompt_logprobs=0
    )
    whole = run_to_end(engine, Request("a", PROMPT, params))["a"]
    outputs = [[d for d in whole if d.sequence == number] for number in range(3)]
    assert len({tuple(made(output)) for output in outputs}) == 3
    assert of_prompt(whole) == of_prompt(outputs[0])
    single = run_to_end(engine, Request("a", PROMPT, replace(params, n=1)))["a"]
    assert (made(outputs[0]), scores(outputs[0])) == (made(single), scores(single))
    begun = tuple(tuple(made(output)[: 3 + number]) for number, output in enumerate(outputs))
    moved = run_to_end(another(engine), Request("a", PROMPT, params, outputs=begun))["a"]
    for number, output in enumerate(outputs):
        rest = [delta for delta in moved if delta.sequence == number]
        assert made(rest) == made(output)[3 + number :]
        assert scores(rest) == scores(output)[3 + number :]


@pytest.mark.parametrize(
    "params",
    [{"best_of": 4, "temperature": 1.0, "seed": 2}, {"use_beam_search": True, "beam_width": 3}],
    ids=str,
)
def test_ranked_results_have_the_log_probabilities_of_their_tokens(
    engine: Engine, params: dict[str, Any]
) -> None:
    request = make_request("a", PROMPT, n=2, max_tokens=6, ignore_eos=True, **params)
    plain = run_to_end(engine, request)["a"]
    asked = replace(request, params=replace(request.params, logprobs=2, prompt_logprobs=1))
    results = run_to_end(engine, asked)["a"]
    assert [(r.token_ids, r.score) for r in results] == [(r.token_ids, r.score) for r in plain]
    assert of_prompt(results) == list(results[0].prompt_logprobs or ())
    for result in results:
        raw = logits_after(engine, [*PROMPT, *result.token_ids])[len(PROMPT) - 1 : -1].log_softmax(dim=1)
        assert result.logprobs is not None
        expected = raw.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0].tolist()
        assert [score.logprob for score in result.logprobs] == pytest.approx(expected, abs=1e-5)
        assert sum(expected) / len(expected) == pytest.approx(result.score, abs=1e-5)


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("at_once", [2, 64])
def test_log_probabilities_of_a_prompt(
    engine: Engine, budget: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk by chunk, a few rows of logits at a time, and with the prompt in the prefix cache."""
    monkeypatch.setattr(model_runner, "_SCORED_AT_ONCE", at_once)
    chunked = another(engine, token_budget=budget)
    raw = logits_after(engine, PROMPT).log_softmax(dim=1)
    run_to_end(chunked, make_request("first", PROMPT, max_tokens=1))
    request = make_request("a", PROMPT, max_tokens=2, prompt_logprobs=4)
    deltas = run_to_end(chunked, request)["a"]
    assert len(deltas[0].token_ids) == 1
    for place, score in enumerate(of_prompt(deltas[:1])):
        assert score.logprob == pytest.approx(raw[place, PROMPT[place + 1]].item(), abs=1e-5)
        assert list(score.top_ids) == raw[place].topk(4).indices.tolist()
        assert score.rank == 1 + int((raw[place] > raw[place, PROMPT[place + 1]]).sum())
    assert len(of_prompt(deltas)) == len(PROMPT) - 1
    assert deltas[0].cached_tokens == 0
    assert made(deltas) == made(run_to_end(chunked, make_request("b", PROMPT, max_tokens=2))["b"])


def test_a_prompt_alone_is_scored_without_a_token(engine: Engine) -> None:
    request = make_request("a", PROMPT, max_tokens=0, prompt_logprobs=0)
    (delta,) = run_to_end(engine, request)["a"]
    assert (delta.token_ids, delta.finish_reason, delta.final) == ((), FinishReason.LENGTH, True)
    assert len(of_prompt([delta])) == len(PROMPT) - 1
    several = run_to_end(engine, make_request("b", PROMPT, max_tokens=0, prompt_logprobs=0, n=3))["b"]
    assert [(d.token_ids, d.sequence, d.final) for d in several] == [
        ((), 0, False),
        ((), 1, False),
        ((), 2, True),
    ]
    assert of_prompt(several) == of_prompt([delta])
    (one,) = run_to_end(engine, make_request("c", [5], max_tokens=0, prompt_logprobs=0))["c"]
    assert one.prompt_logprobs == ()


def test_a_preempted_prompt_goes_on_where_it_was(engine: Engine) -> None:
    """Its first part is scored already; the rest must be computed, whatever is in the prefix cache."""
    chunked = another(engine, token_budget=4)
    whole = of_prompt(run_to_end(chunked, make_request("a", PROMPT, max_tokens=1, prompt_logprobs=1))["a"])
    sequence = add(chunked, make_request("b", PROMPT, max_tokens=1, prompt_logprobs=1))
    chunked.step()
    assert sequence.prompt_logprobs is not None
    assert len(sequence.prompt_logprobs.entries) == 4
    state = chunked.scheduler.state
    state.preempt_to_recompute(state.running.index(sequence))
    deltas = []
    while chunked.has_work():
        deltas += chunked.step()
    assert of_prompt(deltas) == whole


def test_where_no_token_is_allowed_the_sequence_ends(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing fails, so no step has to be run again."""
    caplog.clear()
    banned: dict[str, Any] = {"allowed_token_ids": (5,), "bad_words": ((5, 5),), "max_tokens": 4}
    deltas = run_to_end(
        engine,
        make_request("a", PROMPT, **banned),
        make_request("b", PROMPT, max_tokens=4),
        make_request("c", PROMPT, **{**banned, "bad_words": ((5,),)}, n=2, prompt_logprobs=0),
        make_request("d", PROMPT, **{**banned, "bad_words": ((5,),)}, n=2, best_of=3, logprobs=1),
    )
    assert [(d.token_ids, d.finish_reason) for d in deltas["a"]] == [((5,), None), ((), FinishReason.LENGTH)]
    assert len(made(deltas["b"])) == 4
    for name in "cd":
        assert [(d.token_ids, d.finish_reason) for d in deltas[name]] == [((), FinishReason.LENGTH)] * 2
        assert [d.final for d in deltas[name]] == [False, True]
    assert len(of_prompt(deltas["c"])) == len(PROMPT) - 1
    assert caplog.text == ""


def test_only_tokens_of_the_vocabulary_can_be_named(engine: Engine) -> None:
    for name, value in (
        ("logit_bias", {1: 1.0, VOCAB: 1.0}),
        ("bad_words", ((1, VOCAB),)),
        ("allowed_token_ids", (VOCAB,)),
        ("stop_token_ids", (VOCAB,)),
    ):
        with pytest.raises(InvalidRequestError, match=f"{name} has {VOCAB}, outside") as caught:
            engine.add(make_request("a", PROMPT, **{name: value}))
        assert caught.value.param == name
