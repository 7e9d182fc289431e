"""Live runs of routing: their bars, what counts of each request, and what is asked."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from app.api.openai_types import ChatMessage
from app.api.prompt_tokenizer import PromptTokenizer
from app.api.tokenizer_parts import TokenizerParts
from app.config import ROUTERS
from loadtests.client import Outcome
from loadtests.experiments.routing_live import (
    ANSWER,
    BLOCK_SIZE,
    COMPARED,
    GROUPS,
    HELD,
    MAX_NUM_SEQS,
    OURS,
    Ask,
    Reply,
    Run,
    Traffic,
    cached_share,
    failed,
    figures_of,
    messages_of,
    pool_blocks,
)

SYSTEMS = [400, 415]


def reply(
    due: float = 11.0,
    ttft: float = 0.5,
    ended: float = 15.0,
    *,
    prompt: int = 440,
    cached: int = 400,
    tokens: int = 24,
    status: int = 200,
    done: bool = True,
) -> Reply:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    events = [{"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]}, {"usage": usage}]
    outcome = Outcome(status, events, [due + ttft, ended], done, asked=24, ended=ended)
    return Reply(Ask(0.0, 1, "?", 24), due, outcome)


LOST = Reply(Ask(0.0, 0, "?", 24), 11.0, Outcome())


def run(*replies: Reply) -> Run:
    return Run(replies, (10.0, 20.0))


def verdicts(ours: Run, two: Run) -> list[bool]:
    made = figures_of({OURS: [ours], "power_of_two": [two]}, SYSTEMS)
    return [figure.holds for figure in made if figure.bar is not None]


def test_figures_are_of_the_window() -> None:
    before, late = reply(5.0, 2.0, 12.0), reply(19.0, 4.0, 25.0)
    found = run(before, reply(11.0, 0.5), reply(12.0, 1.5, prompt=460, cached=0), late)
    assert [one.due for one in found.counted] == [11.0, 12.0, 19.0]
    assert found.throughput == 3 * 24 / 10  # the one that came before ended within, the last one did not
    assert cached_share([found]) == 800 / (440 + 460 + 440)
    assert cached_share([found], SYSTEMS) == 1200 / (440 + 460 + 440)  # whole blocks
    assert failed([found]) == 0


def test_whatever_did_not_end_well_is_counted() -> None:
    found = run(reply(), LOST, reply(status=503), reply(done=False), reply(tokens=23))
    assert failed([found]) == 4
    assert found.throughput == 24 / 10
    assert LOST.ttft == math.inf
    assert (LOST.prompt_tokens, LOST.cached_tokens) == (0, 0)


def test_bars_hold_at_their_edge_and_not_beyond() -> None:
    two = [reply(ttft=1.0, cached=0)] * 10
    ours = [*[reply(ttft=0.6, cached=380)] * 9, reply(ttft=0.6, cached=380, ended=25.0)]
    assert verdicts(run(*ours), run(*two)) == [True] * 5
    ours = [*[reply(ttft=0.61, cached=379)] * 8, reply(ttft=0.61, cached=379, ended=25.0)]
    assert verdicts(run(*ours), run(*two)) == [True, True, False, False, False]


def test_failures_are_held_against_every_arm() -> None:
    assert verdicts(run(*[reply(ttft=0.1)] * 15), run(*[reply()] * 9, LOST))[:2] == [True, False]


def test_without_the_other_arm_there_is_no_comparison() -> None:
    names = [figure.name for figure in figures_of({OURS: [run(reply())]}, SYSTEMS)]
    shares = ["cached share of prompt tokens, of an oracle's", "output, of what was asked for"]
    assert names == [f"prefix: {name}" for name in ("requests that failed", *shares)]
    assert len(figures_of({"round_robin": [run(reply())]}, SYSTEMS)) == 1


def test_rays_own_prefix_router_is_shown_without_a_bar() -> None:
    made = figures_of({OURS: [run(reply(), reply())], "prefix_affinity": [run(reply(ttft=1.0))]}, SYSTEMS)
    assert [(figure.value, figure.bar) for figure in made[4:]] == [(2.0, None), (0.5, None)]


def test_a_request_without_a_token_has_waited_for_ever() -> None:
    lost = {OURS: [run(LOST)], "power_of_two": [run(reply())]}
    assert figures_of(lost, SYSTEMS)[-1].value == math.inf
    assert not figures_of(lost, SYSTEMS)[-1].holds


def test_the_arms_are_routings_of_the_application() -> None:
    assert {OURS, *COMPARED} <= set(ROUTERS)


@pytest.fixture(scope="module")
def tokenizer(bundled_model: Path) -> PromptTokenizer:
    return PromptTokenizer(TokenizerParts.read(bundled_model))


@pytest.fixture(scope="module")
def traffic(tokenizer: PromptTokenizer) -> Traffic:
    return asyncio.run(Traffic.make(tokenizer))


def test_prompts_of_a_group_share_its_system_prompt_and_no_more(
    tokenizer: PromptTokenizer, traffic: Traffic
) -> None:
    by_group: dict[int, list[list[int]]] = {}
    for ask in traffic.poisson(20.0, 5.0, seed=1):
        messages = [ChatMessage(**message) for message in messages_of(ask.group, ask.question)]
        by_group.setdefault(ask.group, []).append(asyncio.run(tokenizer.encode_chat(messages, 1000)))
    assert sorted(by_group) == list(range(GROUPS))
    for group, prompts in by_group.items():
        system = traffic.systems[group]
        assert 380 <= system <= 420
        assert len({tuple(prompt[:system]) for prompt in prompts}) == 1
        ends = [tuple(prompt[system : system + BLOCK_SIZE]) for prompt in prompts]
        assert len(set(ends)) == len(ends)  # no block of a question is another's
        assert max(map(len, prompts)) <= max(traffic.systems) + traffic.longest_question
    openings = {tuple(prompts[0][: 2 * BLOCK_SIZE]) for prompts in by_group.values()}
    assert len(openings) == len(by_group)


def test_arrivals_depend_on_the_seed_alone(traffic: Traffic) -> None:
    one = traffic.poisson(50.0, 20.0, seed=1)
    assert one == traffic.poisson(50.0, 20.0, seed=1)
    assert one != traffic.poisson(50.0, 20.0, seed=2)
    assert [ask.t for ask in one] == sorted(ask.t for ask in one)
    assert len(one) == pytest.approx(1000, rel=0.15)
    assert {ask.output for ask in one} == set(range(ANSWER[0], ANSWER[1] + 1))


def test_a_lap_asks_for_each_system_prompt_once(traffic: Traffic) -> None:
    assert sorted(ask.group for ask in traffic.lap(1)) == list(range(GROUPS))


def test_a_pool_holds_its_share_of_the_prompts_beside_the_running_requests() -> None:
    assert pool_blocks(Traffic([400] * 8, 40)) == round(HELD * 8 * 25) + MAX_NUM_SEQS * 4
