"""Bias, penalties, masks and log probabilities against a plain torch reference on the same logits."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from engine.execution.sampler import Sampler, SampleRow, both_allowed, edit_after
from engine.logit_edits import LogitEdits, allowed_mask
from engine.sampling_params import SamplingParams
from engine.scheduling.candidates import Candidates
from kernels.cpu import CpuKernels
from kernels.interface import RowEdit, edit_logits

VOCAB = 333  # no multiple of a word of the mask, nor of a vector
PROMPT, OUTPUT = [5, 7, 7, 300, 332], [7, 9, 9, 9, 0, 332]
TOKENS = [*PROMPT, *OUTPUT]

EDITS = [
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=-0.75),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.5, presence_penalty=-2.0, frequency_penalty=0.1),
    SamplingParams(logit_bias={9: -100.0, 3: 2.5, 332: 0.25}),
    SamplingParams(allowed_token_ids=(0, 7, 31, 32, 63, 332)),
    SamplingParams(bad_words=((4,), (0, 332, 8), (332, 11), (9, 332, 12))),
    SamplingParams(
        allowed_token_ids=tuple(range(0, VOCAB, 3)),
        bad_words=((12,), (332, 9)),
        logit_bias={9: 3.0, 15: -2.0},
        repetition_penalty=1.7,
        frequency_penalty=0.3,
        presence_penalty=0.4,
    ),
]


def reference(logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    """The definition of OpenAI and vLLM, one token after the other, in float64."""
    scores = logits.double().clone()
    counts = Counter(output)
    for token in range(len(scores)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            scores[token] = -math.inf
        for word in params.bad_words:
            if word[-1] == token and list(word[:-1]) == output[len(output) - len(word) + 1 :]:
                scores[token] = -math.inf
        scores[token] += dict(params.bias).get(token, 0.0)
        if token in prompt or token in output:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        scores[token] -= params.frequency_penalty * counts[token]
        scores[token] -= params.presence_penalty * (counts[token] > 0)
    return scores


def random_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def row_edit(params: SamplingParams, row: int = 0) -> RowEdit:
    edits = LogitEdits(params, len(PROMPT), VOCAB)
    return RowEdit(row, edit_after(edits, TOKENS), edits.banned(TOKENS), both_allowed(None, edits.allowed))


@pytest.mark.parametrize("params", EDITS, ids=range(len(EDITS)))
@pytest.mark.parametrize("threads", [0, 1, 2])
def test_edits_equal_the_definition(params: SamplingParams, threads: int) -> None:
    """With no threads, those in torch."""
    logits = random_logits(1)
    expected = reference(logits[0], params, PROMPT, OUTPUT)
    (CpuKernels(threads).edit_logits if threads else edit_logits)(logits, [row_edit(params)])
    torch.testing.assert_close(logits[0].double(), expected, atol=1e-5, rtol=1e-5)


def test_rows_are_edited_apart() -> None:
    """Each gets its own edit, those between none, and the bits are those of a row alone."""
    kernels = CpuKernels(2)
    logits = random_logits(2 * len(EDITS))
    together = logits.clone()
    kernels.edit_logits(together, [row_edit(params, 2 * place) for place, params in enumerate(EDITS)])
    assert together[1::2].equal(logits[1::2])
    for place, params in enumerate(EDITS):
        alone = logits[2 * place : 2 * place + 1].clone()
        kernels.edit_logits(alone, [row_edit(params)])
        assert together[2 * place].equal(alone[0])


@pytest.mark.parametrize("params", EDITS, ids=range(len(EDITS)))
def test_counts_are_a_function_of_the_tokens(params: SamplingParams) -> None:
    """Counted token by token, in a fork, or all at once, as after a move to another replica."""
    logits = random_logits(1)
    growing = LogitEdits(params, len(PROMPT), VOCAB)
    fork = growing
    for length in range(len(PROMPT), len(TOKENS) + 1):
        growing.counts(TOKENS[:length])
        if length == len(PROMPT) + 2:
            fork = growing.fork()
    growing.counts([*TOKENS, 1, 1])  # of no effect on the fork
    made = [logits.clone() for _ in range(2)]
    for each, edits in zip(made, (LogitEdits(params, len(PROMPT), VOCAB), fork), strict=True):
        allowed = both_allowed(None, edits.allowed)
        edit_logits(each, [RowEdit(0, edit_after(edits, TOKENS), edits.banned(TOKENS), allowed)])
    assert made[0].equal(made[1])


def test_a_form_and_allowed_tokens_leave_what_both_allow() -> None:
    form = torch.from_numpy(allowed_mask(range(0, VOCAB, 2), VOCAB))
    thirds = allowed_mask(range(0, VOCAB, 3), VOCAB)
    assert both_allowed(form, None) is form
    for edit in (edit_logits, CpuKernels(1).edit_logits):
        logits = torch.zeros(1, VOCAB)
        edit(logits, [RowEdit(0, None, (12,), both_allowed(form, thirds))])
        kept = torch.isfinite(logits[0]).nonzero()[:, 0].tolist()
        assert kept == [token for token in range(0, VOCAB, 6) if token != 12]


def test_many_tokens_are_counted() -> None:
    """More than the first arrays hold."""
    params = SamplingParams(frequency_penalty=1.0)
    tokens = [token for token in range(VOCAB) for _ in range(token % 4)]
    logits = torch.zeros(1, VOCAB)
    edits = LogitEdits(params, 0, VOCAB)
    for length in range(0, len(tokens) + 1, 50):
        edits.counts(tokens[:length])
    edit_logits(logits, [RowEdit(0, edit_after(edits, tokens))])
    assert logits[0].tolist() == [-(token % 4) for token in range(VOCAB)]


def sampler(kind: str) -> Sampler:
    return Sampler() if kind == "torch" else Sampler(CpuKernels(2))


@pytest.mark.parametrize("kind", ["torch", "cpu"])
@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_log_probabilities_are_those_of_the_raw_logits(kind: str, top: int) -> None:
    """Whatever edits and temperature do to the choice; batched as alone; a choice is the same without them."""
    logits = (random_logits(len(EDITS) + 1) * 4).round() / 4  # with ties
    expected = logits.double().log_softmax(dim=1)
    rows = []
    for place, params in enumerate([*EDITS, SamplingParams(temperature=0.0)]):
        edits = LogitEdits(params, len(PROMPT), VOCAB)
        row = SampleRow(params, 3, place, edits.banned(TOKENS), edit=edit_after(edits, TOKENS))
        row.top = top if place != 2 else None
        rows.append(row)
    chooser = sampler(kind)
    together = chooser.sample(logits.clone(), rows)
    assert isinstance(together[2], int)
    for place, row in enumerate(rows):
        outcome = together[place]
        assert chooser.sample(logits[place : place + 1].clone(), [row]) == [outcome]
        plain = SampleRow(row.params, 3, place, row.forbidden, edit=row.edit)
        token = chooser.sample(logits[place : place + 1].clone(), [plain])[0]
        if place == 2:
            assert outcome == token
            continue
        assert isinstance(outcome, Candidates)
        assert outcome.tokens == (token,)
        (detail,) = outcome.details
        assert detail.logprob == outcome.logprobs[0] == pytest.approx(expected[place, token].item(), abs=1e-5)
        assert detail.rank == 1 + int((logits[place] > logits[place, token]).sum())
        order = (-logits[place]).sort(stable=True).indices[:top].tolist()
        assert list(detail.top_ids) == order
        assert detail.top_logprobs == pytest.approx(expected[place, order].tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", ["torch", "cpu"])
def test_draws_of_one_row_have_their_own_log_probabilities(kind: str) -> None:
    logits = random_logits(2)
    expected = logits.double().log_softmax(dim=1)
    rows = [
        SampleRow(SamplingParams(), 3, 4, extra_seeds=(8, 9), top=2),
        SampleRow(SamplingParams(), 1, 4, top=0),
    ]
    for place, made in enumerate(sampler(kind).sample(logits.clone(), rows)):
        assert isinstance(made, Candidates)
        assert len(made.details) == len(made.tokens) == (3, 1)[place]
        for token, detail in zip(made.tokens, made.details, strict=True):
            assert detail.logprob == pytest.approx(expected[place, token].item(), abs=1e-5)


@pytest.mark.parametrize("kind", ["torch", "cpu"])
def test_tokens_of_a_prompt_are_scored(kind: str) -> None:
    logits = random_logits(4)
    expected = logits.double().log_softmax(dim=1)
    tokens = [0, 332, 17, 4]
    scores = sampler(kind).score(logits.clone(), tokens, 400)
    for row, (token, score) in enumerate(zip(tokens, scores, strict=True)):
        assert score.logprob == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert len(score.top_ids) == VOCAB  # no more than there are
        assert score.top_ids[score.rank - 1] == token
