"""Errors for users: what was wrong, what the limit is, which option or parameter changes it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_SHOWN = 80
"""Characters of a value in an error message."""


class QuireError(Exception):
    """Base of every error that Quire raises on purpose."""


class ConfigError(QuireError):
    """A start-up option or a model that cannot be served; the message is one line for the terminal."""


class InvalidRequestError(QuireError, ValueError):
    """A request that can never run; becomes an OpenAI-shaped 400.

    ``param`` names the request's parameter, ``code`` is a machine-readable reason.
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[type[InvalidRequestError], tuple[str, str | None, str]]:
        return (type(self), (self.message, self.param, self.code))


class ClientLimitError(QuireError):
    """A client has used up its budget; becomes a 429. It may try again after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[ClientLimitError], tuple[str, int]]:
        return (type(self), (self.message, self.retry_after_s))


class EngineDeadError(QuireError):
    """The engine thread has ended; its replica is about to be replaced."""


class GrammarFault(QuireError):
    """A grammar could not be compiled now, through no fault of its own; the request may be sent again."""


def one_line(error: BaseException) -> str:
    """An error's message on one line; its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def shown(value: object) -> str:
    """A caller's value for an error message: short and on one line, whatever it is."""
    if isinstance(value, str):
        return repr(value) if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]!r}…"
    if isinstance(value, int) and value.bit_length() > 4 * MAX_SHOWN:  # str() refuses very long ones
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple | set | frozenset | dict):
        return f"a {type(value).__name__} of {len(value)}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - it is the caller's code, and the message is about the caller's mistake
        text = f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of ``names`` that a misspelt ``name`` most likely means; empty if none is near."""
    if len(name) > MAX_SHOWN:  # the search takes the square of its length
        return ""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), "")


def counted(count: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{shown(count)} {noun}{'' if count == 1 else 's'}"
