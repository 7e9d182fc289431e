"""What the prompts of one response must keep to together."""

from __future__ import annotations

import pytest

from app.api.caller import Caller
from app.api.choices import GenerationJob
from app.api.openai_types import parse_completion
from app.api.prompt_limits import check_prompts
from app.fleet.fleet_limits import FleetLimits
from engine.errors import InvalidRequestError
from engine.request import MAX_PROMPT_SCORES, ModelLimits

LIMITS = FleetLimits((ModelLimits(vocab_size=100, max_model_len=2**20, num_blocks=2**20, block_size=4),))


def job(prompts: list[list[int]], **fields: int) -> GenerationJob:
    options = parse_completion({"prompt": "a", "max_tokens": 1, **fields}).options
    return GenerationJob(options, prompts, False, Caller("", "test"))


def test_all_prompts_together_have_so_many_log_probabilities() -> None:
    half = [7] * (MAX_PROMPT_SCORES // 4)
    check_prompts(job([half, half], prompt_logprobs=1), LIMITS)
    check_prompts(job([half, half, [7]]), LIMITS)
    with pytest.raises(InvalidRequestError, match="log probabilities of the prompt, but at most"):
        check_prompts(job([half, half, [7]], prompt_logprobs=1), LIMITS)
