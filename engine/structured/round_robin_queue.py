"""A queue in which clients take turns."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobinQueue(Generic[T]):
    """Each client's items come in order, one of each client after another; any thread may use it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()  # the next client first
        self._closed = False

    def put(self, client: str, item: T) -> bool:
        """Add ``item`` unless the queue is closed; whether it was added."""
        with self._changed:
            if self._closed:
                return False
            self._waiting.setdefault(client, deque()).append(item)
            self._changed.notify()
            return True

    def get(self) -> T | None:
        """The next item, as soon as there is one; ``None`` once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            client, items = self._waiting.popitem(last=False)
            item = items.popleft()
            if items:
                self._waiting[client] = items  # after all others
            return item

    def close(self) -> list[T]:
        """Close the queue; return the items that nobody has taken."""
        with self._changed:
            self._closed = True
            left = [item for items in self._waiting.values() for item in items]
            self._waiting.clear()
            self._changed.notify_all()
            return left
