"""Reads recorded traffic: Azure's LLM inference traces (CSV) and Mooncake's (JSONL)."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BLOCK_TOKENS = 512
"""Of a prompt for each of Mooncake's hash ids."""
_MOST_TOKENS = 100_000_000
_MOST_MS = 1e13


class TraceError(ValueError):
    """A trace cannot be read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request: arrival in seconds, lengths in tokens.

    ``blocks`` has an id for each block of the prompt; where two prompts have equal ids, they are equal up to
    there. Without ids, nothing is shared.
    """

    arrival: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


def read_records(path: Path, limit: int) -> list[Record]:
    """The first ``limit`` records of a file, in order of arrival; its first character says its format.

    Raises:
        TraceError: the file cannot be read, or holds a wrong line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            read = _mooncake if file.read(1) == "{" else _azure
            file.seek(0)
            records = list(islice(read(path, file), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    if not records:
        raise TraceError(f"{path}: line 2: no request follows the header")
    return sorted(records, key=lambda record: record.arrival)


def _azure(path: Path, file: TextIO) -> Iterator[Record]:
    reader = csv.reader(file)
    try:
        header = tuple(cell.strip() for cell in next(reader, ()))
        found, wanted = ",".join(header)[:80], ",".join(HEADER)
        if not found:
            raise TraceError(f"{path}: line 1: it is empty but must be {wanted!r} or a JSON object")
        if header != HEADER:
            raise TraceError(f"{path}: line 1: the header is {found!r} but must be {wanted!r}")
        for row in filter(None, reader):
            where = f"{path}: line {reader.line_num}"
            if len(row) != len(HEADER):
                raise TraceError(f"{where}: {len(row)} columns but there must be {len(HEADER)}")
            prompt, output = (_length(row[i], where, HEADER[i]) for i in (1, 2))
            yield Record(_time(row[0], where), prompt, output)
    except csv.Error as error:
        raise TraceError(f"{path}: line {reader.line_num}: not CSV: {error}") from error


def _mooncake(path: Path, file: TextIO) -> Iterator[Record]:
    for number, line in enumerate(file, 1):
        where = f"{path}: line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{where}: {type(row).__name__} but must be an object")
        prompt, output = (_length(row.get(name), where, name) for name in ("input_length", "output_length"))
        at, blocks = row.get("timestamp"), row.get("hash_ids", [])
        if not isinstance(at, int | float) or isinstance(at, bool) or not 0 <= at <= _MOST_MS:
            raise TraceError(f"{where}: timestamp is {at!r:.60} but must be milliseconds from 0 on")
        if not isinstance(blocks, list) or any(type(one) is not int for one in blocks):
            raise TraceError(f"{where}: hash_ids is {blocks!r:.60} but must be a list of integers")
        if blocks and len(blocks) != (wanted := math.ceil(prompt / BLOCK_TOKENS)):
            raise TraceError(
                f"{where}: {len(blocks)} hash_ids but there must be {wanted}, one per {BLOCK_TOKENS} tokens"
            )
        yield Record(at / 1e3, prompt, output, tuple(blocks))


def _time(text: str, where: str) -> float:
    try:
        # Azure writes seven digits of a second; Python reads six
        return datetime.fromisoformat(text.strip()[:26]).timestamp()
    except (ValueError, OverflowError) as error:
        example = "2023-11-16 18:15:46.68"
        raise TraceError(f"{where}: TIMESTAMP is {text[:40]!r} but must be like {example!r}") from error


def _length(value: Any, where: str, name: str) -> int:
    try:
        length = int(value) if isinstance(value, str) or type(value) is int else -1
    except ValueError:
        length = -1
    if not 0 <= length <= _MOST_TOKENS:
        raise TraceError(
            f"{where}: {name} is {str(value)[:60]!r} but must be an integer of 0 to {_MOST_TOKENS}"
        )
    return length
