"""What is refused on arrival, and what is stamped."""

from __future__ import annotations

import pytest
from kv_simulation import KVSimulation, add, make_request, make_scheduler
from scheduler_steps import tokens

from engine.errors import InvalidRequestError
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_index import PrefixIndex
from engine.request import ModelLimits
from engine.scheduling.recovery import Rates, RecoveryMode, RecoveryPolicy
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_config import ModelTraits, SchedulerConfig


def test_what_can_never_run_is_refused_on_arrival() -> None:
    scheduler = make_scheduler(4, 4, max_model_len=14)
    for request, message in [
        (make_request("a", []), "prompt is empty"),
        (make_request("a", tokens(12), max_tokens=3), "context length of 14"),
        (make_request("a", [1, 50]), "token id 50 is outside"),
        (make_request("a", tokens(14), max_tokens=None, generated_before=3), "none is left to generate"),
        (make_request("a", tokens(5), max_tokens=2, generated_before=2), "none is left to generate"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            scheduler.add(request)
    assert not scheduler.has_work()
    with pytest.raises(InvalidRequestError, match="can never fit the KV pool of 16 tokens"):
        make_scheduler(4, 4).add(make_request("a", tokens(14), max_tokens=3))


def test_the_largest_request_that_fits_runs() -> None:
    scheduler = make_scheduler(4, 4)
    simulation = KVSimulation(4)
    for name in "ab":
        scheduler.add(make_request(name, tokens(8, ord(name)), max_tokens=8))
    simulation.drain(scheduler)
    assert {len(output) for output in simulation.output.values()} == {8}


def test_an_id_in_use_is_refused_and_free_again_at_the_end() -> None:
    scheduler = make_scheduler()
    simulation = KVSimulation(4)
    scheduler.add(make_request("a", tokens(3), max_tokens=1))
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        scheduler.add(make_request("a", tokens(3)))
    simulation.drain(scheduler)
    scheduler.add(make_request("a", tokens(3)))


def test_requests_without_arrival_are_stamped() -> None:
    pool = BlockPool(4, 4)
    times = iter([5.0, 6.0])
    scheduler = Scheduler(
        pool,
        PrefixIndex(pool),
        RecoveryPolicy(RecoveryMode.RECOMPUTE, 4, Rates()),
        ModelTraits(ModelLimits(50, 100, 4, 4)),
        SchedulerConfig(max_num_seqs=1, token_budget=4),
        clock=lambda: next(times),
    )
    stamped = add(scheduler, make_request("a", [1], arrival=0.0))
    own = add(scheduler, make_request("b", [1], arrival=3.0))
    assert (stamped.order[2], own.order[2]) == (5.0, 3.0)


@pytest.mark.parametrize(
    ("outputs", "sequences"),
    [
        (((0,), (0,)), {"n": 2, "best_of": 3}),
        (((0,), (0,)), {"n": 2, "use_beam_search": True}),
        (((0,),), {"n": 2}),
        ((None, None), {"n": 2}),
    ],
)
def test_outputs_that_nobody_could_have_are_refused(
    outputs: tuple[tuple[int, ...] | None, ...], sequences: dict[str, object]
) -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError, match="outputs has"):
        scheduler.add(make_request("a", [1, 2, 3], outputs=outputs, **sequences))
    assert not scheduler.has_work()


def test_the_output_of_a_single_sequence_is_continued() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, make_request("a", [1, 2, 3], max_tokens=4, outputs=((5, 6),)))
    assert sequence.token_ids == [1, 2, 3, 5, 6]
    assert (sequence.num_generated, sequence.num_output_tokens) == (2, 0)
    deltas = []
    while scheduler.has_work():
        deltas += scheduler.commit(scheduler.schedule(), [7])
    assert [(delta.index, delta.token_ids) for delta in deltas] == [(2, (7,)), (3, (7,))]


def test_the_request_stays_as_it_was() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1, 2, 3], max_tokens=2)
    sequence = add(scheduler, request)
    scheduler.commit(scheduler.schedule(), [7])
    assert sequence.token_ids == [1, 2, 3, 7]
    assert request.token_ids == [1, 2, 3]
