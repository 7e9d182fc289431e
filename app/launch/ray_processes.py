"""Ray's processes that a server on one machine does without; Ray has no options for that."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def left_out(dashboard: bool = False) -> Iterator[None]:
    """While Ray starts here: no monitor of its autoscaler, and no dashboard unless wanted.

    Without a dashboard Ray would start its process all the same, for usage reports alone, and wait for it.
    These are private methods of Ray: where it has none of that name, its process starts, which costs only time.
    """
    from ray._private.node import Node

    names = ["start_monitor", *([] if dashboard else ["start_api_server"])]
    real = {name: getattr(Node, name) for name in names if hasattr(Node, name)}
    if len(real) < len(names):
        logger.warning("this Ray starts processes that are not needed: it has no %s", set(names) - set(real))
    for name in real:
        setattr(Node, name, _nothing)
    try:
        yield
    finally:
        for name, method in real.items():
            setattr(Node, name, method)


def _nothing(*_: Any, **__: Any) -> None:
    pass
