"""What live runs ask: prompts of the lengths that they say, arrivals that depend on the seed alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.api.openai_types import ChatMessage
from app.api.prompt_tokenizer import PromptTokenizer
from loadtests.experiments.routing_live.stage import BLOCK_SIZE, MAX_NUM_SEQS, pool_blocks
from loadtests.experiments.routing_live.traffic import Ask, Shape, Traffic

SHAPE = Shape(groups=3, system=128)


@pytest.fixture(scope="module")
def tokenizer(bundled_model: Path) -> PromptTokenizer:
    return PromptTokenizer(bundled_model)


@pytest.fixture(scope="module")
def traffic(tokenizer: PromptTokenizer) -> Traffic:
    return asyncio.run(Traffic.make(SHAPE, tokenizer))


def encode(tokenizer: PromptTokenizer, traffic: Traffic, ask: Ask) -> list[int]:
    messages = [ChatMessage(message["role"], message["content"]) for message in traffic.messages(ask)]
    return asyncio.run(tokenizer.encode_chat(messages, 1000))


def test_prompts_of_a_group_share_its_system_prompt_and_no_more(
    tokenizer: PromptTokenizer, traffic: Traffic
) -> None:
    asks = traffic.poisson(20.0, 5.0, seed=1)
    by_group: dict[int, list[list[int]]] = {}
    for ask in asks:
        by_group.setdefault(ask.group, []).append(encode(tokenizer, traffic, ask))
    assert sorted(by_group) == [0, 1, 2]
    for prompts in by_group.values():
        assert len({tuple(prompt[: SHAPE.system]) for prompt in prompts}) == 1
        ends = [tuple(prompt[SHAPE.system : SHAPE.system + BLOCK_SIZE]) for prompt in prompts]
        assert len(set(ends)) == len(ends)  # no block of a question is another's
        assert max(map(len, prompts)) <= SHAPE.system + traffic.longest_question
    openings = {tuple(prompts[0][: 2 * BLOCK_SIZE]) for prompts in by_group.values()}
    assert len(openings) == len(by_group)


def test_arrivals_depend_on_the_seed_alone(traffic: Traffic) -> None:
    one = traffic.poisson(50.0, 20.0, seed=1)
    assert one == traffic.poisson(50.0, 20.0, seed=1)
    assert one != traffic.poisson(50.0, 20.0, seed=2)
    assert [ask.t for ask in one] == sorted(ask.t for ask in one)
    assert one[-1].t < 20.0
    assert len(one) == pytest.approx(1000, rel=0.15)
    assert {ask.output for ask in one} == set(range(SHAPE.output[0], SHAPE.output[1] + 1))


def test_a_lap_asks_for_each_system_prompt_once(traffic: Traffic) -> None:
    assert sorted(ask.group for ask in traffic.lap(1)) == [0, 1, 2]


def test_a_pool_holds_its_share_of_the_prompts_beside_the_running_requests(traffic: Traffic) -> None:
    own = -(-(traffic.longest_question + SHAPE.output[1]) // BLOCK_SIZE)
    assert pool_blocks(traffic) == round(0.6 * 3 * 8) + MAX_NUM_SEQS * own
    assert pool_blocks(traffic, held=1.0, max_num_seqs=0) == 3 * 8


def test_a_system_prompt_shorter_than_the_template_is_refused(tokenizer: PromptTokenizer) -> None:
    with pytest.raises(ValueError, match="too short"):
        asyncio.run(Traffic.make(Shape(groups=1, system=4), tokenizer))
