"""Several tokens from one row of logits, and what the model thought of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import QuireError
from engine.execution.logprobs import likeliest, log_normalizers, tree_sums
from engine.execution.sampler import Sampler, SampleRow
from engine.sampling_params import SamplingParams
from engine.scheduling.candidates import Candidates

GREEDY = SamplingParams(temperature=0.0)


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sample_one(logits: Tensor, row: SampleRow) -> int | Candidates:
    return Sampler().sample(logits.clone(), [row])[0]


@pytest.mark.parametrize("width", [1, 2, 3, 64, 97, 1000])
def test_a_tree_adds_every_weight_once(width: int) -> None:
    weights = torch.arange(2 * width, dtype=torch.float32).view(2, width)
    assert tree_sums(weights.clone()).tolist() == weights.sum(dim=1).tolist()


@pytest.mark.parametrize("vocab", [1, 7, 1000, 49_152])
def test_log_probabilities_are_those_of_the_raw_logits(vocab: int) -> None:
    logits = random_logits(3, vocab)
    expected = logits.double().log_softmax(dim=1)
    for temperature in (0.0, 0.3):
        params = SamplingParams(temperature=temperature, top_k=2)
        for index in range(3):
            made = sample_one(logits[index : index + 1], SampleRow(params, 5, 9, logprobs=True))
            assert isinstance(made, Candidates)
            assert made.tokens == (sample_one(logits[index : index + 1], SampleRow(params, 5, 9)),)
            assert made.logprobs[0] == pytest.approx(expected[index, made.tokens[0]].item(), abs=2e-6)


def test_forbidden_tokens_count_in_the_sum_but_are_no_candidates() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    expected = logits.double().log_softmax(dim=1)[0]
    made = sample_one(logits, SampleRow(GREEDY, 0, 0, forbidden=(0, 2), best=3))
    assert isinstance(made, Candidates)
    assert made.tokens == (1, 3)  # only two are allowed
    assert made.logprobs == pytest.approx((expected[1].item(), expected[3].item()), abs=1e-6)


def test_the_best_come_first_and_ties_by_lower_id() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, -math.inf, 5.0, 2.0], [0.0] * 6, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    assert likeliest(logits, [2, 4, 1]) == [[1, 2], [0, 1, 2, 3], [0]]
    assert likeliest(logits, [100, 5, 6]) == [[1, 2, 4, 5, 0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]


def test_the_best_are_the_head_of_a_stable_sort() -> None:
    logits = (random_logits(4, 20_000) * 4).round()  # many ties
    expected = (-logits).sort(dim=1, stable=True).indices
    rows = [SampleRow(GREEDY, 0, 0, best=count) for count in (1, 2, 17, 128)]
    for index, made in enumerate(Sampler().sample(logits.clone(), rows)):
        assert isinstance(made, Candidates)
        assert list(made.tokens) == expected[index, : rows[index].best].tolist()
        assert list(made.logprobs) == sorted(made.logprobs, reverse=True)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(),
        SamplingParams(temperature=1.4, top_k=50, top_p=0.9),
        SamplingParams(min_p=0.01),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [97, 20_000])
def test_a_further_draw_is_that_of_a_row_with_its_seed(params: SamplingParams, vocab: int) -> None:
    logits = random_logits(3, vocab)
    seeds = (11, -(2**63), 2**63 - 1, 0)
    rows = [
        SampleRow(params, 4, 8, (3,), extra_seeds=seeds),
        SampleRow(params, 6, 8),
        SampleRow(params, 7, 8, extra_seeds=seeds[:1]),
    ]
    made = Sampler().sample(logits.clone(), rows)
    for index, row in enumerate(rows):
        alone = tuple(
            sample_one(logits[index : index + 1], SampleRow(params, seed, 8, row.forbidden))
            for seed in (row.seed, *row.extra_seeds)
        )
        outcome = made[index]
        assert (outcome.tokens if isinstance(outcome, Candidates) else (outcome,)) == alone
    assert isinstance(made[1], int)
    if params.greedy:
        assert isinstance(made[0], Candidates)
        assert len(set(made[0].tokens)) == 1


@pytest.mark.parametrize("vocab", [97, 1000, 49_152])
def test_candidates_depend_on_no_other_row(vocab: int) -> None:
    """To the last bit of the log probabilities: beams and rankings must not change with the batch."""
    count = 19
    logits = random_logits(count, vocab)
    kinds: tuple[dict[str, Any], ...] = (
        {"best": 6},
        {"logprobs": True},
        {"extra_seeds": (1, 2, 3)},
        {},
        {"best": 1, "forbidden": (0, 5)},
    )
    rows = [
        SampleRow(
            SamplingParams(temperature=float(index % 3), top_p=(1.0, 0.8)[index % 2]),
            index,
            40,
            **kinds[index % 5],
        )
        for index in range(count)
    ]
    together = Sampler().sample(logits.clone(), rows)
    alone = [sample_one(logits[index : index + 1], row) for index, row in enumerate(rows)]
    some = Sampler().sample(logits[3:14].clone(), rows[3:14])
    backwards = Sampler().sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards
    assert some == together[3:14]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [{"best": 2}, {"logprobs": True}, {"extra_seeds": (1,)}], ids=str)
def test_logits_that_are_not_finite_are_an_error(bad: float, row: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, bad, 1.0]])
    with pytest.raises(QuireError, match="finite"):
        sample_one(logits, SampleRow(SamplingParams(), 0, 0, **row))
    with pytest.raises(QuireError, match="finite"):
        log_normalizers(torch.full((1, 3), -math.inf))
    assert sample_one(torch.zeros(1, 3), SampleRow(GREEDY, 0, 0, (0, 1, 2), **row)) == Candidates((), ())
