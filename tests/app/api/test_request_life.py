"""One request as the live page shows it."""

from __future__ import annotations

import time

import pytest

from app.api.caller import Caller
from app.api.request_life import life_of
from app.api.request_record import RequestRecord


def test_a_request_that_has_ended_looks_the_same_however_late_and_by_whatever_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = time.time()
    record = RequestRecord(Caller("", "r"), "chat", False)
    record.end()
    life = life_of(record, "a1b2")
    assert before - 0.001 <= life["arrived"] <= time.time() + 0.001
    monkeypatch.setattr(time, "time", lambda: before + 1_000.0)  # somebody has set the clock
    assert life_of(record, "a1b2") == life
