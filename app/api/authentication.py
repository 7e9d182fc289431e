"""Lets a request pass only with a valid API key, once there are any, and names its key to the routes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import ApiFault
from app.api.key_limits import KeyLimits
from app.api.keys import ApiKey, KeyFile, KeyRing

OPEN_PATHS = ("/health", "/ping")
"""Load balancers and orchestrators ask these without a key."""

MAX_KEY_CHARS = 512

STATE = "key_limits"
"""``request.state.key_limits``: the :class:`KeyLimits` of the request's key; ``None`` without keys."""


@dataclass(slots=True)
class Gate:
    """The keys of one ingress replica and their limits; ``replicas`` is the number of ingress replicas."""

    keys: KeyFile
    replicas: int = 1
    _limits: dict[str, KeyLimits] = field(default_factory=dict)
    _ring: KeyRing | None = None  # that the limits are of

    def limits_of(self, key: ApiKey) -> KeyLimits:
        """The state of ``key``, which outlives a changed file as long as that has an entry of its id."""
        ring = self.keys.ring()
        if ring is not self._ring:
            self._ring = ring
            listed = {entry.id for entry in ring.by_digest.values()}
            self._limits = {name: limits for name, limits in self._limits.items() if name in listed}
        found = self._limits.get(key.id)
        if found is None:
            found = self._limits[key.id] = KeyLimits(key, 1.0 / self.replicas)
        elif found.key != key:
            found.change(key)
        return found


class Authentication:
    """ASGI middleware: 401 without a valid key on every path but ``OPEN_PATHS``.

    A key comes as ``Authorization: Bearer KEY``, as OpenAI's clients send it; as ``x-api-key: KEY``, as
    Anthropic's do; or, for a browser's own dialog, as the password of ``Authorization: Basic``. The last counts
    only for requests of this origin, because browsers add it to requests of other pages, too.
    """

    def __init__(self, app: ASGIApp, gate: Callable[[], Gate]) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gate = self._gate()
        state = scope.setdefault("state", {})
        state[STATE] = None
        if not gate.keys.required:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        presented = presented_key(headers)
        key = gate.keys.ring().find(presented) if presented is not None else None
        if key is None:
            if scope["path"] in OPEN_PATHS:
                await self._app(scope, receive, send)
                return
            refusal = _unauthorized(scope["path"], presented is not None, _from_a_person(headers))
            await refusal(scope, receive, send)
            return
        limits = state[STATE] = gate.limits_of(key)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *limits.headers()]
            await send(message)

        await self._app(scope, receive, send_with_limits)


def presented_key(headers: Headers) -> str | None:
    """The key that a request presents, in one header or several; ``None`` if one has none or they differ."""
    found: set[str | None] = {_credential(value, headers) for value in headers.getlist("authorization")}
    found |= {key if len(key) <= MAX_KEY_CHARS else None for key in headers.getlist("x-api-key")}
    return found.pop() if len(found) == 1 else None


def _credential(authorization: str, headers: Headers) -> str | None:
    """The key in a header ``Authorization``, if it can be read and may count."""
    scheme, _, credentials = authorization.partition(" ")
    credentials = credentials.strip()
    if len(credentials) > MAX_KEY_CHARS:
        return None
    if scheme.lower() == "bearer":
        return credentials
    if scheme.lower() == "basic" and headers.get("sec-fetch-site") in ("same-origin", "none"):
        try:
            return base64.b64decode(credentials, validate=True).decode("utf-8").partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return None
    return None


def _from_a_person(headers: Headers) -> bool:
    return headers.get("sec-fetch-mode") == "navigate"


def _unauthorized(path: str, presented: bool, person: bool) -> ASGIApp:
    message = (
        "the API key is not valid"
        if presented
        else "this server needs an API key; send one, and no other beside it, as "
        "'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    )
    response = ApiFault(401, message, "invalid_request_error", code="invalid_api_key").to_response(path)
    response.headers["www-authenticate"] = 'Basic realm="Quire", charset="UTF-8"' if person else "Bearer"
    return response
