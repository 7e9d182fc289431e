"""The audit log: who did what, in a file of its own.

A JSON object for each request that was admitted, and for each administrator's action.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import WatchedFileHandler
from typing import Any

from app.api.caller import Caller
from app.api.errors import outcome_of
from app.logs import FIELDS, JsonFormatter
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

_logger = logging.getLogger("audit")
_logger.propagate = False


class _AuditFile(WatchedFileHandler):
    """Loses lines that cannot be written, and says so in the log: no request fails for them."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file was moved away, and cannot be created again
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            logger.error("a line of the audit log is lost: %s", error)
        else:
            super().handleError(record)


def audit_to(path: str | None, process: str) -> None:
    """Append to ``path`` from now on; ``None``: nowhere. A file that was moved away is created again.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        handler = None if path is None else _AuditFile(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"audit_log={path} cannot be written: {error.strerror or error}") from error
    for old in _logger.handlers[:]:
        _logger.removeHandler(old)
        with suppress(OSError):  # of a line for which there was no room
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
