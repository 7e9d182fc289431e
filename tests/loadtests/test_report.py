"""Figures and their JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtests.report import Figure, finish, most, parse, save


@pytest.mark.parametrize(
    ("value", "bar", "at_most", "holds"),
    [
        (1.0, None, False, True),
        (2.0, 2.0, False, True),
        (1.9, 2.0, False, False),
        (2.0, 2.0, True, True),
        (2.1, 2.0, True, False),
    ],
)
def test_a_figure_is_held_to_its_bar(value: float, bar: float | None, at_most: bool, holds: bool) -> None:
    assert Figure("figure", value, "", bar, at_most).holds is holds


def test_numbers_of_numpy_are_written_as_numbers(tmp_path: Path) -> None:
    numbers: list[Any] = [np.float64(0.5), np.int64(3), np.float32(0.5)]
    figures = [
        Figure("share", numbers[0], "%", 0.25),
        Figure("count", numbers[1], "", 2, True),
        Figure("rate", numbers[2]),
    ]
    save("command", figures, tmp_path / "out.json", seeds=np.int64(7))
    written = json.loads((tmp_path / "out.json").read_text())
    assert [row["value"] for row in written["figures"]] == [0.5, 3, 0.5]
    assert [row["holds"] for row in written["figures"]] == [True, False, True]
    assert written["seeds"] == 7


def test_options_are_of_the_type_of_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, tuple[Any, str]] = {
        "--quick": (False, "shorter"),
        "--seed": (0, "of all"),
        "--rounds": (3, "of each"),
        "--arms": (["prefix", "random"], "to compare"),
        "more": ([], "words"),
        "--only": ({"memory": 1, "routing": 2}, "parts"),
    }
    default = parse("some", None, options, [])
    assert (default.quick, default.seed, default.rounds, default.arms, default.more) == (
        False,
        0,
        3,
        ["prefix", "random"],
        [],
    )
    given = parse("some", None, options, ["a=1", "--quick", "--rounds", "5", "--check", "--arms", "random"])
    assert (given.quick, given.rounds, given.arms, given.check, given.more) == (
        True,
        5,
        ["random"],
        True,
        ["a=1"],
    )
    assert (default.only, parse("some", None, options, ["--only", "routing"]).only) == (
        ["memory", "routing"],
        ["routing"],
    )
    for wrong, why in (
        ("0", "0 is not a finite number above 0"),
        ("-1", "-1 is not a"),
        ("many", "invalid int value: 'many'"),
    ):
        with pytest.raises(SystemExit):
            parse("some", None, options, ["--rounds", wrong])
        assert f"--rounds: {why}" in capsys.readouterr().err


@pytest.mark.parametrize("title", ["", "load"])
def test_a_missed_bar_is_no_failure_without_a_check(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [most("failures", 3)]
    finish("load", figures, parse("load", None, argv=[]), title)
    shown = capsys.readouterr().out
    assert ("bar <= 0  missed" in shown, "FAILED" in shown) == (True, False)
    with pytest.raises(SystemExit) as ended:
        finish("load", figures, parse("load", None, argv=["--check"]), title)
    assert ended.value.code == 1


@pytest.mark.parametrize("title", ["", "load"])
def test_each_figure_is_printed_once_with_its_bar(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [Figure("rate", 12.0, " tokens/s", 10.0), most("failures", 3), Figure("users", 7.0)]
    finish("load", figures, parse("load", None, argv=[]), title)
    shown = capsys.readouterr().out
    assert [shown.count(words) for words in ("12 tokens/s", "bar >= 10  ok", "bar <= 0  missed")] == [1, 1, 1]
    assert shown.count("commit") == 1
