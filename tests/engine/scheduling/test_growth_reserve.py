"""What admission keeps back for running sequences, and how that follows shortage."""

from __future__ import annotations

from kv_simulation import add, make_request, make_scheduler
from scheduler_steps import tokens

from engine.kv.block_pool import BlockPool
from engine.scheduling.growth_reserve import GrowthReserve


def test_it_doubles_with_each_shortage_up_to_a_bound_and_decays_to_one_block() -> None:
    reserve = GrowthReserve(BlockPool(64, 4))
    sequence = add(make_scheduler(64, 4), make_request("a", tokens(8), 100))
    kept = [reserve.blocks([sequence])]
    for _ in range(6):
        reserve.adapt(out_of_blocks=True)
        kept.append(reserve.blocks([sequence]))
    assert kept == [3, 4, 6, 10, 10, 10, 10]  # two for its text, and 1, 2, 4, 8 blocks of growth
    decaying = []
    for _ in range(250):
        reserve.adapt(out_of_blocks=False)
        decaying.append(reserve.blocks([sequence]))
    assert decaying == sorted(decaying, reverse=True)
    assert set(decaying) == set(range(3, 11))


def test_growth_ends_with_the_longest_text_and_each_fork_has_its_own() -> None:
    reserve = GrowthReserve(BlockPool(64, 4))
    scheduler = make_scheduler(64, 4)
    short = add(scheduler, make_request("short", tokens(8), 1))
    assert reserve.blocks([short]) == 3  # of nine tokens
    group = add(scheduler, make_request("group", tokens(8), 100, n=3))
    assert reserve.blocks([group]) == 3 + 2 * (3 + 1)  # and the copy of a partial block for each fork
    assert reserve.blocks([short, group]) == 14
    group.block_table = list(range(5))
    assert reserve.blocks([group]) == 2
