"""Trees of claimed paths against a plain list of them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from app.routing.claim_tree import ClaimTree, Run
from app.routing.claims import BlockClaim, Claims
from engine.kv.block_keys import block_keys


def path(draw: random.Random) -> list[int]:
    """Keys of up to 12 blocks; few different ones, so that many go together for a while."""
    length, parts = draw.randint(1, 12), draw.randint(0, 12)
    return block_keys(5, [0] * min(length, parts) + [draw.randint(1, 2)] * max(length - parts, 0), 1)


def runs(tree: ClaimTree) -> list[Run]:
    found = list(tree.roots.values())
    for run in found:
        found.extend(run.children.values())
    return found


def check(tree: ClaimTree, starts: dict[int, int], live: list[BlockClaim]) -> None:
    found = runs(tree)
    inside = [claim for claim in live if claim.run is not None]
    assert starts == Counter(list(tree.roots))
    assert sorted(map(id, inside)) == sorted(id(claim) for run in found for claim in run.paths)
    assert len(found) <= 2 * len(inside)
    known = {id(claim.keys) for claim in inside}
    for run in found:
        assert id(run.keys) in known, "keys of a claim that has ended are kept"
        assert run.begin < run.end
        for first, child in run.children.items():
            assert (child.first, child.parent, child.begin) == (first, run, run.end)
        if run.parent is None:
            assert tree.roots[run.first] is run
        assert run.paths or len(run.children) > 1


@pytest.mark.parametrize("seed", range(6))
def test_random_claims(seed: int) -> None:
    draw, starts = random.Random(seed), dict[int, int]()
    tree = ClaimTree(starts)
    live: list[BlockClaim] = []
    missing: dict[int, set[int]] = {}
    there: set[int] = set()
    for _ in range(300):
        act = draw.random()
        if act < 0.5 or not live:
            keys = path(draw)
            held = next((place for place, key in enumerate(keys) if key not in there), len(keys))
            if held == len(keys):
                continue
            claim = BlockClaim("r", (keys[-1], len(keys)), keys[held:], held)
            tree.insert(claim, held)
            live.append(claim)
            missing[id(claim)] = set(claim.keys)
        elif act < 0.8:
            claim = live.pop(draw.randrange(len(live)))
            tree.remove(claim)
            del missing[id(claim)]
        elif act < 0.95:
            new = path(draw)
            there |= set(new)
            for key in new:
                if key in tree.roots:
                    tree.arrive(key, there.__contains__)
            for keys_left in missing.values():
                keys_left -= set(new)
        else:
            for gone in [key for key in there if draw.random() < 0.5]:
                there.discard(gone)
            # An engine has no block without those before it.
            whole = [block_keys(5, [0] * a + [b] * (12 - a), 1) for a in range(13) for b in (1, 2)]
            there &= {
                key
                for keys in whole
                for key in keys[: next((i for i, k in enumerate(keys) if k not in there), 12)]
            }
        check(tree, starts, live)
        for claim in live:
            assert (claim.run is None) == (not missing[id(claim)])
        keys = path(draw)
        for first, run in tree.roots.items():
            if run.begin < len(keys) and keys[run.begin] == first:
                lacking = [
                    [key for key in claim.keys if key in missing[id(claim)]]
                    for claim in live
                    if claim.run is not None
                ]
                ends = [
                    next((at for at in range(run.begin, len(keys)) if keys[at] not in left), len(keys))
                    for left in lacking
                    if left[0] == first
                ]
                assert tree.reach(run, keys) == max(ends)
    for claim in live:
        tree.remove(claim)
    assert not tree.roots
    assert not starts


@pytest.mark.parametrize("paths", [[(5, 8), (0, 3)], [(0, 8), (2, 3)], [(3, 9), (1, 9)]])
def test_a_key_that_names_blocks_at_two_places_breaks_nothing(paths: list[tuple[int, int]]) -> None:
    """Two prefixes have nothing in common but the key of the first block that their replica lacks."""
    claims = Claims(10_000)
    claims.attach("r")
    prefixes = []
    for number, (held, length) in enumerate(paths):
        keys = block_keys(5, [number] * length, 1)
        keys[held] = 77
        prefixes.append(keys)
        claims.claim("r", keys, held, 1.0)
    for (held, length), keys, found in zip(paths, prefixes, (paths[0][1], paths[1][0]), strict=True):
        depths = {"r": held}
        claims.deepen(depths, held, keys)
        assert depths == {"r": found}, "of the second nothing is known to come"
        assert found in (held, length)
    # As well where the walk looks for claims that begin later.
    claims.claim("r", [8, 9], 0, 1.0)
    depths = {"r": 0}
    claims.deepen(depths, 0, [8, 9, 77, 77, 77, 77, 78])
    assert depths["r"] == 2 + (paths[0][0] == 2)
    claims.clear("r")
    assert (len(claims), claims.starts) == (0, {})


@pytest.mark.parametrize("others", [0, 50])
def test_claims_that_begin_behind_others_go_on_where_these_end(others: int) -> None:
    """A block before theirs has gone since they were made, and is coming again."""
    claims = Claims(10_000)
    claims.attach("r")
    long = block_keys(5, [0] * 20, 1)
    side = block_keys(5, [0] * 8 + [1], 1)
    claims.claim("r", long, 5, 1.0)
    claims.claim("r", side, 3, 1.0)
    for number in range(others):
        claims.claim("r", block_keys(5, [7, number], 1), 0, 1.0)
    depths = {"r": 3}
    claims.deepen(depths, 3, long)
    assert depths == {"r": 20}
    claims.withdraw("r", long)
    depths = {"r": 3}
    claims.deepen(depths, 3, long)
    assert depths == {"r": 8}
