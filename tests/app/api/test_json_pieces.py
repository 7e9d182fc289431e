"""JSON read in pieces against ``json.loads``, on what is JSON and on what is not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api import json_pieces
from app.api.json_pieces import MAX_DEPTH, TooManyValuesError, parse_json

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(st.integers(), min_size=40),
    max_leaves=60,
)


@given(VALUES, st.sampled_from([None, 1, "\t\r\n "]), st.booleans())
def test_it_reads_what_json_reads(value: Any, indent: int | str | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert parse_json(f" {text}\n") == json.loads(text)


@given(VALUES, st.data())
def test_a_damaged_text_is_an_error_exactly_where_json_says_so(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value)
    place = data.draw(st.integers(0, len(text)))
    damaged = text[:place] + data.draw(st.sampled_from(list('[]{},:"0-.e \\ux'))) + text[place + 1 :]
    wanted, place_of_error = outcome(strictly, damaged)
    assert outcome(parse_json, damaged) == (wanted, place_of_error)


def outcome(read: Callable[[str], Any], text: str) -> tuple[Any, int | None]:
    """The value, and where the error is; -1 if a number is too large."""
    try:
        return read(text), None
    except json.JSONDecodeError as error:
        return None, error.pos
    except ValueError:
        return None, -1


def strictly(text: str) -> Any:
    """What ``json`` reads, and an error where that would be an infinite number."""

    def finite(number: str) -> float:
        if math.isinf(float(number)):
            raise ValueError
        return float(number)

    return json.loads(text, parse_float=finite)


@pytest.mark.parametrize("size", [10, 39, 40, 20_000])
@pytest.mark.parametrize("number", ["7", "-12.5e3", "123456789012345678901234567890"])
def test_runs_of_numbers_of_any_length(size: int, number: str) -> None:
    text = "[" + ", ".join([number] * size) + "]"
    assert parse_json(text) == json.loads(text)
    mixed = text.replace(number, '"a"', 1)[:-1] + ', "b", [], ' + text[1:]
    assert parse_json(mixed) == json.loads(mixed)


@pytest.mark.parametrize("end", [",]", ",,1]", "", "1", " 1]", ",x]", '"]', ",01]"])
def test_a_run_of_numbers_that_ends_wrongly_is_an_error(end: str) -> None:
    text = "[" + ",".join(["12345"] * 20_000) + end
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    if end != "1":
        with pytest.raises(json.JSONDecodeError):
            parse_json(text)


def test_nan_infinity_and_endless_numbers_are_refused() -> None:
    for text in ("NaN", "[1, Infinity]", '{"a": -Infinity}', "[" + "1," * 50 + "NaN]", "[" + "9" * 5000 + "]"):
        with pytest.raises(ValueError, match=r"JSON|digits"):
            parse_json(text)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400 + ".0", "1e" + "9" * 100])
def test_a_number_that_would_become_infinity_is_refused(number: str) -> None:
    assert abs(json.loads(number)) == float("inf")
    for text in (number, f'{{"a": [{number}]}}', "[" + "1," * 50 + number + ",1]"):
        with pytest.raises(ValueError, match=r"^the number '-?1.* is too large$") as caught:
            parse_json(text)
        assert len(str(caught.value)) < 120
    assert parse_json("[1e308, 1e-999, -0.0]") == [1e308, 0.0, 0.0]


def test_it_nests_as_deep_as_it_says() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(deep) == json.loads(deep)
    for opening in ("[", '{"a":'):
        with pytest.raises(RecursionError):
            parse_json(opening * (MAX_DEPTH + 1))
    with pytest.raises(RecursionError):
        parse_json("[" * 5_000_000)


def test_reading_stops_at_the_most_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever follows is not looked at, so that it costs nothing."""
    scanned = []
    scan = json_pieces._scan
    monkeypatch.setattr(json_pieces, "_scan", lambda text, at: scanned.append(at) or scan(text, at))
    assert parse_json('{"a": ["b", {}, []]}', max_values=6) == {"a": ["b", {}, []]}
    with pytest.raises(TooManyValuesError, match="5"):
        parse_json('{"a": ["b", {}, []]}', max_values=5)
    scanned.clear()
    with pytest.raises(TooManyValuesError):
        parse_json("[" + ",".join(['""'] * 1000) + "]", max_values=100)
    assert len(scanned) == 99
    assert len(parse_json("[" + ",".join(["11"] * 1000) + "]", max_values=2)) == 1000
