"""Deltas that pile up are read as one, and nothing is lost or out of order."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest
from engine_client_setting import request, run, started, until
from hypothesis import given
from hypothesis import strategies as st
from loopback import expected_tokens

from app.fleet.delta_queue import DeltaQueue
from app.fleet.generation import Delta, GenerationError
from app.fleet.loop_pacer import LoopPacer
from engine.token_logprobs import TokenLogprobs


def delta(index: int, *tokens: int, sequence: int = 0, final: bool = False) -> Delta:
    return Delta(tokens, "length" if final else None, 4, index, sequence, final)


async def turns() -> None:
    """More turns of the loop than any reader here waits."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_has_piled_up_is_one_delta() -> None:
    async def test() -> None:
        queue = DeltaQueue()
        for index in range(5):
            queue.put(delta(index, 10 + index, final=index == 4))
        assert await queue.get() == Delta((10, 11, 12, 13, 14), "length", 4, 0, 0, True)

    asyncio.run(test())


def test_log_probabilities_pile_up_with_their_tokens() -> None:
    def score(token: int) -> TokenLogprobs:
        return TokenLogprobs(-token / 8, token)

    async def test() -> None:
        queue = DeltaQueue()
        for index in range(3):
            of_prompt = (score(9),) if index == 0 else None
            queue.put(replace(delta(index, index), logprobs=(score(index),), prompt_logprobs=of_prompt))
        joined = await queue.get()
        assert joined.logprobs == (score(0), score(1), score(2))
        assert joined.prompt_logprobs == (score(9),)

    asyncio.run(test())


def test_a_reader_that_waits_gets_each_at_once() -> None:
    async def test() -> None:
        queue = DeltaQueue()
        for index in range(3):
            reading = asyncio.ensure_future(queue.get())
            await asyncio.sleep(0)
            queue.put(delta(index, index))
            assert await reading == delta(index, index)

    asyncio.run(test())


def test_an_error_comes_after_the_tokens_before_it_and_wakes_a_reader() -> None:
    async def test() -> None:
        queue = DeltaQueue()
        queue.put(delta(0, 1))
        queue.fail(GenerationError("planted"))
        assert await queue.get() == delta(0, 1)
        with pytest.raises(GenerationError, match="planted"):
            await queue.get()
        queue = DeltaQueue()
        reading = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0)
        queue.fail(GenerationError("planted"))
        with pytest.raises(GenerationError):
            await reading

    asyncio.run(test())


def test_what_is_taken_does_not_resume_the_reader_and_what_is_not_does_in_order() -> None:
    async def test() -> None:
        taken: list[Delta] = []

        def take(one: Delta) -> bool:
            if one.final:
                return False
            taken.append(one)
            return True

        queue = DeltaQueue(LoopPacer(1), take)
        queue.put(delta(0, 1))  # nobody waits yet
        assert await queue.get() == delta(0, 1)
        reading = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0)
        queue.put(delta(1, 2))
        queue.put(delta(2, 3))
        assert taken == []  # its turn has not come
        await turns()
        queue.put(delta(3, 4))
        await turns()
        assert taken == [delta(1, 2, 3), delta(3, 4)]
        assert not reading.done()
        queue.put(delta(4, 5, final=True))
        assert await asyncio.wait_for(reading, 1.0) == delta(4, 5, final=True)

    asyncio.run(test())


def test_a_sequence_that_is_not_taken_does_not_hide_those_behind_it() -> None:
    async def test() -> None:
        taken: list[int] = []

        def take(one: Delta) -> bool:
            taken.extend(one.token_ids if one.sequence else ())
            return one.sequence > 0

        queue = DeltaQueue(LoopPacer(1), take)
        reading = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0)
        for sequence in (1, 0, 2):
            queue.put(delta(0, sequence, sequence=sequence))
        assert await asyncio.wait_for(reading, 1.0) == delta(0, 0)
        assert taken == [1]
        assert await queue.get() == delta(0, 2, sequence=2)  # one that does not wait reads all itself

    asyncio.run(test())


def test_an_error_comes_after_what_is_taken() -> None:
    async def test() -> None:
        taken: list[Delta] = []
        queue = DeltaQueue(LoopPacer(1), lambda one: taken.append(one) is None)
        reading = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0)
        queue.put(delta(0, 1))
        queue.fail(GenerationError("planted"))
        with pytest.raises(GenerationError, match="planted"):
            await asyncio.wait_for(reading, 1.0)
        assert taken == [delta(0, 1)]

    asyncio.run(test())


def test_the_reader_raises_the_errors_of_what_takes_for_it() -> None:
    async def test() -> None:
        def take(one: Delta) -> bool:
            raise ZeroDivisionError

        pacer = LoopPacer(2)
        queue = DeltaQueue(pacer, take)
        reading = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0)
        queue.put(delta(0, 1))
        loop = asyncio.get_running_loop()
        other: asyncio.Future[None] = loop.create_future()
        pacer.call(lambda: other.set_result(None) is None, loop)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(reading, 1.0)
        await asyncio.wait_for(other, 1.0)

    asyncio.run(test())


def test_nothing_is_taken_for_a_reader_that_has_left() -> None:
    async def test() -> None:
        taken: list[Delta] = []
        pacer = LoopPacer(1)
        queue = DeltaQueue(pacer, lambda one: taken.append(one) is None)
        reading = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0)
        queue.put(delta(0, 1))
        reading.cancel()
        loop = asyncio.get_running_loop()
        last: asyncio.Future[None] = loop.create_future()
        pacer.call(lambda: last.set_result(None) is None, loop)
        await asyncio.wait_for(last, 1.0)
        assert taken == []

    asyncio.run(test())


@given(st.lists(st.integers(0, 3), min_size=1), st.data())
def test_each_sequence_keeps_its_order_and_the_final_delta_is_last(
    order: list[int], data: st.DataObject
) -> None:
    """``order``: the sequences of the deltas, as they come; reads happen in between."""

    async def test() -> None:
        queue, counts, read = DeltaQueue(), dict.fromkeys(range(4), 0), []
        for place, sequence in enumerate(order):
            queue.put(delta(counts[sequence], place, sequence=sequence, final=place == len(order) - 1))
            counts[sequence] += 1
            if data.draw(st.booleans()):
                while queue._waiting:
                    read.append(await queue.get())
        while queue._waiting:
            read.append(await queue.get())
        for sequence in range(4):
            tokens = [token for one in read if one.sequence == sequence for token in one.token_ids]
            assert tokens == [place for place, which in enumerate(order) if which == sequence]
            starts = [one.index for one in read if one.sequence == sequence]
            sizes = [len(one.token_ids) for one in read if one.sequence == sequence]
            assert starts == [0, *itertools.accumulate(sizes)][: len(starts)]
        assert [one.final for one in read] == [False] * (len(read) - 1) + [True]

    asyncio.run(test())


def test_a_request_yields_what_is_not_taken() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        taken: list[int] = []

        def take(one: Delta) -> bool:
            if one.finish_reason is not None:
                return False
            taken.extend(one.token_ids)
            return True

        deltas = client.generate(replace(request([3], 40), take=take))
        reading = asyncio.ensure_future(anext(deltas))
        await until(lambda: bool(only.engine.live))
        while not reading.done():
            handle.step()
            await asyncio.sleep(0.01)
        last = reading.result()
        assert [*taken, *last.token_ids] == expected_tokens([3], 40)
        assert (last.index, last.final) == (39, True)
        await deltas.aclose()  # type: ignore[attr-defined]
        await client.stop()

    run(test)


def test_a_slow_reader_of_a_request_gets_few_deltas_with_all_tokens() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        deltas = client.generate(request([3], 40))
        reading = asyncio.ensure_future(anext(deltas))
        await until(lambda: bool(only.engine.live))
        handle.step()
        first = await reading
        for _ in range(39):
            handle.step()
            await asyncio.sleep(0.01)
        rest = await anext(deltas)
        assert [*first.token_ids, *rest.token_ids] == expected_tokens([3], 40)
        assert (first.index, rest.index, rest.final) == (0, 1, True)
        await deltas.aclose()  # type: ignore[attr-defined]
        await client.stop()

    run(test)


def test_the_prompts_log_probabilities_are_read_first() -> None:
    async def test() -> None:
        of_prompt = (TokenLogprobs(-1.0, 1),)
        queue = DeltaQueue()
        queue.put(replace(delta(0, 10), prompt_logprobs=of_prompt))
        queue.put(delta(0, 20, sequence=1))
        queue.put(delta(1, 11, final=True))
        assert await queue.get() == replace(delta(0, 20, sequence=1), prompt_logprobs=of_prompt)
        assert await queue.get() == delta(0, 10, 11, final=True)

    asyncio.run(test())
