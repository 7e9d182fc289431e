"""The header that tells this server's answers from those of another server on the same host."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.sse import DIRECT_SEND

HEADER = "x-quire-instance"


class InstanceHeader:
    """The outermost ASGI middleware: every response, whatever its status, says which server gave it."""

    def __init__(self, api: ASGIApp, instance: Callable[[], str]) -> None:
        self._api = api
        self._instance = instance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._api(scope, receive, send)
            return
        scope[DIRECT_SEND] = send
        header = (HEADER.encode(), self._instance().encode())

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self._api(scope, receive, send_named)
