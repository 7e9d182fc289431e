"""Errors for users: what was wrong, what the limit is, which option or parameter changes it."""

from __future__ import annotations


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


class EngineDeadError(QuireError):
    """The engine thread has ended; its replica is about to be replaced."""
