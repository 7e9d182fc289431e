"""Block keys are the same everywhere and name exactly one prefix."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.block_keys import BlockHash, KeyScheme, block_keys, root_key
from engine.request import CacheNamespace

ROOT = root_key("abc123", "bfloat16", 16, CacheNamespace())
GOLDEN_ROOT = 14229788029951165757
GOLDEN_KEYS = [53869160973288696, 3147879521537907075]


def test_golden_values() -> None:
    """Routers and engines of one fleet must agree: a change of the format needs a new personalization."""
    assert ROOT == GOLDEN_ROOT
    assert block_keys(ROOT, range(32), 16) == GOLDEN_KEYS


def test_other_processes_agree() -> None:
    code = (
        "from engine.kv.block_keys import block_keys, root_key; from engine.request import CacheNamespace;"
        "print(block_keys(root_key('abc123', 'bfloat16', 16, CacheNamespace()), range(32), 16))"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == str(GOLDEN_KEYS)


def test_only_full_blocks_have_keys() -> None:
    assert [len(block_keys(ROOT, [5] * count, 4)) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_equal_tokens_after_different_ones_have_different_keys() -> None:
    first, second = block_keys(ROOT, [1, 1, 9, 9], 2), block_keys(ROOT, [2, 2, 9, 9], 2)
    assert set(first).isdisjoint(second)
    assert len(set(block_keys(ROOT, [7] * 64, 2))) == 32


@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 5), st.integers(0, 5))
def test_keys_of_a_beginning_are_a_beginning_of_the_keys(tokens: list[int], size: int, blocks: int) -> None:
    keys = block_keys(ROOT, tokens, size)
    assert block_keys(ROOT, tokens[: blocks * size], size) == keys[:blocks]
    if 0 < blocks <= len(keys):
        assert block_keys(keys[blocks - 1], tokens[blocks * size :], size) == keys[blocks:]
    assert all(0 <= key < 2**64 for key in keys)


def test_parts_of_a_root_never_pass_for_each_other() -> None:
    roots = [
        root_key(revision, dtype, size, CacheNamespace(adapter, tenant, salt))
        for revision, dtype, size, adapter, tenant, salt in [
            ("r", "d", 1, "", "", ""),
            ("rd", "", 1, "", "", ""),
            ("", "rd", 1, "", "", ""),
            ("r", "d", 11, "", "", ""),
            ("r", "d", 1, "x", "", ""),
            ("r", "d", 1, "", "x", ""),
            ("r", "d", 1, "", "", "x"),
            ("r", "d", 1, "xy", "", ""),
            ("r", "d", 1, "x", "y", ""),
            ("r", "d", 1, "", "x", "y"),
            ("r", "d", 1, "", "", "xy"),
        ]
    ]
    assert len(set(roots)) == len(roots)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_ids_out_of_range_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match="token ids must be integers from 0 to 4294967295"):
        block_keys(ROOT, [0, token], 2)


@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 5))
def test_one_block_at_a_time_gives_the_same_keys(tokens: list[int], size: int) -> None:
    step, key, keys = BlockHash(size), ROOT, []
    for start in range(0, len(tokens) - size + 1, size):
        key = step(key, tuple(tokens[start : start + size]))
        keys.append(key)
    assert keys == block_keys(ROOT, tokens, size)


@pytest.mark.parametrize("tokens", [(-1, 0), (0, 2**32), (0,), (0, 1, 2)])
def test_no_full_block_of_ids_is_refused(tokens: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no block of tokens"):
        BlockHash(2)(ROOT, tokens)


def test_a_scheme_names_as_the_functions_do_and_its_probe_tells_schemes_apart() -> None:
    scheme, space = KeyScheme("abc123", "bfloat16", 16), CacheNamespace("a", "t", "s")
    root = root_key("abc123", "bfloat16", 16, space)
    assert scheme.root(space) == root
    assert scheme.keys(range(40), space) == block_keys(root, range(40), 16)
    others = [
        KeyScheme("abc124", "bfloat16", 16),
        KeyScheme("abc123", "float32", 16),
        KeyScheme("abc123", "bfloat16", 8),
    ]
    probes = {tuple(one.probe()) for one in [scheme, KeyScheme("abc123", "bfloat16", 16), *others]}
    assert len(probes) == 4
    assert {len(probe) for probe in probes} == {3}
