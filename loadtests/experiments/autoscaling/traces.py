"""Reads recorded traffic: the Azure LLM trace (CSV) and Mooncake's (JSON lines)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TextIO

AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
_LONGEST_LINE = 1 << 20  # characters
_MOST_TOKENS = 100_000_000
_LATEST_MS = 1e15


class TraceError(ValueError):
    """A trace cannot be read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line: arrival in seconds, lengths in tokens."""

    arrival: float
    prompt: int
    output: int


def read_records(path: Path, limit: int) -> list[Record]:
    """The first ``limit`` records of a file in either format, in order of arrival.

    Raises:
        TraceError: the file cannot be read, is in neither format, or holds a wrong line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            first = lines.readline(_LONGEST_LINE)
            if not first.strip():
                raise TraceError(
                    f"{path}: line 1: empty, but must begin a trace in Azure's or Mooncake's format"
                )
            lines.seek(0)
            read = _mooncake if first.lstrip().startswith("{") else _azure
            records = list(islice(read(path, _lines(path, lines)), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    if not records:
        raise TraceError(f"{path}: line 2: no request follows the header")
    return sorted(records, key=lambda record: record.arrival)


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    number = 1
    while line := file.readline(_LONGEST_LINE + 1):
        if len(line) > _LONGEST_LINE:
            raise TraceError(f"{path}: line {number}: longer than {_LONGEST_LINE} characters")
        yield line
        number += 1


def _azure(path: Path, lines: Iterator[str]) -> Iterator[Record]:
    reader = csv.reader(lines)
    try:
        header = tuple(cell.strip() for cell in next(reader))
        if header != AZURE_HEADER:
            raise TraceError(
                f"{path}: line 1: the header is {','.join(header)[:80]!r} but must be "
                f"{','.join(AZURE_HEADER)!r} (Azure), or every line a JSON object (Mooncake)"
            )
        for row in filter(None, reader):
            where = f"{path}: line {reader.line_num}"
            if len(row) != len(AZURE_HEADER):
                raise TraceError(f"{where}: {len(row)} columns but there must be {len(AZURE_HEADER)}")
            prompt, output = (_length(row[i], where, AZURE_HEADER[i]) for i in (1, 2))
            yield Record(_time(row[0], where), prompt, output)
    except csv.Error as error:
        raise TraceError(f"{path}: line {reader.line_num}: not CSV: {error}") from error


def _mooncake(path: Path, lines: Iterator[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{where}: not JSON: {getattr(error, 'msg', error)}") from error
        if not isinstance(entry, dict):
            raise TraceError(f"{where}: {type(entry).__name__} but must be a JSON object")
        missing = [name for name in _MOONCAKE_KEYS if name not in entry]
        if missing:
            raise TraceError(f"{where}: without {', '.join(missing)}")
        prompt, output = (_length(entry[name], where, name) for name in ("input_length", "output_length"))
        stamp = entry["timestamp"]
        # An integer may be too large for a float.
        if type(stamp) not in (int, float) or not abs(stamp) < _LATEST_MS:
            raise TraceError(f"{where}: timestamp is {repr(stamp)[:60]} but must be a number of milliseconds")
        yield Record(stamp / 1000, prompt, output)


def _time(text: str, where: str) -> float:
    try:
        # Azure writes seven digits of a second; Python reads six
        return datetime.fromisoformat(text.strip()[:26]).timestamp()
    except (ValueError, OverflowError) as error:
        example = "2023-11-16 18:15:46.68"
        raise TraceError(f"{where}: TIMESTAMP is {text[:40]!r} but must be like {example!r}") from error


def _length(value: object, where: str, name: str) -> int:
    try:
        length = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else -1
    except ValueError:
        length = -1
    if not 0 <= length <= _MOST_TOKENS:
        raise TraceError(f"{where}: {name} is {repr(value)[:60]} but must be an integer of 0 to {_MOST_TOKENS}")
    return length
