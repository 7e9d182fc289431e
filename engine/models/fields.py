"""Typed reading of a JSON object, with errors that name the file and the key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError, shown

MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys of ``raw``. An absent or null key takes the default; without a default it is an error."""

    raw: Mapping[str, Any]
    where: str  # begins each message
    prefix: str = ""  # of each key in a message

    def error(self, problem: str) -> ConfigError:
        """An error about this object, to raise."""
        return ConfigError(f"{self.where}: {problem}")

    def integer(self, key: str, default: int | None = None, most: int = MAX_INTEGER) -> int:
        """A positive integer, at most ``most``."""
        value = self.raw.get(key)
        found = self._integer(key, default if value is None else value, most)
        if found is None:
            raise self.error(f"{self.prefix}{key} is missing")
        return found

    def optional_integer(self, key: str, default: int | None, most: int = MAX_INTEGER) -> int | None:
        """A positive integer, at most ``most``.

        An explicit null is ``None`` whatever the default: it turns a window off.
        """
        return self._integer(key, self.raw.get(key, default), most)

    def _integer(self, key: str, value: Any, most: int) -> int | None:
        """``value``, checked, even if it is a default: that may follow from other keys of the file."""
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{self.prefix}{key} is {shown(value)} but must be a positive integer")
        if value > most:
            raise self.error(f"{self.prefix}{key} is {shown(value)} but must be at most {most}")
        return int(value)

    def count(self, key: str, default: int) -> int:
        """An integer from 0."""
        return 0 if self.raw.get(key) == 0 else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.optional_number(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{self.prefix}{key} is missing")
        return value

    def positive(self, key: str, default: float, most: float) -> float:
        """A number above 0, at most ``most``."""
        value = self.number(key, default)
        if not 0.0 < value <= most:
            raise self.error(f"{self.prefix}{key} is {value} but must be above 0 and at most {most:g}")
        return value

    def optional_number(self, key: str) -> float | None:
        """A finite number or ``None``."""
        value = self.raw.get(key)
        if value is None:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) <= sys.float_info.max:  # refuses NaN, too
            raise self.error(f"{self.prefix}{key} is {shown(value)} but must be a finite number")
        return float(value)

    def optional_factor(self, key: str, default: float | None, most: float) -> float | None:
        """A number from ``1 / most`` to ``most``.

        An explicit null is ``None`` whatever the default: it turns a cap off.
        """
        if key not in self.raw:
            return default
        value = self.optional_number(key)
        if value is not None and not 1.0 / most <= value <= most:
            raise self.error(f"{self.prefix}{key} is {value} but must be from {1.0 / most:g} to {most:g}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{self.prefix}{key} is {shown(value)} but must be true or false")
        return value

    def text(self, key: str) -> str | None:
        """A string or ``None``."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{self.prefix}{key} is {shown(value)} but must be a string")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; absent or null is the empty tuple."""
        value = self.raw.get(key)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        for item in values:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise self.error(
                    f"{self.prefix}{key} is {shown(value)} but must be a token id or a list of them"
                )
        return tuple(values)
