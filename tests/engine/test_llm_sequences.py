"""Requests for several sequences: drawn from one prompt, ranked, or searched as transformers does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from leftovers import give_back
from model_checkpoints import VOCAB
from tiny_engines import EOS

from engine import LLM, RequestResult, SamplingParams
from engine.request import FinishReason, Request, TokenDelta
from engine.scheduling.recovery import Recovery
from engine.seeds import sequence_seed
from kernels.interface import AttentionMetadata

PROMPT = [5, 17, 60, 3, 42, 8, 8, 71, 30, 2, 19]
TEXTS = ("The capital of France is", "Once upon a time, in a small village")


def tiny_llm(folder: Path, **options: Any) -> LLM:
    return LLM(
        folder,
        **{
            "dtype": "float32",
            "block_size": 4,
            "num_blocks": 128,
            "num_threads": 1,
            "check_invariants": True,
            **options,
        },
    )


@pytest.fixture
def tiny(tiny_models: dict[str, Path]) -> LLM:
    return tiny_llm(tiny_models["Llama"])


def sequences(result: RequestResult) -> list[list[int]]:
    return [sequence.token_ids for sequence in result.sequences]


def count_rows(llm: LLM) -> list[int]:
    """A list that grows by the rows of each step from now on."""
    run, rows = llm.engine.runner.run, []

    def counted(chunks: Any) -> Any:
        rows.append(sum(chunk.length for chunk in chunks))
        return run(chunks)

    llm.engine.runner.run = counted  # type: ignore[method-assign]
    return rows


def left_nothing(llm: LLM) -> bool:
    return not llm.engine.has_work() and llm.engine.stats().scheduler.referenced_blocks == 0


def test_sequences_are_the_draws_of_their_own_seeds_over_one_prompt(tiny: LLM) -> None:
    params: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}
    rows = count_rows(tiny)
    (result,) = tiny.generate([PROMPT], SamplingParams(n=4, seed=11, **params))
    assert sum(rows) == len(PROMPT) + 4 * 8  # the last token of each is never computed
    made = sequences(result)
    assert len({tuple(tokens) for tokens in made}) == 4
    assert result.token_ids == made[0]
    alone = [
        tiny.generate([PROMPT], SamplingParams(seed=sequence_seed(11, number), **params))[0]
        for number in range(4)
    ]
    assert made == [one.token_ids for one in alone]
    assert alone[0].token_ids == tiny.generate([PROMPT], SamplingParams(seed=11, **params))[0].token_ids
    assert all(sequence.score is None for sequence in result.sequences)
    assert left_nothing(tiny)


def test_sequences_end_one_by_one(tiny: LLM) -> None:
    stops = tuple(range(2, VOCAB, 6))
    (result,) = tiny.generate([PROMPT], SamplingParams(n=8, seed=3, max_tokens=6, stop_token_ids=stops))
    reasons = {sequence.finish_reason for sequence in result.sequences}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    for sequence in result.sequences:
        stopped = [token in (*stops, EOS) for token in sequence.token_ids]
        assert not any(stopped[:-1])
        assert stopped[-1] == (sequence.finish_reason is FinishReason.STOP)
        assert stopped[-1] or len(sequence.token_ids) == 6
    assert left_nothing(tiny)


@pytest.mark.parametrize("num_blocks", [128, 13])
def test_a_sequence_that_nobody_wants_ends_in_any_state(tiny_models: dict[str, Path], num_blocks: int) -> None:
    llm = tiny_llm(tiny_models["Llama"], num_blocks=num_blocks)
    engine = llm.engine
    request = Request("a", PROMPT, SamplingParams(n=4, seed=3, max_tokens=12, ignore_eos=True))

    def run(end_after: int | None) -> dict[int, list[TokenDelta]]:
        made: dict[int, list[TokenDelta]] = {number: [] for number in range(4)}
        engine.add(request)
        for step in itertools.count():
            deltas = engine.step()
            if step == end_after:
                (last,) = ended = engine.end_sequence("a", 2)
                assert (last.finish_reason, last.token_ids, last.final) == (FinishReason.STOP, (), False)
                deltas += ended
                assert engine.end_sequence("a", 2) == engine.end_sequence("b", 0) == []
            for delta in deltas:
                made[delta.sequence].append(delta)
            if not engine.has_work():
                return made

    whole = run(None)
    tokens = {number: [t for delta in deltas for t in delta.token_ids] for number, deltas in whole.items()}
    for end_after in (3, 6, 9):
        made = run(end_after)
        for number, deltas in made.items():
            found = [t for delta in deltas for t in delta.token_ids]
            assert found == tokens[number][: len(found)]
            assert (len(found) < 12) == (number == 2)
        assert [delta.final for deltas in made.values() for delta in deltas].count(True) == 1
        assert left_nothing(llm)
    assert (engine.stats().scheduler.preemptions > 0) == (num_blocks == 13)


def mean_logprob(model: Any, tokens: list[int]) -> float:
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    logprobs = torch.log_softmax(logits, dim=-1)
    return float(logprobs[torch.arange(len(tokens)), torch.tensor(tokens)].mean())


def test_best_of_returns_those_with_the_highest_mean_log_probability(tiny: LLM) -> None:
    drawn: dict[str, Any] = {
        "seed": 5,
        "temperature": 0.7,
        "max_tokens": 7,
        "stop_token_ids": tuple(range(2, VOCAB, 12)),
    }
    (everything,) = tiny.generate([PROMPT], SamplingParams(n=6, **drawn))
    model = load(tiny.folder)
    ranked = sorted(sequences(everything), key=lambda tokens: -mean_logprob(model, tokens))
    assert ranked != sequences(everything)
    assert len({len(tokens) for tokens in ranked}) > 1
    (best,) = tiny.generate([PROMPT], SamplingParams(n=3, best_of=6, **drawn))
    assert sequences(best) == ranked[:3]
    for sequence in best.sequences:
        assert sequence.score == pytest.approx(mean_logprob(model, sequence.token_ids), abs=1e-4)
    assert left_nothing(tiny)


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_beams(
    model: Any, prompt: list[int], params: SamplingParams
) -> tuple[list[list[int]], list[float]]:
    """The sequences and scores of transformers' beam search; the ending token is the last one."""
    ending = [*params.stop_token_ids, *([] if params.ignore_eos else [model.config.eos_token_id])]
    model.generation_config.eos_token_id = None
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=ending or None,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = []
    for row in made.sequences[:, len(prompt) :].tolist():
        ends = [index + 1 for index, token in enumerate(row) if token in ending]
        rows.append(row[: ends[0]] if ends else row)
    return rows, made.sequences_scores.tolist()


BEAMS: list[dict[str, Any]] = [
    {"n": 4},
    {"n": 4, "ignore_eos": True, "temperature": 0.0},
    {"n": 4, "stop_token_ids": tuple(range(2, VOCAB, 5)), "length_penalty": 0.6, "early_stopping": True},
    {"n": 2, "stop_token_ids": tuple(range(2, VOCAB, 3)), "length_penalty": 2.0, "early_stopping": "never"},
    {
        "n": 3,
        "best_of": 4,
        "stop_token_ids": tuple(range(3, VOCAB, 3)),
        "length_penalty": -1.0,
        "min_tokens": 3,
    },
]


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_beam_search_equals_transformers(tiny_models: dict[str, Path], family: str) -> None:
    llm, model = tiny_llm(tiny_models[family]), load(tiny_models[family])
    for changes in BEAMS:
        wanted = {"use_beam_search": True, "max_tokens": 10, **changes}
        if "best_of" not in wanted:
            wanted["beam_width"] = 4
        params = SamplingParams(**wanted)
        expected, scores = transformers_beams(model, PROMPT, params)
        (result,) = llm.generate([PROMPT], params)
        assert sequences(result) == expected, changes
        assert [sequence.score for sequence in result.sequences] == pytest.approx(scores, abs=1e-4), changes
        ended = [tokens[-1] in (*params.stop_token_ids, EOS) for tokens in expected]
        stops = [sequence.finish_reason is FinishReason.STOP for sequence in result.sequences]
        assert stops == [end and not (params.ignore_eos and not params.stop_token_ids) for end in ended]
        assert left_nothing(llm)


def test_beam_search_of_the_bundled_model_equals_transformers(bundled_model: Path) -> None:
    llm = LLM(bundled_model, dtype="float32", num_blocks=60, num_threads=1)
    params = SamplingParams(use_beam_search=True, n=4, max_tokens=12)
    results, tokenizer = llm.generate(list(TEXTS), params), llm.tokenizer
    del llm  # one model of this size at a time
    give_back()
    model = load(bundled_model)
    for text, result in zip(TEXTS, results, strict=True):
        expected, scores = transformers_beams(model, tokenizer.encode(text), params)
        assert sequences(result) == expected, text
        assert [sequence.score for sequence in result.sequences] == pytest.approx(scores, abs=1e-3)
        assert [sequence.text for sequence in result.sequences] == [
            tokenizer.decode(tokens, skip_special_tokens=True) for tokens in expected
        ]
        assert result.text == result.sequences[0].text


def test_every_kind_at_once_as_alone(tiny: LLM) -> None:
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=8),
        SamplingParams(n=3, seed=1, max_tokens=12),
        SamplingParams(n=2, best_of=4, seed=2, max_tokens=5),
        SamplingParams(use_beam_search=True, n=2, beam_width=3, max_tokens=9),
        SamplingParams(n=1, seed=4, max_tokens=3),
    ]
    prompts = [PROMPT, PROMPT[::-1], PROMPT[:5], PROMPT * 2, PROMPT[1:]]
    together = tiny.generate(prompts, kinds)
    assert [len(result.sequences) for result in together] == [1, 3, 2, 2, 1]
    for prompt, params, result in zip(prompts, kinds, together, strict=True):
        (alone,) = tiny.generate([prompt], params)
        assert alone.sequences == result.sequences
    assert left_nothing(tiny)


@pytest.mark.parametrize("recovery", ["swap", "recompute"])
def test_a_pool_that_is_too_small_for_all_changes_nothing(tiny_models: dict[str, Path], recovery: str) -> None:
    kinds = [
        SamplingParams(n=4, seed=1, max_tokens=20, ignore_eos=True),
        SamplingParams(use_beam_search=True, n=4, max_tokens=20),
        SamplingParams(n=1, best_of=3, seed=2, max_tokens=20),
    ]
    roomy = tiny_llm(tiny_models["Llama"])
    expected = [roomy.generate([PROMPT], params)[0].sequences for params in kinds]
    tight = tiny_llm(tiny_models["Llama"], num_blocks=32, recovery=recovery, swap_space=1 << 17)
    results = tight.generate([PROMPT] * 3, kinds)
    stats = tight.engine.stats().scheduler
    assert stats.recovery.finished[Recovery(recovery)] > 0
    assert stats.host_blocks_used == 0
    assert stats.copied_blocks > 0
    assert [result.sequences for result in results] == expected
    assert left_nothing(tight)


@pytest.mark.parametrize("changes", [{"n": 3}, {"n": 1, "best_of": 3}, {"n": 3, "use_beam_search": True}])
def test_a_failure_is_in_the_result_and_leaves_nothing_behind(tiny: LLM, changes: dict[str, Any]) -> None:
    forward = tiny.engine.runner.decoder.forward

    def fail(
        token_ids: torch.Tensor, pool: torch.Tensor, metadata: AttentionMetadata, *rest: Any
    ) -> torch.Tensor:
        if metadata.max_context_len > len(PROMPT) + 2:
            raise ValueError("poisoned")
        return forward(token_ids, pool, metadata, *rest)

    tiny.engine.runner.decoder.forward = fail  # type: ignore[method-assign, assignment]
    (result,) = tiny.generate([PROMPT], SamplingParams(seed=1, max_tokens=9, ignore_eos=True, **changes))
    assert "poisoned" in str(result.error)
    assert result.finish_reason is FinishReason.ERROR
    assert left_nothing(tiny)
