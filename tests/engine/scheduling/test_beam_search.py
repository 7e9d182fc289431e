"""Beam search selects what transformers does, what plain code for its rules does, and the best there is."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checkpoints import VOCAB, save_tiny

from engine.request import FinishReason
from engine.scheduling.beam_search import BeamSearch
from engine.scheduling.candidates import Candidates

Tokens = tuple[int, ...]
Model = Callable[[Tokens], list[float]]
"""Log probabilities of each token that may follow the tokens made so far."""

Result = tuple[Tokens, float, FinishReason]
EARLY_STOPPING: tuple[bool | str, ...] = (True, False, "never")


@dataclass(frozen=True)
class Case:
    """What a search is asked for."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    end_token_ids: frozenset[int] = frozenset()
    max_new_tokens: int = 6
    min_new_tokens: int = 0

    def search(self) -> BeamSearch:
        return BeamSearch(
            self.width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            end_token_ids=self.end_token_ids,
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
        )


def run(model: Model, case: Case) -> list[Result]:
    """All finished sequences, best first, of a search that sees no more of each row than it asks for."""
    search = case.search()
    beams: list[tuple[Tokens, float]] = [((), 0.0)]
    finished: list[Result] = []
    for generated in range(case.max_new_tokens):
        offers = []
        for tokens, total in beams:
            row = model(tokens)
            likeliest = sorted(range(len(row)), key=lambda token: -row[token])[: search.num_candidates]
            offers.append((total, Candidates(tuple(likeliest), tuple(row[token] for token in likeliest))))
        selection = search.select(offers, generated)
        finished += [
            ((*beams[parent][0], token), score, reason) for parent, token, score, reason in selection.finished
        ]
        assert len(selection.next) <= case.width
        assert selection.done == (not selection.next)
        beams = [((*beams[parent][0], token), total) for parent, token, total in selection.next]
        if selection.done:
            return sorted(finished, key=lambda result: -result[1])[: case.width]
    raise AssertionError("the search must be done after max_new_tokens")


def by_the_rules(model: Model, case: Case) -> list[Result]:
    """The rules step by step, over every token of every beam."""
    running: list[tuple[Tokens, float]] = [((), 0.0)]
    results: list[Result] = []
    for length in range(1, case.max_new_tokens + 1):
        extended: list[tuple[Tokens, float]] = []
        for tokens, total in running:
            for token, logprob in enumerate(model(tokens)):
                if token not in case.end_token_ids or length > case.min_new_tokens:
                    extended.append(((*tokens, token), total + logprob))
        extended.sort(key=lambda beam: beam[1], reverse=True)
        for tokens, total in extended[: case.width]:
            if tokens[-1] in case.end_token_ids:
                results.append((tokens, total / length**case.length_penalty, FinishReason.STOP))
            elif length == case.max_new_tokens:
                results.append((tokens, total / length**case.length_penalty, FinishReason.LENGTH))
        results = sorted(results, key=lambda result: -result[1])[: case.width]
        running = [beam for beam in extended if beam[0][-1] not in case.end_token_ids][: case.width]
        if not running:
            break
        if len(results) == case.width:
            if case.early_stopping is True or case.width == 1:
                break
            hoped = (
                case.max_new_tokens if case.early_stopping == "never" and case.length_penalty > 0 else length
            )
            if running[0][1] / hoped**case.length_penalty <= results[-1][1]:
                break
    return results


def table_model(seed: int, vocabulary: int, *, coarse: bool = False) -> Model:
    """Random distributions, a function of the prefix; ``coarse`` ones have many equal sums, all exact."""

    def model(tokens: Tokens) -> list[float]:
        draw = random.Random(f"{seed}:{tokens}")
        if coarse:
            return [-draw.randrange(1, 5) / 4 for _ in range(vocabulary)]
        weights = [draw.expovariate(1.0) ** 2 for _ in range(vocabulary)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return model


def same(found: list[Result], expected: list[Result]) -> bool:
    return [(tokens, reason) for tokens, _, reason in found] == [
        (tokens, reason) for tokens, _, reason in expected
    ] and [score for _, score, _ in found] == pytest.approx([score for _, score, _ in expected], abs=1e-12)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int]:
    """A search and the size of its vocabulary, sometimes so small that there are fewer beams than asked for."""
    vocabulary = draw(st.integers(2, 12))
    case = Case(
        width=draw(st.integers(1, 6)),
        length_penalty=draw(st.sampled_from((0.0, 0.6, 1.0, 2.0, -1.0))),
        early_stopping=draw(st.sampled_from(EARLY_STOPPING)),
        end_token_ids=draw(st.frozensets(st.integers(0, vocabulary - 1), max_size=3)),
        max_new_tokens=draw(st.integers(1, 8)),
        min_new_tokens=draw(st.integers(0, 3)),
    )
    return case, vocabulary


@settings(max_examples=400, deadline=None, derandomize=True)
@given(case_and_vocabulary=cases(), seed=st.integers(0, 2**32), coarse=st.booleans())
def test_selects_by_the_rules(case_and_vocabulary: tuple[Case, int], seed: int, coarse: bool) -> None:
    case, vocabulary = case_and_vocabulary
    model = table_model(seed, vocabulary, coarse=coarse)
    assert same(run(model, case), by_the_rules(model, case))


def every_sequence(model: Model, case: Case, vocabulary: int) -> Iterator[Result]:
    for length in range(1, case.max_new_tokens + 1):
        for tokens in itertools.product(range(vocabulary), repeat=length):
            stops = tokens[-1] in case.end_token_ids
            if not case.end_token_ids.isdisjoint(tokens[:-1]) or not (stops or length == case.max_new_tokens):
                continue
            total = sum(model(tokens[:index])[token] for index, token in enumerate(tokens))
            reason = FinishReason.STOP if stops else FinishReason.LENGTH
            yield tokens, total / length**case.length_penalty, reason


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(4))
def test_beams_enough_for_every_sequence_find_the_best_ones(seed: int, length_penalty: float) -> None:
    case = Case(200, length_penalty, end_token_ids=frozenset({2}), max_new_tokens=4)
    model = table_model(seed, 4)
    best = sorted(every_sequence(model, case, 4), key=lambda result: -result[1])
    assert len(best) == 1 + 3 + 9 + 27 * 4
    assert same(run(model, case), best)


def test_one_beam_is_greedy() -> None:
    for seed, early_stopping in itertools.product(range(20), EARLY_STOPPING):
        model = table_model(seed, 8)
        tokens: Tokens = ()
        while len(tokens) < 10 and 3 not in tokens:
            row = model(tokens)
            tokens += (row.index(max(row)),)
        case = Case(1, 2.0, early_stopping, frozenset({3}), max_new_tokens=10)
        assert [result[0] for result in run(model, case)] == [tokens]


def test_an_ending_beyond_the_best_width_is_no_result() -> None:
    search = Case(2, end_token_ids=frozenset({9}), max_new_tokens=5).search()
    selection = search.select([(0.0, Candidates((4, 5, 9), (-1.0, -1.5, -2.0)))], 0)
    assert selection.finished == []
    assert selection.next == [(0, 4, -1.0), (0, 5, -1.5)]
    selection = search.select(
        [(-1.0, Candidates((6, 9, 7), (-1.0, -1.5, -2.0))), (-1.5, Candidates((9,), (-3.0,)))], 1
    )
    assert selection.finished == [(0, 9, -1.25, FinishReason.STOP)]
    assert selection.next == [(0, 6, -2.0), (0, 7, -3.0)]
    assert not selection.done


def test_equal_sums_keep_the_order_of_beams_and_offers() -> None:
    search = Case(3, max_new_tokens=5).search()
    offers = [(-1.0, Candidates((8, 2), (-1.0, -1.0))), (-0.5, Candidates((7, 1), (-1.5, -1.5)))]
    assert search.select(offers, 1).next == [(0, 8, -2.0), (0, 2, -2.0), (1, 7, -2.0)]


def test_tokens_that_cannot_be_are_never_taken() -> None:
    search = Case(2, max_new_tokens=5).search()
    assert search.select([(0.0, Candidates((4, 5), (-1.0, -math.inf)))], 0).next == [(0, 4, -1.0)]
    selection = search.select([(-1.0, Candidates((4,), (-math.inf,)))], 1)
    assert selection.done
    assert selection.finished == []


@dataclass
class TransformersModel:
    """A tiny random Llama; the log probabilities come from its ``forward``, without a cache."""

    model: Any
    prompt: list[int]
    known: dict[Tokens, list[float]] = field(default_factory=dict)

    def __call__(self, tokens: Tokens) -> list[float]:
        if tokens not in self.known:
            with torch.inference_mode():
                logits = self.model(torch.tensor([[*self.prompt, *tokens]])).logits[0, -1]
            self.known[tokens] = torch.log_softmax(logits.float(), dim=-1).tolist()
        return self.known[tokens]

    def generate(self, case: Case, count: int) -> tuple[list[Tokens], list[float] | None]:
        """The sequences that transformers returns, and their scores unless its search is plain greedy."""
        made = self.model.generate(
            torch.tensor([self.prompt]),
            attention_mask=torch.ones(1, len(self.prompt), dtype=torch.long),
            num_beams=case.width,
            num_return_sequences=count,
            length_penalty=case.length_penalty,
            early_stopping=case.early_stopping,
            eos_token_id=sorted(case.end_token_ids) or None,
            max_new_tokens=case.max_new_tokens,
            min_new_tokens=case.min_new_tokens or None,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        sequences = []
        for row in made.sequences[:, len(self.prompt) :].tolist():
            ends = [index + 1 for index, token in enumerate(row) if token in case.end_token_ids]
            sequences.append(tuple(row[: ends[0]] if ends else row))
        return sequences, None if case.width == 1 else made.sequences_scores.tolist()


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TransformersModel:
    model = save_tiny(Path(tmp_path_factory.mktemp("beam")), "Llama", bos_token_id=None, eos_token_id=None)
    torch.set_num_threads(1)
    return TransformersModel(model, [5, 17, 60, 3, 42])


def endings(model: TransformersModel) -> list[frozenset[int]]:
    """None, a rare one, a likely one, several, and a third of the vocabulary."""
    first = model(())
    likely = sorted(range(1, VOCAB), key=lambda token: -first[token])
    return [
        frozenset(),
        frozenset({likely[50]}),
        frozenset({likely[1]}),
        frozenset(likely[3:12:3]),
        frozenset(range(2, VOCAB, 3)),
    ]


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("width", range(1, 7))
def test_equals_transformers(tiny_llama: TransformersModel, width: int, early_stopping: bool | str) -> None:
    stopped = 0
    for length_penalty, ending in itertools.product((0.0, 0.6, 1.0, 2.0, -1.0), endings(tiny_llama)):
        case = Case(width, length_penalty, early_stopping, ending, 7, 2 if length_penalty == 0.6 else 0)
        found = run(tiny_llama, case)
        count = max(1, width - max(0, int(length_penalty)))  # returning fewer changes no search
        sequences, scores = tiny_llama.generate(case, count)
        assert [tokens for tokens, _, _ in found[:count]] == sequences, case
        if scores is not None:
            assert [score for _, score, _ in found[:count]] == pytest.approx(scores, abs=2e-4), case
        stopped += sum(reason is FinishReason.STOP for _, _, reason in found)
    assert stopped
