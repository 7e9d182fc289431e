"""One logging setup for all processes: each record is a line of text or a JSON object on standard error."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
LogFormat = Literal["text", "json"]

LOGGERS = ("app", "engine", "kernels")
"""The roots of Quire's own loggers; those of libraries stay as they are."""

_ROOT = Path(__file__).resolve().parents[1]

FIELDS = "fields"
"""``logger.info(message, extra={FIELDS: {...}})`` adds named values to a record."""


class TextFormatter(logging.Formatter):
    """``2026-11-28 20:05:50.123 INFO engine:k3x8 app.replica: message key=value``, in local time.

    Control characters in the message are escaped: a client's text cannot forge a second line.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        text = " ".join([record.getMessage(), *(f"{name}={value}" for name, value in _fields(record).items())])
        origin = f"{record.levelname} {self._process} {record.name}"
        line = f"{moment}.{int(record.msecs):03d} {origin}: {_escaped(text)}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """One object with ``time`` (UTC, ISO 8601), ``level``, ``process``, ``pid``, ``logger``, ``message``,
    the record's fields, and ``exception`` with the traceback.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class _Warnings:
    """Makes records of the Python warnings that Quire's packages raise; Serve would hide them in a file."""

    def __init__(self, others: Callable[..., None]) -> None:
        self._others = others

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        *where: Any,
        **how: Any,
    ) -> None:
        path = Path(filename)
        if path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in LOGGERS:
            module = path.relative_to(_ROOT).with_suffix("")
            logging.getLogger(".".join(module.parts)).warning("%s", message)
        else:
            self._others(message, category, filename, lineno, *where, **how)


class _Handler(logging.StreamHandler[Any]):
    """Ours, so that a second :func:`configure` finds the handler of the first."""

    def handleError(self, record: logging.LogRecord) -> None:
        """A line for which there is no room is lost, and the request goes on.

        By default that is written to ``sys.stderr``: in a replica Serve's log, mostly on the same file system,
        which fails in turn and reports that there, until the recursion is too deep and the request fails.
        """
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def replica_name(deployment: str) -> str:
    """``engine:k3x8``: the deployment and Serve's id of this replica; outside a replica, the process ID."""
    from ray import serve  # here, so that the launcher refuses a wrong option before Ray is loaded
    from ray.serve.exceptions import RayServeException

    try:
        return f"{deployment}:{serve.get_replica_context().replica_id.unique_id}"
    except RayServeException:
        return f"{deployment}:{os.getpid()}"


def configure(level: LogLevel, log_format: LogFormat, process: str) -> None:
    """Send Quire's warnings, and its records of ``level`` and above, to stderr; the latest call counts.

    Args:
        process: what this process is, such as ``engine:k3x8``; it is named in every line.
    """
    handler = _Handler(sys.__stderr__)  # Serve may have replaced sys.stderr by its own log file
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        for old in [old for old in logger.handlers if isinstance(old, _Handler)]:
            logger.removeHandler(old)
        logger.addHandler(handler)
        logger.setLevel(level)
    if not isinstance(warnings.showwarning, _Warnings):
        warnings.showwarning = _Warnings(warnings.showwarning)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, FIELDS, {})
    return fields


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
