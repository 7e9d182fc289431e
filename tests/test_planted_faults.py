"""The list of planted faults is refused where it does not fit the sources."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planted_faults.__main__ import ListError, check
from tests.planted_faults.catalog import FAULTS
from tests.planted_faults.fault import Fault

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
