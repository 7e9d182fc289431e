"""Strict JSON, read in pieces, so that a large text never keeps other threads from running for long.

``json.loads`` holds the interpreter lock from the first character to the last: 8 MB of ``[],`` stop every
thread of the process for 0.4 s. Here Python walks over lists and objects and leaves strings and runs of numbers
to ``json``; between two pieces other threads get their turn.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from json import JSONDecodeError
from typing import Any, NoReturn

from engine.errors import shown

MAX_DEPTH = 64
"""Lists and objects inside one another."""

MAX_VALUES = 100_000
"""Values in one text, keys included; those in long runs of numbers do not count. Each takes about 1 µs."""

_RUN_CHARS = 1 << 16  # of numbers that are read at once, in about a millisecond
_SHORT = 64  # characters; a shorter run is read number by number

_skip_space = re.compile(r"[ \t\n\r]*").match
_number_run = re.compile(rf"[-+0-9.eE, \t\n\r]{{1,{_RUN_CHARS}}}").match


class TooManyValuesError(ValueError):
    """The text has more values than it may have."""


def parse_json(text: str, max_values: int = MAX_VALUES) -> Any:
    """What ``json.loads`` makes of ``text``; NaN and Infinity are refused, and 1e999, which it reads as one.

    Raises:
        JSONDecodeError: it is not JSON.
        RecursionError: lists and objects nest deeper than ``MAX_DEPTH``.
        TooManyValuesError: it has more than ``max_values`` values; see ``MAX_VALUES``.
        ValueError: a number is NaN, infinite, too large for a float, or has thousands of digits.
    """
    reader = _Reader(text, max_values)
    value, end = reader.value(reader.skip(0), 0)
    end = reader.skip(end)
    if end != len(text):
        raise JSONDecodeError("Extra data", text, end)
    return value


class _Reader:
    """Reads values of one text; each method returns what follows ``at`` and where that ends."""

    __slots__ = ("_keys", "_left", "_max_values", "_text")

    def __init__(self, text: str, max_values: int) -> None:
        self._text = text
        self._max_values = self._left = max_values
        self._keys: dict[str, str] = {}  # equal keys share one string

    def skip(self, at: int) -> int:
        """The end of the white space at ``at``."""
        match = _skip_space(self._text, at)
        assert match is not None  # it matches nothing, too
        return match.end()

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        self._left -= 1
        if self._left < 0:
            raise TooManyValuesError(f"more than {self._max_values} values")
        if depth > MAX_DEPTH:
            raise RecursionError
        opening = self._text[at : at + 1]
        if opening == "[":
            return self._list(self.skip(at + 1), depth + 1)
        if opening == "{":
            return self._object(self.skip(at + 1), depth + 1)
        try:
            return _scan(self._text, at)
        except StopIteration as error:
            raise JSONDecodeError("Expecting value", self._text, error.value) from None

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        text = self._text
        items: list[Any] = []
        if text.startswith("]", at):
            return items, at + 1
        while True:
            run = _number_run(text, at)
            if run is not None and run.end() - at > _SHORT:
                comma = text.rfind(",", at + 1, run.end())
                if comma > 0:
                    items += self._numbers(at, comma)
                    at = self.skip(comma + 1)
                    continue
            item, at = self.value(at, depth)
            items.append(item)
            at = self.skip(at)
            if text.startswith("]", at):
                return items, at + 1
            at = self._after(",", at, "Expecting ',' delimiter")

    def _numbers(self, begin: int, end: int) -> list[Any]:
        """Whole items that are numbers, and the commas between them."""
        try:
            numbers: list[Any] = _loads(f"[{self._text[begin:end]}]")
        except JSONDecodeError as error:
            raise JSONDecodeError(error.msg, self._text, begin + error.pos - 1) from None
        return numbers

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        text = self._text
        members: dict[str, Any] = {}
        if text.startswith("}", at):
            return members, at + 1
        while True:
            if not text.startswith('"', at):
                raise JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
            key, at = self.value(at, depth)
            at = self._after(":", self.skip(at), "Expecting ':' delimiter")
            value, at = self.value(at, depth)
            members[self._keys.setdefault(key, key)] = value
            at = self.skip(at)
            if text.startswith("}", at):
                return members, at + 1
            at = self._after(",", at, "Expecting ',' delimiter")

    def _after(self, char: str, at: int, otherwise: str) -> int:
        """The first character of what follows ``char`` at ``at``."""
        if not self._text.startswith(char, at):
            raise JSONDecodeError(otherwise, self._text, at)
        return self.skip(at + 1)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {shown(text)} is too large")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)
_loads = _DECODER.decode
_scan: Callable[[str, int], tuple[Any, int]] = _DECODER.scan_once  # type: ignore[attr-defined]
