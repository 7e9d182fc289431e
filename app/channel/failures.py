"""Failures of calls to engine replicas: telling a defect from a lost connection, and describing either."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from app.channel.engine_calls import EngineCall
from engine.errors import QuireError

logger = logging.getLogger(__name__)

_EXPECTED = (QuireError, OSError, asyncio.CancelledError, RayError, RayServeException)
"""``OSError`` includes ``TimeoutError`` and ``ConnectionError``."""


def is_of_another_version(error: BaseException, call: EngineCall) -> bool:
    """Whether the replica lacks the method or takes other arguments than this version's, as during a deploy.

    The same words about a method that the replica calls in turn, or about arguments that this version's method
    does not take, either, are of a defect.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RayServeException):
        refusals = [f"Tried to call a method '{call.name}' that does not exist"]  # Serve's words
    elif isinstance(cause, TypeError):
        method = f"EngineReplica.{call.name}() "
        refusals = [method + word for word in ("takes", "got", "missing")]  # Python's words
    else:
        return False
    return str(cause).startswith(tuple(refusals)) and call.fits()


def is_defect(error: BaseException, call: EngineCall | None = None) -> bool:
    """Whether the cause is the code, here or on the replica, and not the connection to the replica.

    A replica of another version of Quire, which does not take ``call``, is no defect.
    """
    if call is not None and is_of_another_version(error, call):
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


def reason_of(error: BaseException, within_s: float, call: EngineCall) -> str:
    """For people, why ``call``, which may take ``within_s``, failed."""
    if isinstance(error, TimeoutError):
        return f"no answer within {within_s:g} s"
    if is_of_another_version(error, call):
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
