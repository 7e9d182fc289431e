"""One line or object for each record, with time, level, process, and fields; a client cannot forge lines."""

from __future__ import annotations

import errno
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from io import StringIO

import pytest
from leftovers import loggers_restored

from app import logs
from kernels import cpu


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Iterator[StringIO]:
    """What reaches standard error; afterwards Quire's loggers are as they were."""
    stream = StringIO()
    monkeypatch.setattr(sys, "__stderr__", stream)
    with loggers_restored():
        yield stream


def test_what_a_test_configures_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, stream = logging.getLogger("app"), StringIO()
    monkeypatch.setattr(sys, "__stderr__", stream)
    before = logger.handlers[:], logger.level
    with loggers_restored():
        logs.configure("DEBUG", "text", "ingress:1")
        assert (logger.handlers, logger.level) != before
    assert (logger.handlers, logger.level) == before
    logger.error("of a later test")
    assert stream.getvalue() == ""


def test_a_line_has_time_level_process_logger_message_and_fields(output: StringIO) -> None:
    logs.configure("INFO", "text", "engine:k3x8")
    logging.getLogger("app.replica").info(
        "loaded %d", 7, extra={logs.FIELDS: {"blocks": 5, "dtype": "float32"}}
    )
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "
        r"INFO engine:k3x8 app\.replica: loaded 7 blocks=5 dtype=float32\n",
        output.getvalue(),
    )


def test_control_characters_of_a_message_are_escaped(output: StringIO) -> None:
    logs.configure("INFO", "text", "ingress:1")
    logging.getLogger("app").warning("unknown model %s", "a\nERROR forged\r\x1b[31m é")
    assert output.getvalue().count("\n") == 1
    assert r"a\nERROR forged\r\x1b[31m é" in output.getvalue()


def test_warnings_of_quires_packages_are_records_and_others_are_not(output: StringIO) -> None:
    """Serve replaces ``sys.stderr`` by a file, where nobody would see that the reference kernels run."""
    others: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: others.append(str(message))
        logs.configure("INFO", "text", "engine:1")
        logs.configure("INFO", "text", "engine:1")
        warnings.warn_explicit("Quire runs slowly\n", RuntimeWarning, cpu.__file__, 19)
        warnings.warn_explicit("of a library", UserWarning, json.__file__, 1)
    assert re.fullmatch(
        r".* WARNING engine:1 kernels\.cpu\.__init__: Quire runs slowly\\n\n", output.getvalue()
    )
    assert others == ["of a library"]


def test_json_has_one_object_per_record_with_its_traceback(output: StringIO) -> None:
    logs.configure("INFO", "json", "engine:k3x8")
    try:
        raise ValueError("no\nblocks")
    except ValueError:
        logging.getLogger("engine.engine").exception("a step failed", extra={logs.FIELDS: {"step": 3}})
    (line,) = output.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["process"], entry["logger"]) == ("ERROR", "engine:k3x8", "engine.engine")
    assert (entry["message"], entry["step"]) == ("a step failed", 3)
    assert "ValueError: no\nblocks" in entry["exception"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["time"])


def test_the_level_holds_for_all_of_quire_and_a_second_setup_replaces_the_first(output: StringIO) -> None:
    logs.configure("DEBUG", "text", "ingress:1")
    logs.configure("WARNING", "json", "ingress:1")
    for name in ("app.x", "engine.x", "kernels.x"):
        logging.getLogger(name).info("hidden")
        logging.getLogger(name).warning("shown")
    entries = [json.loads(line) for line in output.getvalue().splitlines()]
    assert [(entry["logger"], entry["message"]) for entry in entries] == [
        ("app.x", "shown"),
        ("engine.x", "shown"),
        ("kernels.x", "shown"),
    ]


def test_a_line_without_room_is_lost_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's log takes the place of ``sys.stderr``; it is on the same file system, and fails as well."""

    class Full(StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    class ServesLog(StringIO):
        def write(self, text: str) -> int:
            logging.getLogger("app.serve").error("%s", text)
            return len(text)

    monkeypatch.setattr(sys, "__stderr__", Full())
    monkeypatch.setattr(sys, "stderr", ServesLog())
    with loggers_restored():
        logs.configure("INFO", "text", "ingress:a")
        logging.getLogger("app.x").info("request ended")
