"""What a replica has counted reaches its ingresses: once a second, with the frames that leave anyway."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from engine_client_setting import run, started, until
from hypothesis import given
from hypothesis import strategies as st
from loopback import LIMITS
from virtual_time import loop_time, run_virtually

from app.channel import wire
from app.channel.channel_hub import FIGURES_S, LEASE_S, ChannelHub
from app.channel.wire_sections import Figures
from engine.request import FinishReason, TokenDelta


@given(st.lists(st.floats(allow_nan=False)))
def test_figures_cross_the_wire(numbers: list[float]) -> None:
    figures = Figures(tuple(numbers))
    data = wire.pack_records(1, 2, [], [figures])
    assert wire.unpack_frame(data).figures == figures
    if numbers:
        with pytest.raises(wire.WireError):
            wire.unpack_frame(data[:-1])


def test_they_leave_about_once_a_second_however_many_frames_do() -> None:
    async def test() -> None:
        made: list[float] = []

        def figures() -> Figures:
            made.append(loop_time())
            return Figures((float(len(made)),))

        hub = ChannelHub(wire.Hello(LIMITS), lambda _: None, clock=loop_time, figures=figures)
        stream = hub.stream("ingress", 1)
        await anext(stream)
        attempt = hub.attach("ingress", 1, 1, "e1")
        arrived: list[float] = []
        for index in range(50):  # 3 s of frames
            await asyncio.sleep(0.06)
            hub.beat("ingress", 1, index)
            hub.deliver(
                [TokenDelta("e1", index, (7,), FinishReason.LENGTH if index == 49 else None, final=index == 49)]
            )
            frame = wire.unpack_frame(await anext(stream))
            if frame.figures is not None:
                arrived += frame.figures.numbers
        assert await attempt.done == 50
        assert arrived == [1.0, 2.0, 3.0]
        assert all(later - earlier >= FIGURES_S for earlier, later in pairwise(made))

    run_virtually(test())


def test_a_lease_that_is_lost_is_counted_once() -> None:
    async def test() -> None:
        hub = ChannelHub(wire.Hello(LIMITS), lambda _: None, clock=loop_time)
        stream = hub.stream("ingress", 1)
        await anext(stream)
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(4 * LEASE_S)
        assert hub.lost_leases == 1
        reading.cancel()

    run_virtually(test())


def test_the_client_has_the_last_ones_of_each_replica_until_its_channel_ends() -> None:
    async def test() -> None:
        handle, client = await started(2)
        handle.replicas["replica-1"].hub._figures = lambda: Figures((1.0, loop_time()))
        await until(lambda: "replica-1" in client.engine_figures)
        first = client.engine_figures["replica-1"]
        await until(lambda: client.engine_figures["replica-1"] != first)
        assert client.engine_figures.keys() == {"replica-1"}
        assert client.inspect()["channel_faults"] == {"lost": 0, "silent": 0, "dead": 0}
        handle.replicas["replica-1"].kill()
        await until(lambda: not client.engine_figures)
        assert client.inspect()["channel_faults"] == {"lost": 1, "silent": 0, "dead": 1}
        await client.stop()

    run(test)
