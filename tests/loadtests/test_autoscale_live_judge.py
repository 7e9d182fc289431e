"""What the live run of autoscaling makes of what it saw, on recordings whose answer is known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from loadtests.client import Outcome
from loadtests.experiments.autoscale_live import judge
from loadtests.experiments.autoscale_live.judge import Recording
from loadtests.experiments.autoscale_live.plan import BLOCK_SIZE, FULL, MOST_TOKENS, POOL_BLOCKS, QUICK, STREAMS
from loadtests.experiments.autoscale_live.watch import EngineLook, ServeLook


def serve(
    at: float, target: int, *running: str, stopping: str = "", ended: str = "", other: str = ""
) -> ServeLook:
    """``stopping``, ``ended`` and ``other`` (recovering) are replicas of one letter each."""
    states = dict.fromkeys(running, "RUNNING")
    states |= dict.fromkeys(stopping, "STOPPING") | dict.fromkeys(other, "RECOVERING")
    return ServeLook(at, target, states, frozenset(ended))


def engine(at: float, waiting: int = 0) -> EngineLook:
    return EngineLook(at, waiting, 0)


def request(
    began: float = 0.0, ended: float = 100.0, tokens: int = 4, said: int = 4, **outcome: object
) -> Outcome:
    end = {"choices": [{"text": "a", "finish_reason": "length"}]}
    usage = {"choices": [], "usage": {"completion_tokens": said}}
    good: dict[str, Any] = {"status": 200, "events": [end, usage], "times": [began + 1.0, ended], "done": True}
    return Outcome(asked=tokens, began=began, ended=ended, **good | outcome)


UP = [serve(0.0, 1, "a"), serve(1.0, 1, "a"), serve(2.0, 2, "a"), serve(9.0, 2, "a", "b")]
DOWN = [serve(20.0, 1, "a", "b"), serve(20.5, 1, "a", stopping="b"), serve(22.0, 1, "a", ended="b")]


def test_reaction_is_from_before_the_first_one_that_waits() -> None:
    engines = [engine(0.5), engine(1.1), engine(1.3), engine(1.4, 3)]
    assert judge.reaction(1.0, UP, engines) == pytest.approx(2.0 - 1.3)


def test_reaction_is_at_most_from_the_rise() -> None:
    """Who waited before the rise is of no account."""
    assert judge.reaction(1.0, UP, [engine(0.9, 2), engine(1.5, 3)]) == pytest.approx(1.0)


def test_reaction_without_anybody_waiting_or_without_an_up_is_infinite() -> None:
    assert judge.reaction(1.0, UP, [engine(1.5), engine(1.9)]) == math.inf
    assert judge.reaction(1.0, UP[:2], [engine(1.5, 1)]) == math.inf


def test_a_stop_lasts_from_the_last_look_at_it_running_until_its_process_is_gone() -> None:
    assert judge.stops([*UP, *DOWN]) == {"b": (20.0, 22.0)}


def test_a_stop_that_has_not_ended_is_infinite() -> None:
    assert judge.stops([*UP, *DOWN[:2]]) == {"b": (20.0, math.inf)}


def test_a_replica_that_a_new_controller_has_to_find_again_is_not_stopped() -> None:
    looks = [*UP, serve(10.0, 2, "a", other="b")]
    assert judge.stops(looks) == {}
    assert judge.stopped_between(looks, 9.5, 20.0) == 0


@pytest.mark.parametrize("after", [serve(10.0, 2, "a", stopping="b"), serve(10.0, 2, "a", ended="b")])
def test_a_replica_that_stops_or_ends_after_the_kill_counts(after: ServeLook) -> None:
    assert judge.stopped_between([*UP, after], 9.5, 20.0) == 1
    assert judge.stopped_between([*UP, after], 9.5, 9.9) == 0


def test_a_target_that_comes_back_has_changed_twice() -> None:
    looks = [*UP, serve(10.0, 1, "a", "b"), serve(10.1, 2, "a", "b")]
    assert judge.changes(looks, 9.5, 20.0) == 2
    assert judge.changes(looks, 9.5, 10.0) == 1
    assert judge.ups(looks, 9.5) == 1


@pytest.mark.parametrize(
    ("outcome", "cut"),
    [
        ({}, False),
        ({"status": 503}, True),
        ({"done": False}, True),
        ({"events": [{"error": {"message": "gone"}}]}, True),
    ],
)
def test_what_counts_as_cut(outcome: dict[str, Any], cut: bool) -> None:
    one = request(**outcome)
    assert (one.complete, one.whole) == (not cut, not cut)


def test_a_stream_with_other_tokens_than_asked_for_is_not_whole() -> None:
    one = request(said=3)
    assert one.complete
    assert not one.whole


def recording() -> Recording:
    """One up, one controller killed, one down."""
    looks = [*UP, serve(11.0, 2, "a", "b"), *DOWN]
    run = Recording(0.0, serve=looks, engines=[engine(1.1), engine(1.4, 3)])
    run.rises, run.killed, run.watched_s, run.left = [1.0], 10.0, 5.0, 16.0
    run.streams, run.asked = [[request()]] * STREAMS, [request()]
    run.events = [(1.0, "25 clients")]
    return run


FAILED_BY = {
    "streams cut": lambda run: run.streams.append([request(done=False)]),
    "streams complete": lambda run: run.streams.append([request(said=3)]),
    "requests of clients that failed": lambda run: run.asked.append(request(status=500)),
    "replicas in the end": lambda run: run.serve.append(serve(40.0, 1, "a", "b")),
    "target in the end": lambda run: run.serve.append(serve(40.0, 2, "a")),
    "up 1: first request queued to new target": lambda run: run.rises.__setitem__(0, 2.0),
    "ups after the load has gone": lambda run: run.serve.extend([serve(40.0, 2, "a"), serve(41.0, 1, "a")]),
    "longest from running to gone": lambda run: run.serve.__setitem__(-1, serve(40.0, 1, "a", ended="b")),
    "controller killed under load: replicas stopped within 5 s": lambda run: run.serve.insert(
        5, serve(12.0, 2, "a", stopping="b")
    ),
    "controller killed under load: changes of the target within 5 s": lambda run: run.serve.insert(
        5, serve(12.0, 1, "a", "b")
    ),
}


def failed(run: Recording) -> set[str]:
    return {figure.name for figure in judge.figures(run) if not figure.holds}


def test_with_two_of_three_replicas_only_their_number_fails() -> None:
    assert failed(recording()) == {"replicas at the peak", "replicas stopped for less load"}


@pytest.mark.parametrize("name", FAILED_BY)
def test_each_fault_fails_its_figure(name: str) -> None:
    run = recording()
    FAILED_BY[name](run)
    assert name in failed(run)


def test_streams_stay_within_their_blocks() -> None:
    """So that the demand is the number of requests."""
    assert FULL.stream_tokens(1000.0) == MOST_TOKENS < BLOCK_SIZE - 100
    assert QUICK.stream_tokens(5.0) < FULL.stream_tokens(5.0)
    assert STREAMS < 0.6 * POOL_BLOCKS
