"""What the prompts of one response must keep to together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.api.caller import Caller
from app.api.choices import GenerationJob
from app.api.key_limits import KeyLimits
from app.api.keys import ApiKey
from app.api.openai_types import parse_chat, parse_completion
from app.api.prompt_limits import check_prompts, kept_tokens, within_context, within_logprobs
from app.fleet.fleet_limits import FleetLimits
from engine.errors import InvalidRequestError
from engine.request import MAX_PROMPT_SCORES, ModelLimits
from engine.structured_output import StructuredOutput

LIMITS = FleetLimits((ModelLimits(vocab_size=100, max_model_len=2**20, num_blocks=2**20, block_size=4),))

SMALL = FleetLimits((ModelLimits(vocab_size=100, max_model_len=64, num_blocks=16, block_size=4),))


def job(prompts: list[list[int]], **fields: int | None) -> GenerationJob:
    options = parse_completion({"prompt": "a", "max_tokens": 1, **fields}).options
    return GenerationJob(options, prompts, False, Caller("", "test"))


def test_all_prompts_together_have_so_many_log_probabilities() -> None:
    half = [7] * (MAX_PROMPT_SCORES // 4)
    check_prompts(job([half, half], prompt_logprobs=1), LIMITS)
    check_prompts(job([half, half, [7]]), LIMITS)
    with pytest.raises(InvalidRequestError, match="log probabilities of the prompt, but at most"):
        check_prompts(job([half, half, [7]], prompt_logprobs=1), LIMITS)


@pytest.mark.parametrize("named", ["allowed_token_ids", "bad_words"])
def test_the_ids_that_go_with_each_prompt_are_limited(named: str) -> None:
    """256 prompts with a whole vocabulary stopped the loops of ingress and engine for seconds."""
    limits = FleetLimits((ModelLimits(vocab_size=2000, max_model_len=64, num_blocks=16, block_size=4),))

    def asked(prompts: int, ids: int) -> GenerationJob:
        plain = job([[7]] * prompts)
        words = (*((token,) for token in range(200)), (1,) * (ids - 200))
        edits = {"allowed_token_ids": tuple(range(ids)), "bad_words": words}
        params = replace(plain.options.params, **{named: edits[named]})
        return replace(plain, options=replace(plain.options, params=params))

    check_prompts(asked(1024, 256), limits)
    with pytest.raises(InvalidRequestError, match=rf"1024 entries, and {named} has 257 .* 262144") as caught:
        check_prompts(asked(1024, 257), limits)
    assert caught.value.param == named


def test_the_biases_that_go_with_each_prompt_are_limited() -> None:
    """256 prompts with 1,024 of them held up the ingress's loop for half a second."""

    def asked(prompts: int, biases: int) -> GenerationJob:
        plain = job([[7]] * prompts)
        params = replace(plain.options.params, logit_bias=dict.fromkeys(range(biases), 1.0))
        return replace(plain, options=replace(plain.options, params=params))

    limits = FleetLimits((ModelLimits(vocab_size=2000, max_model_len=64, num_blocks=16, block_size=4),))
    check_prompts(asked(16, 1024), limits)
    check_prompts(asked(256, 64), limits)
    said = "256 entries, and logit_bias has 65 for each, .* 16384 "
    with pytest.raises(InvalidRequestError, match=said) as caught:
        check_prompts(asked(256, 65), limits)
    assert caught.value.param == "logit_bias"


def test_the_form_that_goes_with_each_prompt_is_limited() -> None:
    """A form goes to an engine with each prompt, so 256 prompts multiply what it costs."""

    def asked(prompts: int, chars: int) -> GenerationJob:
        plain = job([[7]] * prompts)
        params = replace(plain.options.params, structured_output=StructuredOutput("regex", "a" * chars))
        return replace(plain, options=replace(plain.options, params=params))

    check_prompts(asked(256, 4096), LIMITS)
    said = "256 entries, and the form of the output has 4097 characters for each, .* 1048576 "
    with pytest.raises(InvalidRequestError, match=said) as caught:
        check_prompts(asked(256, 4097), LIMITS)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_tokens": 10, "logprobs": 0}, 20),
        ({"max_tokens": 10, "logprobs": 4}, 100),
        ({"max_tokens": 10, "logprobs": 4, "n": 3}, 300),
        ({"max_tokens": 10, "logprobs": 4, "n": 3, "best_of": 5}, 500),
    ],
)
def test_the_log_probabilities_of_all_output_tokens_have_a_limit(fields: dict[str, int], most: int) -> None:
    asked = job([[1], [2]], **fields)
    assert within_logprobs(asked, LIMITS, most) is asked
    said = rf" {most} log probabilities, but one response has at most {most - 1} \(max_response_logprobs\)"
    with pytest.raises(InvalidRequestError, match=said):
        within_logprobs(asked, LIMITS, most - 1)
    streamed = job([[1], [2]], **{**fields, "best_of": None}, stream=True)
    assert within_logprobs(streamed, LIMITS, 1) is streamed
    repeated = replace(streamed, repeats=4)
    if "best_of" not in fields:
        assert within_logprobs(repeated, LIMITS, 4 * most) is repeated
        with pytest.raises(InvalidRequestError, match=f"at most {most - 1} .*alternatives$"):
            within_logprobs(repeated, LIMITS, 4 * most - 1)
    unscored = job([[1], [2]], **{**fields, "logprobs": None})
    assert within_logprobs(unscored, LIMITS, 1) is unscored


def test_output_of_any_length_ends_where_its_log_probabilities_reach_the_limit() -> None:
    options = parse_chat({"messages": [{"role": "user", "content": "a"}], "logprobs": True, "n": 2}).options
    asked = GenerationJob(options, [[1] * 8], True, Caller("", "test"))
    assert within_logprobs(asked, LIMITS, 100).options.params.max_tokens == 50
    room = LIMITS.max_tokens - 8
    assert within_logprobs(asked, LIMITS, 2 * room - 1).options.params.max_tokens == room - 1
    assert within_logprobs(asked, LIMITS, 2 * room) is asked
    with pytest.raises(InvalidRequestError, match="max_response_logprobs"):
        within_logprobs(asked, LIMITS, 1)


@pytest.mark.parametrize(("context", "longest"), [(64, 64), (2**10, 67)])
def test_a_prompt_that_is_only_scored_fills_the_context(context: int, longest: int) -> None:
    """Or all of the pool but one place."""
    limits = FleetLimits((replace(SMALL.each[0], max_model_len=context, num_blocks=17),))
    scored = job([[7] * longest], max_tokens=0, echo=True, logprobs=1)
    check_prompts(scored, limits)
    with pytest.raises(InvalidRequestError, match=f"prompt of {longest + 1} tokens"):
        check_prompts(replace(scored, prompts=[[7] * (longest + 1)]), limits)
    shortened = job([], max_tokens=0, echo=True, truncate_prompt_tokens=-1)
    assert kept_tokens(shortened.options, limits, None) == longest


@pytest.mark.parametrize(
    ("fields", "kept"),
    [({"max_tokens": 10}, 30), ({}, 39), ({"max_tokens": 50}, 1), ({"truncate_prompt_tokens": 99}, 99)],
)
def test_a_shortened_prompt_fits_the_keys_context(fields: dict[str, object], kept: int) -> None:
    key = KeyLimits(ApiKey(id="k", sha256="0" * 64, max_context_tokens=40))
    assert kept_tokens(job([], **{"truncate_prompt_tokens": -1, **fields}).options, LIMITS, key) == kept


def test_a_keys_context_that_exceeds_the_models_limits_nothing() -> None:
    """Without ``max_tokens`` the output ends with the shorter of the two."""
    options = parse_chat({"messages": [{"role": "user", "content": "a"}]}).options
    asked = GenerationJob(options, [[1] * 8, [1]], True, Caller("", "test"))
    for context, most in ((LIMITS.max_tokens + 1, None), (LIMITS.max_tokens, None), (100, 92)):
        key = KeyLimits(ApiKey(id="k", sha256="0" * 64, max_context_tokens=context))
        kept = within_context(asked, key, LIMITS)
        assert kept.options.params.max_tokens == most
        check_prompts(kept, LIMITS)


def test_one_of_each_is_singular() -> None:
    with pytest.raises(InvalidRequestError, match=r"^1 sequence of up to 1 token with 1 alternative each"):
        within_logprobs(job([[1]], logprobs=1), LIMITS, 1)
    fields = {"messages": [{"role": "user", "content": "a"}], "min_tokens": 64}
    asked = GenerationJob(parse_chat(fields).options, [[1]], True, Caller("", "test"))
    with pytest.raises(InvalidRequestError, match="after a prompt of 1 token at most 63 more can"):
        check_prompts(asked, SMALL)
