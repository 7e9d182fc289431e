"""A load report: on the wire, made plausible, averaged; every field, whichever there are."""

from __future__ import annotations

import math
import struct
from dataclasses import asdict, fields, replace

import pytest
from routing_support import IDLE

from app.routing.load import PREFILL_RATE, WIRE, LoadReport, average, pack, sane, unpack_from
from engine.scheduling.load_report import EngineLoad

NAMES = [field.name for field in fields(LoadReport)]
FLOATS = {"prefill_rate", "step_seconds", "first_end", "half_ended", "all_ended", "stalled_s"}
DISTINCT = LoadReport(**{name: number + (0.5 if name in FLOATS else 0) for number, name in enumerate(NAMES, 1)})


def test_a_report_has_all_that_the_engine_says_and_four_fields_of_its_own() -> None:
    of_engine = {field.name for field in fields(EngineLoad)}
    assert set(NAMES) - of_engine == {"num_blocks", "block_size", "acknowledged", "stalled_s", "suspects"}
    assert of_engine < set(NAMES)


def test_every_field_arrives() -> None:
    assert unpack_from(b"xx" + pack(DISTINCT), 2) == DISTINCT
    assert len(pack(DISTINCT)) == WIRE.size == 8 * len(NAMES)
    with pytest.raises(struct.error):
        unpack_from(pack(DISTINCT)[:-1], 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), float("-inf"), 10**400])
def test_what_cannot_be_true_becomes_unknown_and_nothing_else_changes(name: str, value: float) -> None:
    assert asdict(sane(replace(DISTINCT, **{name: value}))) == {**asdict(DISTINCT), name: 0}


@pytest.mark.parametrize(
    ("name", "kept", "refused"),
    [
        ("waiting_tokens", 2**53, 2**53 + 1),
        ("prefill_rate", 1e-3, 0.9e-3),
        ("prefill_rate", 1e12, 1.1e12),
        ("step_seconds", 1e-9, 0.9e-9),
        ("step_seconds", 1e4, 1.1e4),
    ],
)
def test_limits_of_what_is_plausible(name: str, kept: float, refused: float) -> None:
    assert getattr(sane(replace(DISTINCT, **{name: kept})), name) == kept
    assert getattr(sane(replace(DISTINCT, **{name: refused})), name) == 0


def test_a_plausible_report_has_numbers_of_the_right_kind() -> None:
    made = sane(replace(DISTINCT, running=3.0, prefill_rate=7))  # type: ignore[arg-type]
    assert {name for name in NAMES if isinstance(getattr(made, name), float)} == FLOATS
    assert (made.running, made.prefill_rate) == (3, 7.0)


def test_average_is_of_each_field_and_the_median_of_the_known_rates() -> None:
    loads = [replace(IDLE, waiting_tokens=tokens, prefill_rate=0.0) for tokens in (10, 21)]
    mean = average(loads)
    assert (mean.waiting_tokens, mean.free, mean.prefill_rate) == (15, IDLE.free, PREFILL_RATE)
    assert math.isclose(mean.step_seconds, IDLE.step_seconds)
    rates = [replace(IDLE, prefill_rate=rate) for rate in (0.0, 900.0, 100.0, 800.0)]
    assert average(rates).prefill_rate == 800.0


def test_average_of_an_unknown_fleet_is_an_empty_replica() -> None:
    assert asdict(average([])) == {**dict.fromkeys(NAMES, 0), "prefill_rate": PREFILL_RATE}
