"""Reads recorded traffic: the Azure LLM trace (CSV)."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TextIO

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOST_TOKENS = 100_000_000


class TraceError(ValueError):
    """A trace cannot be read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line: arrival in seconds, lengths in tokens."""

    arrival: float
    prompt: int
    output: int


def read_records(path: Path, limit: int) -> list[Record]:
    """The first ``limit`` records of a file, in order of arrival.

    Raises:
        TraceError: the file cannot be read, or holds a wrong line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            records = list(islice(_records(path, file), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    if not records:
        raise TraceError(f"{path}: line 2: no request follows the header")
    return sorted(records, key=lambda record: record.arrival)


def _records(path: Path, file: TextIO) -> Iterator[Record]:
    reader = csv.reader(file)
    try:
        header = tuple(cell.strip() for cell in next(reader, ()))
        if header != HEADER:
            found, wanted = ",".join(header)[:80], ",".join(HEADER)
            raise TraceError(f"{path}: line 1: the header is {found!r} but must be {wanted!r}")
        for row in filter(None, reader):
            where = f"{path}: line {reader.line_num}"
            if len(row) != len(HEADER):
                raise TraceError(f"{where}: {len(row)} columns but there must be {len(HEADER)}")
            prompt, output = (_length(row[i], where, HEADER[i]) for i in (1, 2))
            yield Record(_time(row[0], where), prompt, output)
    except csv.Error as error:
        raise TraceError(f"{path}: line {reader.line_num}: not CSV: {error}") from error


def _time(text: str, where: str) -> float:
    try:
        # Azure writes seven digits of a second; Python reads six
        return datetime.fromisoformat(text.strip()[:26]).timestamp()
    except (ValueError, OverflowError) as error:
        example = "2023-11-16 18:15:46.68"
        raise TraceError(f"{where}: TIMESTAMP is {text[:40]!r} but must be like {example!r}") from error


def _length(text: str, where: str, name: str) -> int:
    try:
        length = int(text)
    except ValueError:
        length = -1
    if not 0 <= length <= _MOST_TOKENS:
        raise TraceError(f"{where}: {name} is {text[:60]!r} but must be an integer of 0 to {_MOST_TOKENS}")
    return length
