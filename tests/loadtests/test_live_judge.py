"""Live runs against their bars, and how replies become a recording."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.config import ROUTERS
from loadtests.client import Outcome
from loadtests.experiments.routing_live.command import parser
from loadtests.experiments.routing_live.judge import HEADER, figures, rows
from loadtests.experiments.routing_live.recording import Arrival, LiveFleet, Recording
from loadtests.experiments.routing_live.stage import LiveArm, Reply, arrivals
from loadtests.experiments.routing_live.traffic import Ask

FLEET = LiveFleet("prefix", 1, 2, 168, 16, 8, 64, 400, 220.0, 0.03, 0.005, 1e-6, 0.0, 10.0)


def run(count: int, cached: int, ttft: float, *, status: int = 200) -> Recording:
    """``count`` requests that all end within the window."""
    arrival = Arrival(1.0, 0, 440, 24, "a", cached, ttft, status, 9.0)
    return Recording(FLEET, (arrival,) * count)


def verdicts(ours: Recording, two: Recording, oracle: float) -> list[bool]:
    made = figures({LiveArm.PREFIX: [ours], LiveArm.POWER_OF_TWO: [two]}, [oracle])
    return [figure.holds for figure in made if figure.bar is not None]


def test_bars_hold_at_their_edge_and_not_beyond() -> None:
    assert verdicts(run(15, 380, 0.6), run(10, 200, 1.0), 400 / 440) == [True] * 5
    assert verdicts(run(14, 379, 0.61), run(10, 200, 1.0), 400 / 440) == [True, True, False, False, False]


def test_rays_own_prefix_router_is_shown_without_a_bar() -> None:
    made = figures({LiveArm.PREFIX: [run(10, 400, 0.5)], LiveArm.PREFIX_AFFINITY: [run(5, 400, 1.0)]})
    assert [(figure.value, figure.bar) for figure in made[2:]] == [(2.0, None), (0.5, None)]


def test_failures_are_held_against_every_arm() -> None:
    assert verdicts(run(15, 400, 0.1), run(10, 200, 1.0, status=503), 0.9)[:2] == [True, False]


def test_without_the_other_arm_there_is_no_comparison() -> None:
    made = figures({LiveArm.PREFIX: [run(10, 400, 0.5)]})
    assert [figure.name for figure in made] == ["prefix: requests that failed"]


def test_a_request_without_a_token_has_waited_for_ever() -> None:
    lost = replace(run(1, 0, 0.5).arrivals[0], ttft=None)
    ours = Recording(FLEET, (lost,) * 3)
    ratio = figures({LiveArm.PREFIX: [ours], LiveArm.POWER_OF_TWO: [run(3, 0, 1.0)]})[-1]
    assert ratio.value == float("inf")
    assert not ratio.holds


def test_the_table_counts_what_was_not_200_and_what_broke() -> None:
    refused = replace(run(1, 0, 0.5).arrivals[0], status=503, ended=None)
    broken = replace(refused, status=200)
    table = rows({LiveArm.PREFIX: [Recording(FLEET, (refused, broken, broken))], LiveArm.ROUND_ROBIN: []})
    assert len(table) == 1
    assert len(table[0]) == len(HEADER)
    assert table[0][-3:] == ["3", "1", "2"]


def test_replies_become_arrivals_with_the_replica_that_ran_them() -> None:
    end = {"id": "chatcmpl-x", "choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]}
    usage = {
        "prompt_tokens": 440,
        "completion_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 400},
    }
    events = [end, {"id": "chatcmpl-x", "choices": [], "usage": usage}]
    came = Outcome(200, events, [101.5, 102.5], True, asked=20, ended=103.0)
    good = Reply(Ask(1.0, 2, "?", 20), 101.0, came)
    lost = Reply(Ask(0.5, 1, "?", 20), 100.5, Outcome())
    short = Reply(Ask(1.5, 2, "?", 21), 101.5, came)
    states = [{"replica": "a", "begun": ["chatcmpl-x-0"]}, {"replica": "b", "begun": ["chatcmpl-y-0"]}]
    made = arrivals([good, lost, short], states, 100.0)
    assert made == (
        Arrival(0.5, 1, 0, 0, "", 0, None, 0, None),
        Arrival(1.0, 2, 440, 20, "a", 400, 0.5, 200, 3.0),
        Arrival(1.5, 2, 440, 20, "a", 400, 0.0, 200, None),
    )
    assert short.fault == "20 tokens instead of 21"


def test_the_command_takes_arms_by_name() -> None:
    assert parser().parse_args([]).arms == [LiveArm.PREFIX, LiveArm.POWER_OF_TWO, LiveArm.PREFIX_AFFINITY]
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
