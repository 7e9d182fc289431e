"""A model that cannot start delays none of the others, and is tried again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger

from app import config
from app.launch.model_starts import LATER_S, MAX_RETRY_S, RETRY_S, SETTLE_S, ModelStarts
from engine.errors import ConfigError


class Start:
    """A start of the models a and b, of which ``serving`` answer and ``failed`` have been given up by Serve."""

    def __init__(self, **of_a: object) -> None:
        self.models = config.served_models(config.load({"models": {"a": of_a, "b": {}}}, {}))
        self.said: list[str] = []
        self.starts = ModelStarts(self.models, "ingress", self.said.append)
        self.now = 0.0

    def look(self, serving: str = "", failed: str = "", after: float = 0.0) -> None:
        self.now += after
        deployments = {
            f"engine-{name}": SimpleNamespace(
                status=DeploymentStatus.DEPLOY_FAILED if name in failed else DeploymentStatus.UPDATING,
                status_trigger=DeploymentStatusTrigger.REPLICA_STARTUP_FAILED,
                message=f"ValueError: no memory for {name}",
            )
            for name in "ab"
        }
        status = "DEPLOY_FAILED" if failed else "DEPLOYING"
        application = SimpleNamespace(status=status, deployments=deployments, message="")
        self.starts.look(application, lambda model: serving.count(model.name), self.now)


def names(models: object) -> list[str]:
    return [model.name for model in models]  # type: ignore[attr-defined]


def test_what_serves_is_announced_without_what_takes_long() -> None:
    start = Start()
    start.look()
    assert not start.starts.complete(start.now)
    start.look(serving="a")
    assert not start.starts.complete(start.now), "the other one may serve, too, in a moment"
    start.look(serving="a", after=LATER_S)
    assert start.starts.complete(start.now)
    assert names(start.starts.serving) == ["a"]
    assert start.said == []
    start.look(serving="ab", after=60.0)
    assert start.said == ["b is now served, too"]
    assert names(start.starts.serving) == ["a", "b"]


def test_what_is_announced_waits_for_all_replicas_but_not_for_long() -> None:
    start = Start(engine_replicas=2)
    start.look(serving="ab")
    assert not start.starts.complete(start.now), "a has one more"
    start.look(serving="aab", after=1.0)
    assert start.starts.complete(start.now)
    assert start.starts.ready == {"a": 2, "b": 1}
    start = Start(engine_replicas=2)
    start.look(serving="ab")
    start.look(serving="ab", after=LATER_S)
    assert start.starts.complete(start.now)
    assert start.starts.ready == {"a": 1, "b": 1}


def test_all_that_can_serve_are_announced_at_once() -> None:
    start = Start()
    start.look(serving="ab")
    assert start.starts.complete(start.now)
    start = Start()
    start.look(serving="a", failed="b")
    assert start.starts.complete(start.now)


def test_a_model_that_cannot_start_is_tried_again_ever_more_rarely() -> None:
    start = Start()
    pauses = []
    start.look(serving="a", failed="b")
    for _ in range(7):
        began = start.now
        while not (due := start.starts.due(start.now)):
            start.now += 1.0
        assert names(due) == ["b"]
        pauses.append(start.now - began)
        start.look(failed="b", after=SETTLE_S - 1.0)  # Serve has not begun yet
        assert names(start.starts.waiting) == ["b"]
        start.look(failed="b", after=1.0)
        assert names(start.starts.failed) == ["b"]
    assert pauses == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S, *[MAX_RETRY_S] * 3]
    assert start.said[:2] == [
        "warning: b cannot start, but the others can: ValueError: no memory for b; the next try is in "
        f"{pause} s"
        for pause in (60, 120)
    ]


def test_a_model_that_starts_at_last_serves() -> None:
    start = Start()
    start.look(serving="a", failed="b")
    assert start.starts.complete(start.now)
    start.now += RETRY_S
    assert names(start.starts.due(start.now)) == ["b"]
    start.look(after=SETTLE_S + 1.0)
    start.look(serving="b", after=20.0)
    assert start.said[1:] == ["b is now served, too"]
    assert (start.starts.waiting, start.starts.failed, start.starts.due(start.now + 1e6)) == ([], [], [])


def test_without_any_model_that_serves_the_start_ends() -> None:
    start = Start()
    start.look(failed="b")
    assert names(start.starts.failed) == ["b"]
    with pytest.raises(ConfigError, match=r"a: .*no memory for a; b: .*no memory for b"):
        start.look(failed="ab")
