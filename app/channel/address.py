"""Where a replica waits for the connection of a channel."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port of a replica, and the ``key`` of one channel in hexadecimal digits, valid once."""

    host: str
    port: int
    key: str = field(repr=False)
