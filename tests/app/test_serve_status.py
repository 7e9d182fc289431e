"""What Serve says of a deployment that does not run, in the words that a launcher or a client is told."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import GetTimeoutError
from ray.serve._private.common import DeploymentStatus, DeploymentStatusInfo, DeploymentStatusTrigger

from app import serve_status

RETRYING = "A replica failed to start with exception. Retrying. Error:\nTraceback\nConfigError: no memory"


@pytest.mark.parametrize(
    ("status", "trigger", "message", "cannot_start", "has_died"),
    [
        ("UPDATING", "CONFIG_UPDATE_STARTED", RETRYING, False, False),
        ("UPSCALING", "AUTOSCALING", RETRYING, False, False),
        ("DEPLOY_FAILED", "REPLICA_STARTUP_FAILED", "ConfigError: no memory", True, False),
        ("UNHEALTHY", "REPLICA_STARTUP_FAILED", "ConfigError: no memory", True, False),
        ("UNHEALTHY", "HEALTH_CHECK_FAILED", "A replica's health check failed.", False, True),
        ("DEPLOY_FAILED", "HEALTH_CHECK_FAILED", "A replica's health check failed.", False, True),
        ("UNHEALTHY", "HEALTH_CHECK_FAILED", RETRYING, True, False),  # it died, and none could take its place
        ("HEALTHY", "UPSCALE_COMPLETED", "", False, False),
    ],
)
def test_what_cannot_start_is_told_from_what_has_died(
    status: str, trigger: str, message: str, cannot_start: bool, has_died: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = DeploymentStatusInfo("engine", DeploymentStatus(status), DeploymentStatusTrigger(trigger), message)
    assert serve_status.cannot_start(found) is cannot_start
    assert serve_status.has_died(found) is has_died
    answer_with(found.to_proto().SerializeToString(), monkeypatch)
    assert serve_status.start_failure("quire", "engine") == ("ConfigError: no memory" if cannot_start else "")


def answer_with(answer: bytes | Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Serve's controller."""

    def get(asked: tuple[str, str], timeout: float) -> bytes | None:
        assert asked == ("engine", "quire")
        if isinstance(answer, Exception):
            raise answer
        return answer

    asked = SimpleNamespace(remote=lambda name, app: (name, app))
    client = SimpleNamespace(_controller=SimpleNamespace(get_deployment_status=asked))
    monkeypatch.setattr("ray.serve.context._get_global_client", lambda: client)
    monkeypatch.setattr(ray, "get", get)


@pytest.mark.parametrize("answer", [None, GetTimeoutError()])
def test_without_an_answer_nothing_is_known(answer: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(answer, monkeypatch)
    assert serve_status.start_failure("quire", "engine") == ""


def test_the_cause_is_the_last_line_with_an_error() -> None:
    assert serve_status.cause(["Traceback\n  ValueError: wrong\n", "see the logs"]) == "ValueError: wrong"
    assert serve_status.cause([None, "", "see the logs"]) == "see the logs"
    assert serve_status.cause([]) == "unknown cause"
    long = serve_status.cause([f"ValueError: {'x' * 1000}"])
    assert len(long) == serve_status.CAUSE_CHARACTERS + 4


def test_serve_still_has_the_call() -> None:
    from ray.serve._private.controller import ServeController

    parameters = list(inspect.signature(ServeController.get_deployment_status).parameters)
    assert parameters[:3] == [  # Ray adds one where another test has switched its tracing on
        "self",
        "name",
        "app_name",
    ]
