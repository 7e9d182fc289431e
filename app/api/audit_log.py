"""The audit log: who did what, in a file of its own.

A JSON object for each request that was admitted, and for each administrator's action.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import WatchedFileHandler
from typing import Any

from app.api.caller import Caller
from app.api.errors import outcome_of
from app.logs import FIELDS, JsonFormatter
from engine.errors import ConfigError

_logger = logging.getLogger("audit")
_logger.propagate = False


def audit_to(path: str | None, process: str) -> None:
    """Append to ``path`` from now on; ``None``: nowhere. A file that was moved away is created again.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        handler = None if path is None else WatchedFileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"audit_log={path} cannot be written: {error.strerror or error}") from error
    for old in _logger.handlers[:]:
        _logger.removeHandler(old)
        old.close()
    _logger.setLevel(logging.CRITICAL if handler is None else logging.INFO)
    if handler is not None:
        handler.setFormatter(JsonFormatter(process))
        _logger.addHandler(handler)


@contextmanager
def audited(caller: Caller, action: str) -> Iterator[dict[str, Any]]:
    """Log what an administrator asks for, around the work; yields a dict for further fields."""
    key = {} if caller.limits is None else {"key": caller.limits.key.id}
    fields: dict[str, Any] = {
        "request_id": caller.request_id,
        **key,
        "route": action,
        "outcome": "disconnected",
    }
    try:
        yield fields
    except Exception as error:
        fields["outcome"], _ = outcome_of(error)
        raise
    else:
        if fields["outcome"] == "disconnected":
            fields["outcome"] = "ok"
    finally:
        audit(fields, caller.address)


def audit(fields: dict[str, Any], address: str) -> None:
    """Write one request, if there is an audit log."""
    if _logger.isEnabledFor(logging.INFO):
        _logger.info("request ended", extra={FIELDS: {**fields, "address": address}})
