"""Errors in the format of the API that was called, for every failure: OpenAI's,
``{"error": {"message", "type", "param", "code"}}``, or on ``/v1/messages`` Anthropic's,
``{"type": "error", "error": {"type", "message"}}``."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from app.fleet.generation import CannotStartError, EngineDeathsError, GenerationError, UnavailableError
from app.fleet.refusal import Refusal
from engine.errors import ClientLimitError, InvalidRequestError, QuireError, shown

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1

CANNOT_START_S = 30
"""``Retry-After`` where engines cannot start. A client that tries again at once would not be told why."""

REFUSED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""Statuses of requests that count as refused."""

CHOSEN = "model"
"""``request.state.model``: the name of the model that was chosen for a request, once it was."""


_INVALID = "invalid_request_error"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


@dataclass(frozen=True, slots=True)
class ApiFault:
    """The answer to a client: HTTP status, the four fields of OpenAI's error object, and Retry-After.

    OpenAI's clients send a failed request again, unless it is not ``retriable``.
    """

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    retriable: bool = True

    def to_json(self, path: str = "") -> str:
        """The body for a request of ``path``, also used as a data chunk once a stream has begun."""
        if is_anthropic(path):
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else _INVALID)
            return json.dumps({"type": "error", "error": {"type": kind, "message": self.message}})
        return json.dumps(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )

    def to_response(self, path: str = "") -> Response:
        seconds = RETRY_AFTER_SECONDS if self.status == 503 else None
        if self.retry_after_s is not None:
            seconds = self.retry_after_s
        headers = {"retry-after": str(seconds)} if seconds is not None else {}
        if not self.retriable:
            headers["x-should-retry"] = "false"
        return Response(self.to_json(path), self.status, headers, media_type="application/json")


class ApiError(QuireError):
    """A request that the HTTP API itself refuses."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.fault = ApiFault(status, message, kind, param, code, retry_after_s)


def overloaded(refusal: Refusal) -> ApiError:
    """429 while the expected wait is too long even with all engines, or the ingress does not keep up."""
    if refusal.behind:
        return ApiError(
            429,
            f"this ingress is {refusal.wait_s:.1f} s behind, above the limit of {refusal.limit_s:g} s "
            f"(max_lag_s); try again in {refusal.retry_after_s} s, or run more ingresses (ingress_replicas)",
            code="overloaded",
            kind="rate_limit_error",
            retry_after_s=refusal.retry_after_s,
        )
    options = "max_wait_s"
    if refusal.startup_s:
        options = f"max_wait_s, plus startup_s={refusal.startup_s:g} while replicas may be starting"
    return ApiError(
        429,
        f"the expected wait is {refusal.wait_s:.1f} s even with all replicas, above the limit of "
        f"{refusal.limit_s:g} s ({options}); try again in {refusal.retry_after_s} s",
        code="overloaded",
        kind="rate_limit_error",
        retry_after_s=refusal.retry_after_s,
    )


def too_many_live(live: int, most: int, retry_after_s: int) -> ApiError:
    """503 while one ingress replica has the maximum number of requests."""
    return ApiError(
        503,
        f"{live} choices are in progress, and at most {most} are allowed at one ingress (max_live_choices); "
        f"try again in {retry_after_s} s",
        code="unavailable",
        kind="service_unavailable_error",
        retry_after_s=retry_after_s,
    )


def too_much_of_a_client(live: str, limit: int, option: str, retry_after_s: int) -> ApiError:
    """429 while one client has as much in progress as it may; ``live`` says what it would have."""
    return ApiError(
        429,
        f"with this request you would have {live} in progress, but at most {limit} are allowed for one client "
        f"({option}); try again in {retry_after_s} s",
        code="client_limit_exceeded",
        kind="rate_limit_error",
        retry_after_s=retry_after_s,
    )


def too_many_bodies(most: int, others: int, own: int) -> ApiError:
    """503 while the large bodies that one ingress replica reads take all the memory that they may."""
    return ApiError(
        503,
        f"with this body, the large bodies being read would take {others + own} of {most} bytes, {own} of them "
        "from this client; one client may take only as much as it leaves free; try again in "
        f"{RETRY_AFTER_SECONDS} s",
        code="unavailable",
        kind="service_unavailable_error",
        retry_after_s=RETRY_AFTER_SECONDS,
    )


def model_not_found(name: str, served: Sequence[str]) -> ApiError:
    """404 for a model that this server does not have; ``served`` are those that the client may use."""
    names = ", ".join(map(repr, served))
    return ApiError(
        404, f"the model {show(name)} does not exist; this server has {names}", "model", "model_not_found"
    )


def model_not_allowed(name: str, key: str) -> ApiError:
    """403 for a model that the request's key is not for."""
    return ApiError(
        403,
        f"the key {key!r} may not use the model {show(name)}: its entry in the key file lists only others "
        "(models)",
        "model",
        "model_not_allowed",
        kind="permission_error",
    )


def admin_only(key: str) -> ApiError:
    """403 for an administrator's route."""
    return ApiError(
        403,
        f"the key {key!r} may not use this route; it needs 'admin: true' in its entry in the key file",
        code="admin_only",
        kind="permission_error",
    )


def fault_of(error: Exception) -> ApiFault:
    """The answer for ``error``. An unexpected error is logged; the client sees no details."""
    fault = _answer_to(error)
    if fault.code == "internal":
        logger.error("unexpected error while serving a request", exc_info=error)
    elif isinstance(error, GenerationError):
        logger.error("generation failed: %s", error)
    return fault


def outcome_of(error: Exception) -> tuple[str, int]:
    """Code (or else status, as text) and status of the answer for ``error``; without logging it."""
    fault = _answer_to(error)
    return fault.code or str(fault.status), fault.status


def _answer_to(error: Exception) -> ApiFault:
    if isinstance(error, ApiError):
        return error.fault
    if isinstance(error, InvalidRequestError):
        return ApiFault(400, error.message, "invalid_request_error", error.param, error.code)
    if isinstance(error, ClientLimitError):
        return ApiFault(
            429,
            error.message,
            "rate_limit_error",
            code="client_limit_exceeded",
            retry_after_s=error.retry_after_s,
        )
    if isinstance(error, CannotStartError):
        return ApiFault(  # the cause may name paths of the server
            503,
            "no engine replica of this model can start; the server's log and `serve status` say why",
            "service_unavailable_error",
            code="unavailable",
            retry_after_s=CANNOT_START_S,
            retriable=False,
        )
    if isinstance(error, UnavailableError):
        return ApiFault(503, str(error), "service_unavailable_error", code="unavailable")
    if isinstance(error, EngineDeathsError):
        return ApiFault(500, str(error), "server_error", code="engine_died", retriable=False)
    if isinstance(error, GenerationError):
        return ApiFault(500, str(error), "server_error", code="generation_failed")
    return ApiFault(
        500,
        "an internal error ended this request; the server's log has details",
        "server_error",
        code="internal",
    )


def show(value: object) -> str:
    """A client's value for an error message, in JSON's words: short and on one line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    return shown(value)


async def _on_error(request: Request, error: Exception) -> Response:
    fault = fault_of(error)
    if fault.status in REFUSED:
        model: str | None = getattr(request.state, CHOSEN, None)
        request.app.state.get_server().count_refusal(model, fault.code or str(fault.status))
    return fault.to_response(request.url.path)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"there is no route {show(request.url.path)}"
        meant = f"/v1/{request.url.path.lstrip('/')}"
        if any(
            route.matches({**request.scope, "path": meant})[0] is Match.FULL for route in request.app.routes
        ):
            message += f"; use {meant}"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.method} is not allowed on {show(request.url.path)}"
    else:
        message = str(error.detail)
    response = ApiFault(error.status_code, message, "invalid_request_error").to_response(request.url.path)
    response.headers.update(error.headers or {})
    return response


ERROR_HANDLERS = {HTTPException: _on_http_exception, QuireError: _on_error, Exception: _on_error}
"""Give every error of an application this format, including unknown paths and methods."""
