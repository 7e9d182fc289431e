"""Which beams went on from which: recorded searches of the bundled model, kept in one small file."""

from __future__ import annotations

import json
from pathlib import Path

RECORDS = Path(__file__).with_name("beams.json")

Parents = tuple[tuple[int, ...], ...]
"""``parents[t][i]``: the beam of step ``t`` that beam ``i`` of step ``t + 1`` goes on from."""


def load_parents(width: int, path: Path = RECORDS) -> list[Parents]:
    """The recorded searches with ``width`` beams: one digit is one beam's parent, ``width`` digits one step.

    Raises:
        ValueError: the file has none of that width, or a record is damaged.
    """
    records = json.loads(path.read_text())["parents"].get(str(width), [])
    if not records:
        raise ValueError(f"{path}: no search with {width} beams")
    found = []
    for record in records:
        beams = [int(digit) for digit in record]
        if not beams or len(beams) % width or max(beams) >= width:
            raise ValueError(f"{path}: a search with {width} beams is damaged: {record[:40]!r}")
        found.append(tuple(tuple(beams[start : start + width]) for start in range(0, len(beams), width)))
    return found
