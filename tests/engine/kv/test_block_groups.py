"""Groups of a block map: every block belongs to the right prefix and request, and only so much is looked at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv import block_groups
from engine.kv.block_groups import MAX_NAMES, NONE, SEVERAL, by_holder, by_prefix
from engine.kv.block_keys import block_keys
from engine.kv.block_pool import NO_BLOCK, BlockPool
from engine.kv.kv_events import KvEvents
from engine.kv.prefix_index import PrefixIndex

SIZE, ROOT = 2, 77


class Setting:
    """A pool of blocks of two tokens and its index; prompts are named by their blocks, one letter each."""

    def __init__(self, blocks: int = 16) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.index = PrefixIndex(self.pool, observer=KvEvents(SIZE, lambda _: ROOT))

    def hold(self, prompt: str) -> None:
        tokens = [ord(letter) for letter in prompt for _ in range(SIZE)]
        found = self.index.match("root", tokens, len(tokens))
        table = self.index.blocks(found)
        self.pool.share(table)
        more = self.pool.allocate(len(prompt) - len(table))
        assert more is not None
        self.index.extend("root", found, tokens, table + more, len(prompt))

    def seen(self, *prefixes: str) -> str:
        """The name of each block's group, ``*`` for several and ``-`` for none."""
        cells, keys = by_prefix(self.index.sample(1), [key_of(prefix) for prefix in prefixes])
        names = {key_of(name): name for name in (*prefixes, *"abcx")}
        signs = {NONE: "-", SEVERAL: "*"} | {at: names[key] for at, key in enumerate(keys, 1)}
        return " ".join(signs[cell] for cell in cells).removesuffix(" -" * (len(cells) - len(self.index)))


def key_of(prompt: str) -> int:
    return block_keys(ROOT, [ord(letter) for letter in prompt for _ in range(SIZE)], SIZE)[-1]


def test_a_block_belongs_to_the_longest_prefix_that_it_continues_or_begins() -> None:
    setting = Setting()
    setting.hold("abcd")
    setting.hold("abxy")
    assert setting.seen("ab") == "ab ab ab ab ab ab"
    assert setting.seen("abc", "abx") == "* * abc abc abx abx"
    assert setting.seen("ab", "abx") == "ab ab ab ab abx abx"


def test_what_continues_no_prefix_belongs_to_its_first_block() -> None:
    setting = Setting()
    setting.hold("abc")
    setting.hold("axy")
    setting.hold("xy")
    assert setting.seen() == "a a a a a x x"
    assert setting.seen("ab") == "ab ab ab a a x x"  # the first one is its beginning


def test_a_prefix_that_is_not_there_and_blocks_without_a_key_belong_to_none() -> None:
    setting = Setting(4)
    setting.hold("ab")
    assert setting.pool.allocate(1) == [2]
    cells, keys = by_prefix(setting.index.sample(1), [key_of("cc"), key_of("cc")])
    assert (cells, keys) == (bytes([2, 2, 0, 0]), [key_of("cc"), key_of("a")])


def test_only_so_many_nodes_are_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting()
    setting.hold("abc")
    setting.hold("xyz")
    monkeypatch.setattr(block_groups, "MAX_VISITS", 3)
    assert setting.seen() == "a a a - - -"


def test_there_are_only_so_many_names() -> None:
    setting = Setting(300)
    for letter in range(300):
        setting.hold(chr(1000 + letter))
    cells, keys = by_prefix(setting.index.sample(1), [])
    assert cells == bytes([*range(1, MAX_NAMES + 1), *[NONE] * (300 - MAX_NAMES)])
    assert len(keys) == MAX_NAMES
    names = by_holder(((at, (at,), ()) for at in range(300)), 1, 300, 0)
    assert names == (cells, list(range(MAX_NAMES)))


def test_blocks_belong_to_who_holds_them_on_the_device_and_on_the_host() -> None:
    held = [("a", (0, 1, NO_BLOCK), ()), ("b", (0, 2), ()), ("a", (1, 3), ()), ("c", (), (1, NO_BLOCK))]
    assert by_holder(held, 1, 5, 2) == (bytes([SEVERAL, 1, 2, 1, NONE, NONE, 3]), ["a", "b", "c"])


def test_tables_beyond_the_limit_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_groups, "MAX_VISITS", 3)
    assert by_holder([("a", (0, 1), ()), ("b", (1, 2), ())], 1, 4, 0) == (bytes([1, 1, 0, 0]), ["a"])


@given(st.lists(st.lists(st.integers(0, 40), unique=True), max_size=5), st.integers(1, 7))
def test_a_sample_says_of_its_blocks_what_the_whole_map_says(tables: list[list[int]], each: int) -> None:
    held = [(at, table, ()) for at, table in enumerate(tables)]
    whole, names = by_holder(held, 1, 41, 0)
    assert by_holder(held, each, -(-41 // each), 0) == (whole[::each], names)
