"""Whom an ingress asks for what all of them know."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from app.metrics.samples import Process
from app.metrics.siblings import ALONE_S, Siblings


class Deployment:
    """Its replicas' answers; how often they were asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), 0

    def broadcast(self, method: str, *arguments: object) -> Deployment:
        assert (method, arguments) in {("figures", ()), ("lives", ("a request",))}
        self.asked += 1
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        return self.answers


def deployed(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> Deployment:
    deployment = Deployment(*answers)
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(deployment="ingress"))
    monkeypatch.setattr(serve, "get_deployment_handle", lambda name, app: deployment)
    return deployment


OWN, OTHER = Process("own", {}, "m"), Process("other", {}, "m")


def test_all_are_asked_each_time_and_errors_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = deployed(monkeypatch, [OWN], [OTHER], TimeoutError())
    siblings = Siblings("quire", lambda: 0.0)
    for times in (1, 2):
        assert asyncio.run(siblings.processes()) == [OWN, OTHER]
        assert deployment.asked == times


def test_the_only_one_looks_for_others_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, now = deployed(monkeypatch, [OWN]), 0.0
    siblings = Siblings("quire", lambda: now)
    assert asyncio.run(siblings.processes()) == [OWN]
    assert asyncio.run(siblings.processes()) == []
    deployment.answers.append([OTHER])
    now = ALONE_S - 0.1
    assert asyncio.run(siblings.processes()) == []
    assert deployment.asked == 1
    now = ALONE_S
    for _ in range(2):
        assert asyncio.run(siblings.processes()) == [OWN, OTHER]


def test_a_request_is_looked_for_at_all_even_if_there_was_one_a_moment_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment = deployed(monkeypatch, [OWN])
    siblings = Siblings("quire", lambda: 0.0)
    assert asyncio.run(siblings.processes()) == [OWN]
    deployment.answers.append([OTHER])
    assert asyncio.run(siblings.ask("lives", "a request")) == [[OWN], [OTHER]]
    assert asyncio.run(siblings.processes()) == [OWN, OTHER], "it has found another"
