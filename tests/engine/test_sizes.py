"""Sizes in bytes as people write them."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from engine.sizes import format_bytes, parse_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GiB", 40 * GIB), ("1.5gib", 3 * GIB // 2), ("24G", 24 * 10**9), ("512 MB", 512 * 10**6), ("7", 7)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "0", "12 parsecs", "1" * 400])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size in bytes"):
        parse_bytes(text)


def test_sizes_are_printed_with_four_digits() -> None:
    assert [format_bytes(size) for size in (7, 40960, 5 * GIB, 3 * GIB // 2)] == [
        "7 B",
        "40 KiB",
        "5 GiB",
        "1.5 GiB",
    ]
