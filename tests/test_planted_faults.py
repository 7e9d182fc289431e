"""The list of planted faults is refused where it does not fit the sources; verdicts, and the time they take."""

from __future__ import annotations

import ast
import dataclasses
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.planted_faults.__main__ import ListError, check
from tests.planted_faults.catalog import FAULTS
from tests.planted_faults.estimate import Estimate
from tests.planted_faults.fault import Fault
from tests.planted_faults.tree import COPIED, OUTPUT, ROOT, Times, run_tests
from tests.planted_faults.verdict import Verdict, passes, summary

SOUND = Fault(
    "engine/kv/block_keys.py", "KEY_BYTES = 8", "KEY_BYTES = 4", ("engine/kv/test_block_keys.py",), "short keys"
)


def test_a_fault_whose_text_occurs_once_is_sound() -> None:
    check([SOUND])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": "nowhere to be found"}, "occurs 0 times instead of once: 'nowhere to be found'"),
        ({"old": "KEY_BYTES"}, r"occurs \d+ times instead of once"),
        ({"file": "engine/gone.py"}, "engine/gone.py: occurs 0 times"),
        ({"new": "KEY_BYTES = ("}, "was never closed"),
        ({"tests": ("engine/kv/test_gone.py",)}, "no tests/engine/kv/test_gone.py"),
        (
            {"tests": ("engine/kv/test_block_keys.py::test_gone",)},
            "no tests/engine/kv/test_block_keys.py::test_gone",
        ),
    ],
)
def test_any_other_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ListError, match=message):
        check([SOUND, dataclasses.replace(SOUND, **change)])  # type: ignore[arg-type]


def test_the_list_fits_the_sources() -> None:
    check(FAULTS)


@pytest.mark.parametrize(
    ("status", "hangs", "verdict"),
    [
        (0, False, Verdict.SURVIVED),
        (1, False, Verdict.CAUGHT),
        (-11, False, Verdict.CRASHED),
        (4, False, Verdict.BROKEN),
        (5, False, Verdict.BROKEN),
        (None, False, Verdict.UNDECIDED),
        (None, True, Verdict.HUNG),
        (0, True, Verdict.SURVIVED),
    ],
)
def test_only_a_hang_that_is_expected_is_caught(status: int | None, hangs: bool, verdict: Verdict) -> None:
    assert Verdict.of(dataclasses.replace(SOUND, hangs=hangs), status) is verdict


def verdicts(*of: Verdict) -> dict[Fault, Verdict]:
    """Of as many faults."""
    return {dataclasses.replace(SOUND, why=str(number)): verdict for number, verdict in enumerate(of)}


def test_95_of_100_pass_if_all_are_decided() -> None:
    caught, hung = [Verdict.CAUGHT] * 94, [Verdict.HUNG]
    assert passes(verdicts(*caught, *hung, *[Verdict.SURVIVED] * 5))
    assert not passes(verdicts(*caught, *[Verdict.SURVIVED] * 6))
    assert not passes(verdicts(*caught, *hung, *[Verdict.CAUGHT] * 4, Verdict.UNDECIDED))
    lines = summary(verdicts(*caught, Verdict.SURVIVED, Verdict.UNDECIDED))
    assert lines[0] == "94 of 96 planted faults were caught (97.9%)"
    assert lines[1].startswith("1 not decided")
    assert [line.split(":")[0] for line in lines[2:]] == ["SURVIVED", "NOT DECIDED"]


def test_what_tests_took_without_a_fault_tells_how_long_they_may_take_with_it() -> None:
    other = dataclasses.replace(SOUND, tests=("a/test_b.py::test_c",), hangs=True)
    compiled = dataclasses.replace(other, file="kernels/cpu/sampling.cpp", hangs=False)
    estimate = Estimate(
        [
            {"engine/kv/test_block_keys.py::test_a": 40.0, "engine/kv/test_block_keys.py::TestB::test_c": 10.0},
            {"a/test_b.py::test_c": 2.0, "a/test_b.py::test_d": 60.0},
        ]
    )
    assert [estimate.seconds(one) for one in (SOUND, other, compiled)] == [50.5, 2.5, 42.5]
    assert [estimate.limit_s(one) for one in (SOUND, other, compiled)] == [505.0, 30.0, 425.0]
    assert estimate.remaining_s(90.0, [other, compiled], [SOUND]) == 101.0
    assert estimate.remaining_s(100.0, [], [SOUND]) == 0.0


def test_the_fastest_tests_of_the_fastest_file_come_first() -> None:
    ids = ["tests/a.py::test_x[1]", "tests/b.py::test_y", "tests/a.py::test_z", "tests/a.py::test_new"]
    session = SimpleNamespace(items=[SimpleNamespace(nodeid=nodeid) for nodeid in ids])
    Times({"a.py::test_x": 3.0, "a.py::test_z": 1.0, "b.py::test_y": 2.0}).pytest_collection_finish(session)
    assert [item.nodeid for item in session.items] == [ids[1], ids[3], ids[2], ids[0]]


PARSES_WHILE_IT_IS_COLLECTED = """
import ast


class Task:
    def __init__(self):
        self.itself = self

    def __del__(self):
        ast.parse("1")


def test():
    for _ in range(100):
        Task()
    raise ValueError
"""


def test_a_test_that_fails_is_told_from_one_that_does_not_run(tmp_path: Path) -> None:
    """Python 3.11 may raise a SystemError where garbage is collected while a file is parsed for a traceback."""
    (tmp_path / "tests").mkdir()
    filler = "".join(f"x{number} = [{number}, 1]\n" for number in range(5_000))
    (tmp_path / "tests" / "test_it.py").write_text(PARSES_WHILE_IT_IS_COLLECTED + filler)
    process = multiprocessing.get_context("spawn").Process(
        target=run_tests, args=(str(tmp_path), ["test_it.py"], False, {})
    )
    process.start()
    process.join()
    assert process.exitcode == 1, (tmp_path / OUTPUT).read_text()


def test_what_the_tests_import_is_copied() -> None:
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()}
    imported = set()
    for file in {test.partition("::")[0] for fault in FAULTS for test in fault.tests}:
        for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    assert imported & ours <= set(COPIED)
