"""The requests that are live at an ingress, and the last ones that have ended: what is known of each."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

MAX_ENDED = 1024
"""Requests that are remembered after their end, with 2 KB for each of their parts."""

MAX_PARTS = 4096
"""Parts of all remembered requests together."""


class Known(Protocol):
    """A request, by an id that need not be unique; its prompts are its parts."""

    @property
    def request_id(self) -> str: ...

    @property
    def parts(self) -> int: ...


R = TypeVar("R", bound=Known)


class RecentRequests(Generic[R]):
    """Belongs to one ingress's event loop. What is live has its limits elsewhere."""

    def __init__(self) -> None:
        self._live: dict[int, R] = {}
        self._ended: deque[R] = deque()
        self._parts = 0  # of the ended ones

    def begin(self, request: R) -> None:
        """Add a request that is live."""
        self._live[id(request)] = request

    def end(self, request: R) -> None:
        """Move a request that has ended to those that are forgotten in turn."""
        del self._live[id(request)]
        self._ended.append(request)
        self._parts += request.parts
        while len(self._ended) > MAX_ENDED or self._parts > MAX_PARTS:
            self._parts -= self._ended.popleft().parts

    def find(self, request_id: str) -> list[R]:
        """All with this id, the last one to come first; engines name a part by it and a number: ``ID-0``."""
        whole, _, number = request_id.rpartition("-")

        def is_meant(one: R) -> bool:
            if one.request_id == request_id:
                return True
            return one.request_id == whole and one.parts > 1 and number in map(str, range(one.parts))

        return [one for one in reversed([*self._live.values(), *self._ended]) if is_meant(one)]
