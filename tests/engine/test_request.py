"""The gate: what passes it has the right types and values; everything else is refused with words."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from bad_requests import BAD, GOOD
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequestError, shown
from engine.request import MAX_PROMPT_SCORES, ModelLimits, Request, check, check_size
from engine.sampling_params import SamplingParams

LIMITS = ModelLimits(vocab_size=100, max_model_len=64, num_blocks=16, block_size=4)


@pytest.mark.parametrize("name", BAD)
def test_what_no_engine_can_take_is_refused(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(InvalidRequestError) as caught:
            check(replace(GOOD, **{name: value}), LIMITS)
        assert len(caught.value.message) < 250


@pytest.mark.parametrize("value", [None, "a", {"request_id": "a"}, Request])
def test_only_a_request_is_a_request(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="Request"):
        check(value, LIMITS)


def test_a_good_one_passes() -> None:
    assert check(GOOD, LIMITS) == 8
    continued = replace(GOOD, generated_before=2, arrival=-3.5, priority=-7)
    assert check(continued, LIMITS) == 6
    assert check(replace(GOOD, outputs=((1,), None, ())), LIMITS) == 8


def test_a_seed_changes_nothing_else() -> None:
    """For each of 256 prompts with 64 biases and 1,024 allowed ids, their check held up a loop for 40 ms."""
    params = SamplingParams(logit_bias={5: 1.5}, allowed_token_ids=(1, 2), bad_words=[[3, 4]], min_p=0.1)
    seeded = params.with_seed(7)
    assert seeded == replace(params, seed=7)
    assert params.seed is None
    assert all(
        getattr(seeded, each.name) is getattr(params, each.name)
        for each in fields(params)
        if each.name != "seed"
    )


def test_so_many_log_probabilities_of_a_prompt_and_no_more() -> None:
    limits = ModelLimits(vocab_size=100, max_model_len=2**20, num_blocks=2**20, block_size=4)
    for top, most in ((0, MAX_PROMPT_SCORES), (20, MAX_PROMPT_SCORES // 21)):
        params = SamplingParams(max_tokens=1, prompt_logprobs=top)
        assert check_size(most, params, limits) == most + 1
        with pytest.raises(
            InvalidRequestError, match=f"but at most {MAX_PROMPT_SCORES} are returned"
        ) as caught:
            check_size(most + 1, params, limits)
        assert caught.value.param == "prompt_logprobs"
    assert check_size(most + 1, SamplingParams(max_tokens=1), limits) == most + 2


@pytest.mark.parametrize(("prompt", "words"), [(1, "prompt of 1 token with "), (2, "prompt of 2 tokens with ")])
@pytest.mark.parametrize("context", [64, 2**10])
def test_one_token_is_singular(prompt: int, words: str, context: int) -> None:
    """Whether the context is too short or the pool too small."""
    limits = replace(LIMITS, max_model_len=context)
    with pytest.raises(InvalidRequestError) as caught:
        check_size(prompt, SamplingParams(max_tokens=64), limits)
    assert caught.value.message.startswith(words)


def test_a_prompt_that_is_only_scored_may_fill_the_context() -> None:
    only_scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    large, small = replace(LIMITS, num_blocks=17), replace(LIMITS, max_model_len=2**10)
    assert check_size(64, only_scored, large) == 64
    with pytest.raises(InvalidRequestError) as caught:
        check_size(65, only_scored, large)
    assert caught.value.code == "context_length_exceeded"
    assert check_size(63, only_scored, small) == 63  # where the pool is what limits, a place stays free
    with pytest.raises(InvalidRequestError) as caught:
        check_size(64, only_scored, small)
    assert caught.value.code == "kv_pool_exceeded"


@pytest.mark.parametrize("output", [0, 1, 2, 30])
@pytest.mark.parametrize(
    "limits", [replace(LIMITS, num_blocks=17), replace(LIMITS, max_model_len=2**10), LIMITS]
)
def test_the_longest_prompt_is_the_longest_that_passes(limits: ModelLimits, output: int) -> None:
    params = SamplingParams(max_tokens=output, prompt_logprobs=0)
    longest = limits.longest_prompt(output)
    assert check_size(longest, params, limits) == longest + output
    with pytest.raises(InvalidRequestError):
        check_size(longest + 1, params, limits)


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(np.int64(3))
ANYTHING |= st.lists(ANYTHING, max_size=3) | st.tuples(ANYTHING, ANYTHING)
FIELDS = [field.name for field in fields(SamplingParams)]


@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=3))
def test_sampling_params_have_the_types_that_they_say_or_do_not_exist(given_fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**given_fields)
    except InvalidRequestError:
        return
    for name in ("min_tokens", "top_k", "n", "width"):
        assert type(getattr(params, name)) is int
    for name in ("ignore_eos", "use_beam_search"):
        assert type(getattr(params, name)) is bool
    assert all(type(token) is int for token in params.stop_token_ids)
    assert type(params.stop_token_ids) is tuple
    for name in ("temperature", "top_p", "min_p", "length_penalty"):
        assert type(getattr(params, name)) in (int, float)
    hash(params)


class Odd:
    def __repr__(self) -> str:
        raise ValueError


def test_values_are_shown_short() -> None:
    for value in ("x" * 10_000, "a\nb", [1] * 10_000, 10**5000, -(10**5000), 1.5, Odd(), {1: 2}):
        assert len(shown(value)) < 120
        assert "\n" not in shown(value)
