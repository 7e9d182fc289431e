"""Which beams went on from which: recorded searches of the bundled model, kept in one small file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

RECORDS = Path(__file__).with_name("beams.json")

Parents = tuple[tuple[int, ...], ...]
"""``parents[t][i]``: the beam of step ``t`` that beam ``i`` of step ``t + 1`` goes on from."""


def load_parents(width: int, path: Path = RECORDS) -> list[Parents]:
    """The recorded searches with ``width`` beams.

    Raises:
        ValueError: the file has none of that width, or a record is damaged.
    """
    records = json.loads(path.read_text())["parents"].get(str(width), [])
    if not records:
        raise ValueError(f"{path}: no search with {width} beams; record some with --record-beams")
    return [_decode(record, width, path) for record in records]


def save_parents(searches: dict[int, Sequence[Parents]], source: str, path: Path = RECORDS) -> None:
    """Write recorded searches by their number of beams; ``source`` says what was recorded."""
    parents = {
        str(width): ["".join(str(beam) for step in search for beam in step) for search in found]
        for width, found in searches.items()
    }
    path.write_text(json.dumps({"source": source, "parents": parents}, indent=1) + "\n")


def _decode(record: str, width: int, path: Path) -> Parents:
    """One digit is one beam's parent; ``width`` digits are one step."""
    beams = [int(digit) for digit in record]
    if not beams or len(beams) % width or max(beams) >= width:
        raise ValueError(f"{path}: a search with {width} beams is damaged: {record[:40]!r}")
    return tuple(tuple(beams[start : start + width]) for start in range(0, len(beams), width))
