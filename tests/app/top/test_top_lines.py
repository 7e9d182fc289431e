"""The text of ``app.top``: bars whose signs alone tell, and figures in little room."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.top.lines import BLOCKS, bar, block_map_text, number, prefix_lines, seconds, short, spark


@given(st.lists(st.integers(0, 10**6), min_size=4, max_size=4), st.integers(4, 100))
def test_a_bar_is_full_and_hides_nothing(blocks: list[int], width: int) -> None:
    text = bar(blocks, width).plain
    signs = Counter(text)
    for (_, sign, _), count in zip(BLOCKS, blocks, strict=True):
        assert (signs[sign] > 0) == (count > 0)
        if any(blocks):
            assert abs(signs[sign] - width * count / sum(blocks)) < 4
    assert len(text) == (width if any(blocks) else 0)


@given(st.floats(0.0, 1e14))
def test_a_short_figure_is_short(value: float) -> None:
    assert len(short(value)) <= 5


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (7, "7"), (7.25, "7.2"), (99.96, "100.0"), (1234.5, "1,234"), (123_456, "123k"), (5e6, "5M")],
)
def test_figures(value: float, text: str) -> None:
    assert short(value) == text


def test_units() -> None:
    assert [seconds(value) for value in (None, 0.0, 0.0123, 0.25, 1.25)] == [
        "–",
        "0 ms",
        "12.3 ms",
        "250 ms",
        "1.2 s",
    ]
    assert [number(value) for value in (0.5, 12, 1234.4)] == ["0.5", "12", "1,234"]
    assert spark([None, 0, 4, 8], 3) == "▁▅█"


def test_a_map_has_a_sign_for_each_block() -> None:
    assert block_map_text({"each": 1, "device": "0123", "host": "01"}).plain == (
        "·░▓█\n\nOn the host (▒ swapped):\n·▒\n\nEach sign is a block, by position."
    )


def test_prefixes_have_their_figures_words_and_replicas() -> None:
    to = [{"replica": "q#engine#aaaa", "requests": 9, "reasons": {"wait": 2, "prefix": 7}}]
    first = {
        **{"prefix": "0123456789abcdef", "blocks": 4, "words": "You\x1b[2J are\na helpful", "requests": 9},
        **{"per_s": 0.15, "cached": 0.91, "to": to, "more": 3},
    }
    rest = {
        **{"prefix": None, "blocks": 0, "words": None, "requests": 1, "per_s": 0.0, "cached": None},
        **{"to": [], "more": 0},
    }
    assert prefix_lines([first, rest])[1:] == [
        "0123456789abcdef      4    0.1     91%  aaaa 9 (prefix 7, wait 2); 3 more",
        "  You [2J are a helpful…",
        "all others            –      0       –  –",
    ]
    assert prefix_lines([first, {**rest, "requests": 0}])[3:] == []
    assert prefix_lines([rest])[1].startswith("no common prefix ")
