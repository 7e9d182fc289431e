"""Failures of calls to engine replicas: telling a defect from a lost connection, and describing either."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from engine.errors import QuireError

logger = logging.getLogger(__name__)

_EXPECTED = (QuireError, OSError, asyncio.CancelledError, RayError, RayServeException)
"""``OSError`` includes ``TimeoutError`` and ``ConnectionError``."""


_OTHER_VERSION = re.compile(
    r"\b(channel|generate|beat|reset_prefix_cache|block_map|wake|inspect|cordon)\(\) (takes|got|missing)"
)
"""What Python says of a replica's method that takes other arguments."""


def is_of_another_version(error: BaseException) -> bool:
    """Whether the replica's method takes other arguments, as it may while a deploy replaces replicas."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return isinstance(cause, TypeError) and _OTHER_VERSION.search(str(cause)) is not None


def is_defect(error: BaseException) -> bool:
    """Whether the cause is the code, here or on the replica, and not the connection to the replica.

    A replica of another version of Quire is no defect.
    """
    if is_of_another_version(error):
        return False
    if isinstance(error, RayTaskError):  # what the code on the replica raised
        return not isinstance(error.cause, _EXPECTED)
    return not isinstance(error, _EXPECTED)


def describe(error: BaseException) -> str:
    """The error's class and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of the error's message; empty if there is none."""
    return next(iter(str(error).splitlines()), "")


def reason_of(error: BaseException, within_s: float) -> str:
    """For people, why a call that may take ``within_s`` failed."""
    if isinstance(error, TimeoutError):
        return f"no answer within {within_s:g} s"
    if is_of_another_version(error):
        return "it runs a different version of Quire than this ingress"
    return first_line(error) or type(error).__name__


def cancel_call(response: Any) -> None:
    """Cancel a Serve call. If it could not be sent, ``response.cancel`` raises the reason, and nothing runs."""
    try:
        response.cancel()
    except Exception as error:
        if is_defect(error):
            logger.exception("a call could not be canceled")


async def answer_of(response: Any) -> Any:
    """Await a Serve response, which is awaitable but no coroutine."""
    return await response
