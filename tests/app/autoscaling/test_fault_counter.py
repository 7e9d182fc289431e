"""Counting and logging of faults."""

from __future__ import annotations

import logging

import pytest

from app.autoscaling.fault_counter import FaultCounter


def test_every_fault_counts_and_powers_of_two_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    faults = FaultCounter("it failed", logging.getLogger("some.faults"))
    for number in range(9):
        try:
            raise ConnectionError(number)
        except ConnectionError:
            faults.add()
    assert faults.count == 9
    assert [record.getMessage() for record in caplog.records] == [
        f"it failed ({count} times so far)" for count in (1, 2, 4, 8)
    ]
    assert {record.name for record in caplog.records} == {"some.faults"}
    assert all(record.exc_info for record in caplog.records)
