"""What an ingress calls on an engine replica, as this version of Quire has it; both ends keep to it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any, Concatenate, ParamSpec, Protocol

from engine.kv.block_map import BlockMap

P = ParamSpec("P")


class EngineCalls(Protocol):
    """The methods of ``app.replica.EngineReplica`` that ingresses call; it says what each does.

    ``target`` and ``meta`` are read by the router, which passes on another ``meta``.
    """

    def channel(
        self, cid: str, epoch: int, resumption: bytes, connects: bool, *, target: str
    ) -> AsyncIterator[bytes]: ...

    async def generate(self, cid: str, payload: bytes, *, meta: Any) -> dict[str, Any]: ...

    async def beat(
        self,
        cid: str,
        epoch: int,
        acknowledged: int,
        stale: list[int],
        unwanted: list[tuple[int, int]],
        resync: bool,
        last: bool,
        *,
        target: str,
    ) -> bool: ...

    async def reset_prefix_cache(self, *, target: str) -> int: ...

    async def block_map(self, by: str, keys: list[int], *, target: str) -> BlockMap: ...

    async def wake(self, *, wait: bool) -> bool: ...


class EngineCall:
    """One call of a method of ``EngineCalls``, with its arguments."""

    __slots__ = ("_arguments", "_method", "_named")

    def __init__(
        self, method: Callable[Concatenate[Any, P], object], *arguments: P.args, **named: P.kwargs
    ) -> None:
        self._method, self._arguments, self._named = method, arguments, named

    @property
    def name(self) -> str:
        """The method's."""
        return self._method.__name__

    def send(self, handle: Any) -> Any:
        """Call the method through Serve's ``handle`` of it; returns Serve's response."""
        return handle.remote(*self._arguments, **self._named)

    def fits(self) -> bool:
        """Whether the method takes these arguments in this version; otherwise the call is wrong."""
        try:
            inspect.signature(self._method).bind(None, *self._arguments, **self._named)
        except TypeError:
            return False
        return True
