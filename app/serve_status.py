"""What Serve's controller says of a deployment whose replicas do not run, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

STATUS_TIMEOUT_S = 2.0
"""How long the controller has to answer: while it restarts, nobody waits for it."""

CAUSE_CHARACTERS = 300

_NOT_STARTED = "REPLICA_STARTUP_FAILED"
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


def cannot_start(deployment: Any) -> bool:
    """Whether replicas of a deployment have failed to start, so often that Serve says so.

    ``deployment`` is Serve's status of it. A deployment whose running replica died has the same status for a
    while, but not for the same reason: Serve starts another replica.
    """
    return _is(deployment.status, *_FAILED) and (
        _is(deployment.status_trigger, _NOT_STARTED) or "failed to start" in (deployment.message or "")
    )


def has_died(deployment: Any) -> bool:
    """Whether a replica that ran has died, and Serve starts another."""
    return _is(deployment.status, *_FAILED) and not cannot_start(deployment)


def cause(messages: Iterable[str | None]) -> str:
    """The last line of the messages, preferably one with an error; they may end with a traceback."""
    lines = [line.strip() for message in messages for line in (message or "").splitlines() if line.strip()]
    line = ([line for line in lines if "Error" in line] or lines or ["unknown cause"])[-1]
    return line if len(line) <= CAUSE_CHARACTERS else f"{line[:CAUSE_CHARACTERS]} ..."


def start_failure(app: str, deployment: str) -> str:
    """Why replicas of a deployment cannot start, in one line; empty if they can, or nobody knows.

    It blocks, for a minute if Ray's head does not answer, so call it in a thread.
    """
    import ray
    from ray.exceptions import RayError
    from ray.serve._private.common import DeploymentStatusInfo
    from ray.serve.context import _get_global_client
    from ray.serve.exceptions import RayServeException
    from ray.serve.generated.serve_pb2 import DeploymentStatusInfo as Message

    try:
        asked = _get_global_client()._controller.get_deployment_status.remote(deployment, app)
        answer = ray.get(asked, timeout=STATUS_TIMEOUT_S)
    except (RayError, RayServeException):
        return ""
    if answer is None:
        return ""
    status = DeploymentStatusInfo.from_proto(Message.FromString(answer))
    return cause([status.message]) if cannot_start(status) else ""


def _is(value: Any, *names: str) -> bool:
    """Whether one of Serve's enumerations, as a member or as text, has one of these names."""
    return str(getattr(value, "name", value)).rpartition(".")[2] in names
