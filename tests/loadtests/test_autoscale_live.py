"""The live run of autoscaling: its load, which a server counts; its figures, on known recordings."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from loadtests.client import Client, Outcome
from loadtests.experiments.autoscale_live import (
    CLIENT_TOKENS,
    POOL_BLOCKS,
    STREAMS,
    Load,
    Recording,
    ServeLook,
    figures_of,
    reaction,
    targets,
)

LIMIT_S = 30.0


class Server:
    """Answers each request once it is let; says how many are open."""

    def __init__(self) -> None:
        self.open = self.answered = 0
        self.status = 200
        self.released = asyncio.Event()

    async def complete(self, prompt: str, tokens: int) -> Outcome:
        self.open += 1
        try:
            await self.released.wait()
            await asyncio.sleep(0)  # as a network would
        finally:
            self.open -= 1
        self.answered += 1
        return request(tokens, tokens, status=self.status)


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


def loaded() -> tuple[Server, Load]:
    server = Server()
    return server, Load(cast("Client", server))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@on_a_loop
async def test_clients_ask_again_and_leave_only_when_answered() -> None:
    server, load = loaded()
    load.clients(3)
    await until(lambda: server.open == 3)
    load.clients(1)
    server.released.set()
    await until(lambda: server.answered >= 9)
    load.clients(0)
    await until(lambda: server.open == 0)
    assert len(load.asked) == server.answered
    assert all(one.whole and one.tokens == CLIENT_TOKENS for one in load.asked)


@on_a_loop
async def test_streams_follow_one_another_until_they_may_end() -> None:
    server, load = loaded()
    load.start_streams(2, 8)
    await until(lambda: server.open == 2)
    server.released.set()
    await until(lambda: server.answered >= 6)
    await load.end_streams(LIMIT_S)
    assert len(load.streams) == server.answered
    assert all(one.whole and one.tokens == 8 for one in load.streams)


@on_a_loop
async def test_no_stream_follows_a_refused_one() -> None:
    server, load = loaded()
    server.status = 503
    server.released.set()
    load.start_streams(1, 8)
    await load.end_streams(LIMIT_S)
    assert [one.status for one in load.streams] == [503]


@on_a_loop
async def test_the_end_of_the_load_hangs_up() -> None:
    server, load = loaded()
    load.clients(2)
    load.start_streams(1, 8)
    await until(lambda: server.open == 3)
    await load.hang_up()
    assert server.open == 0
    assert load.asked == load.streams == []


def request(tokens: int = 4, said: int = 4, **outcome: Any) -> Outcome:
    end = {"choices": [{"text": "a", "finish_reason": "length"}]}
    events = [end, {"choices": [], "usage": {"completion_tokens": said}}]
    good: dict[str, Any] = {"status": 200, "events": events, "times": [1.0, 9.0], "done": True}
    return Outcome(asked=tokens, **good | outcome)


def recording() -> Recording:
    """One up and two more, all down."""
    changes = [(0.0, 1, 1), (2.0, 2, 1), (9.0, 2, 2), (12.0, 2, 2), (17.0, 3, 3), (20.0, 2, 3), (22.0, 1, 1)]
    looks = [ServeLook(*change) for change in changes]
    run = Recording(looks, [(0.5, 9), (1.1, 0), (1.3, 0), (1.4, 3), (16.6, 1)], rises=[1.0, 16.0])
    run.left = 18.0
    run.streams, run.asked = [request()] * STREAMS, [request()]
    return run


def test_a_good_run_holds_every_bar() -> None:
    assert [figure.line() for figure in figures_of(recording()) if not figure.holds] == []


def test_reaction_is_from_before_the_first_one_that_waits() -> None:
    run = recording()
    assert reaction(1.0, run) == pytest.approx(2.0 - 1.3)
    run.waiting = [(0.9, 2), (1.5, 3)]
    assert reaction(1.0, run) == pytest.approx(1.0), "who waited before the rise is of no account"


def test_reaction_without_anybody_waiting_or_without_an_up_is_infinite() -> None:
    run = recording()
    run.waiting = [(1.5, 0)]
    assert reaction(1.0, run) == math.inf
    run.waiting = [(30.5, 1)]
    assert reaction(30.0, run) == math.inf


def test_targets_begin_with_the_one_that_stood() -> None:
    looks = recording().serve
    assert targets(looks, 10.0, 17.0) == [2, 2, 3]
    assert targets(looks, -1.0, 2.0) == [1, 2]


FAILED_BY: dict[str, Callable[[Recording], object]] = {
    "streams": lambda run: run.streams.pop(),
    "streams cut": lambda run: run.streams.append(request(said=3)),
    "requests of clients that failed": lambda run: run.asked.append(request(status=500)),
    "replicas at the peak": lambda run: run.serve.__setitem__(slice(4, 6), []),
    "replicas in the end": lambda run: run.serve.append(ServeLook(40.0, 1, 2)),
    "target in the end": lambda run: run.serve.append(ServeLook(40.0, 2, 1)),
    "up 1: first request queued to new target": lambda run: run.rises.__setitem__(0, 2.0),
    "ups after the load has gone": lambda run: run.serve.insert(6, ServeLook(21.0, 3, 3)),
}


@pytest.mark.parametrize("name", FAILED_BY)
def test_each_fault_fails_its_figure(name: str) -> None:
    run = recording()
    FAILED_BY[name](run)
    assert name in {figure.name for figure in figures_of(run) if not figure.holds}


@pytest.mark.parametrize(
    "outcome", [{"status": 503}, {"done": False}, {"events": [{"error": {"message": "gone"}}]}]
)
def test_what_counts_as_cut(outcome: dict[str, Any]) -> None:
    assert not request(**outcome).whole


def test_the_streams_alone_need_one_replica() -> None:
    assert STREAMS < 0.6 * POOL_BLOCKS
