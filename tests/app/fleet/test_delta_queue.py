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
from engine.token_logprobs import TokenLogprobs


def delta(index: int, *tokens: int, sequence: int = 0, final: bool = False) -> Delta:
    return Delta(tokens, "length" if final else None, 4, index, sequence, final)


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
