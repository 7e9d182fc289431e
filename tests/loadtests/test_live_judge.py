"""Live runs against their bars, and what counts of each request."""

from __future__ import annotations

import math

import pytest

from app.config import ROUTERS
from loadtests.client import Outcome
from loadtests.experiments.routing_live.command import parser
from loadtests.experiments.routing_live.judge import COMPARED, HEADER, cached_share, counted, figures, rows
from loadtests.experiments.routing_live.stage import LiveArm, Reply, Run
from loadtests.experiments.routing_live.traffic import Ask

SYSTEM = 400


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
    return Reply(Ask(0.0, 0, "?", 24), due, outcome)


LOST = Reply(Ask(0.0, 0, "?", 24), 11.0, Outcome())


def run(*replies: Reply, made: tuple[int, ...] = (2, 1), arm: LiveArm = LiveArm.PREFIX) -> Run:
    return Run(arm, 1, replies, (10.0, 20.0), made)


def verdicts(ours: Run, two: Run) -> list[bool]:
    made = figures({LiveArm.PREFIX: [ours], LiveArm.POWER_OF_TWO: [two]}, SYSTEM)
    return [figure.holds for figure in made if figure.bar is not None]


def test_figures_are_of_the_window() -> None:
    before, late = reply(5.0, 2.0, 12.0), reply(19.0, 4.0, 25.0)
    found = run(before, reply(11.0, 0.5), reply(12.0, 1.5, prompt=460, cached=0), late)
    assert [one.due for one in found.counted] == [11.0, 12.0, 19.0]
    assert found.throughput == 3 * 24 / 10  # the one that came before ended within, the last one did not
    assert cached_share(counted([found])) == 800 / (440 + 460 + 440)
    assert found.balance == pytest.approx(4 / 3)
    assert (found.refused, found.broken) == (0, 0)


def test_whatever_did_not_end_well_is_counted() -> None:
    found = run(reply(), LOST, reply(status=503), reply(done=False), reply(tokens=23))
    assert (found.refused, found.broken) == (2, 2)
    assert found.throughput == 24 / 10
    assert LOST.ttft == math.inf
    assert (LOST.prompt_tokens, LOST.cached_tokens) == (0, 0)


def test_bars_hold_at_their_edge_and_not_beyond() -> None:
    ours, two = [reply(ttft=0.6, cached=380)] * 15, [reply(ttft=1.0, cached=0)] * 10
    assert verdicts(run(*ours), run(*two)) == [True] * 5
    ours = [reply(ttft=0.61, cached=379)] * 14
    assert verdicts(run(*ours), run(*two)) == [True, True, False, False, False]


def test_failures_are_held_against_every_arm() -> None:
    assert verdicts(run(*[reply(ttft=0.1)] * 15), run(*[reply()] * 9, LOST))[:2] == [True, False]


def test_without_the_other_arm_there_is_no_comparison() -> None:
    names = [figure.name for figure in figures({LiveArm.PREFIX: [run(reply())]}, SYSTEM)]
    assert names == ["prefix: requests that failed", "prefix: cached share of prompt tokens, of an oracle's"]
    assert len(figures({LiveArm.ROUND_ROBIN: [run(reply())]}, SYSTEM)) == 1


def test_rays_own_prefix_router_is_shown_without_a_bar() -> None:
    affinity = [run(reply(ttft=1.0))]
    made = figures({LiveArm.PREFIX: [run(reply(), reply())], LiveArm.PREFIX_AFFINITY: affinity}, SYSTEM)
    assert [(figure.value, figure.bar) for figure in made[3:]] == [(2.0, None), (0.5, None)]


def test_a_request_without_a_token_has_waited_for_ever() -> None:
    lost = {LiveArm.PREFIX: [run(LOST)], LiveArm.POWER_OF_TWO: [run(reply())]}
    assert figures(lost, SYSTEM)[-1].value == math.inf
    assert not figures(lost, SYSTEM)[-1].holds


def test_the_table_counts_what_was_not_200_and_what_broke() -> None:
    table = rows({LiveArm.PREFIX: [run(LOST, reply(done=False), reply(done=False))], LiveArm.ROUND_ROBIN: []})
    assert len(table) == 1
    assert len(table[0]) == len(HEADER)
    assert table[0][-3:] == ["3", "1", "2"]


def test_the_command_takes_arms_by_name() -> None:
    assert parser().parse_args([]).arms == list(COMPARED)
    assert parser().parse_args(["--arms", "round_robin"]).arms == [LiveArm.ROUND_ROBIN]
    with pytest.raises(SystemExit):
        parser().parse_args(["--arms", "nothing"])


@pytest.mark.parametrize("option", ["--rate", "--load"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "fast"])
def test_rates_and_loads_that_no_run_can_have_are_refused(option: str, value: str) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([option, value])


def test_every_routing_of_the_application_is_an_arm() -> None:
    assert list(LiveArm) == list(ROUTERS)
