"""Ray's processes that a server on one machine does without; Ray has no options for that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def left_out(dashboard: bool = False) -> Iterator[None]:
    """While Ray starts here: no monitor of its autoscaler, and no dashboard unless wanted.

    Without a dashboard Ray would start its process all the same, for usage reports alone, and wait for it.
    """
    from ray._private.node import Node

    names = ["start_monitor", *([] if dashboard else ["start_api_server"])]
    real = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, _nothing)
    try:
        yield
    finally:
        for name, method in real.items():
            setattr(Node, name, method)


def _nothing(*_: Any, **__: Any) -> None:
    pass
