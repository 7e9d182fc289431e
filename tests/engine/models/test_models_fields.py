"""Numbers of a model's JSON files."""

from __future__ import annotations

import json

import pytest

from engine.errors import ConfigError
from engine.models.fields import Fields


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "true", '"1"', "1" + "0" * 400])
def test_only_finite_numbers_are_numbers(text: str) -> None:
    fields = Fields(json.loads(f'{{"x": {text}}}'), "config.json")
    with pytest.raises(ConfigError, match=r"config\.json: x is .* but must be a finite number"):
        fields.number("x", 1.0)


@pytest.mark.parametrize(("text", "value"), [("1", 1.0), ("-2.5e-3", -0.0025), ("0", 0.0), ("1e308", 1e308)])
def test_numbers(text: str, value: float) -> None:
    assert Fields(json.loads(f'{{"x": {text}}}'), "config.json").number("x") == value


def test_factors() -> None:
    assert Fields({}, "x").optional_factor("cap", 30.0, 1e3) == 30.0
    assert Fields({"cap": None}, "x").optional_factor("cap", 30.0, 1e3) is None
    for right in (1, 0.001, 1000):
        assert Fields({"cap": right}, "x").optional_factor("cap", 30.0, 1e3) == right
    for wrong in (0, -1.5, 0.0009, 1001):
        with pytest.raises(ConfigError, match=r"x: cap is .* but must be from 0.001 to 1000"):
            Fields({"cap": wrong}, "x").optional_factor("cap", None, 1e3)


def test_absent_numbers() -> None:
    assert Fields({"x": None}, "config.json").optional_number("x") is None
    assert Fields({}, "config.json").number("x", 2.0) == 2.0
