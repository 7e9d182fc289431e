"""Predicted against actual cached tokens: counted for each request, and said aloud when they part."""

from __future__ import annotations

import logging

import pytest

from app.routing.predictions import RECENT, WARN_EVERY_S, Predictions


def test_every_request_is_counted() -> None:
    predictions = Predictions()
    for predicted, actual in ((0, 0), (160, 160), (320, 160), (0, 48)):
        predictions.count(predicted, actual)
    counters = predictions.counters
    assert (counters.requests, counters.predicted, counters.actual, counters.error) == (4, 480, 368, 208)
    assert predictions.error == pytest.approx(208 / 528)


def test_nothing_cached_is_no_error() -> None:
    predictions = Predictions()
    assert predictions.error == 0.0
    predictions.count(0, 0)
    assert predictions.error == 0.0


def test_it_warns_once_a_minute_while_they_part(caplog: pytest.LogCaptureFixture) -> None:
    now = 1000.0
    predictions = Predictions(lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(RECENT - 1):
            predictions.count(1600, 0)
        assert not caplog.records  # a handful may be a burst that outran its events
        for _ in range(RECENT):
            predictions.count(1600, 0)
        assert len(caplog.records) == 1
        assert "the difference is 100%" in caplog.text
        now += WARN_EVERY_S
        predictions.count(1600, 0)
        assert len(caplog.records) == 2


def test_small_differences_are_events_on_their_way(caplog: pytest.LogCaptureFixture) -> None:
    predictions = Predictions()
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * RECENT):
            predictions.count(160, 144)
    assert not caplog.records
