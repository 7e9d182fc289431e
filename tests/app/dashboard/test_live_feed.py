"""The live page's events: one look for all viewers, none without viewers, each stream ends soon."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

from engine_stats import SCALING, SCHEDULER, STATS
from virtual_time import loop_time, run_virtually

from app.dashboard.live_feed import EVERY_S, MAX_VIEWERS, STREAM_S, LiveFeed
from app.metrics.engine_figures import engine_samples
from app.metrics.samples import Process


class Fleet:
    """Counts how often it is looked at."""

    def __init__(self) -> None:
        self.looks = 0
        self.broken = False

    async def processes(self) -> list[Process]:
        self.looks += 1
        if self.broken:
            raise RuntimeError("broken")
        scheduler = dataclasses.replace(SCHEDULER, generated_tokens=round(100 * loop_time()))
        engine = engine_samples(dataclasses.replace(STATS, scheduler=scheduler), SCALING, 0)
        return [Process("engine#a", engine, "m")]

    def feed(self) -> LiveFeed:
        return LiveFeed(self.processes, lambda: {"m": {"engine#a": "open"}, "asleep": {}}, loop_time)


def parsed(event: bytes) -> tuple[str, Any]:
    name, data = event.decode().removeprefix("retry: 500\n\n").strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def read(feed: LiveFeed, count: int) -> list[tuple[str, Any]]:
    stream = feed.events()
    found = [parsed(await anext(stream)) for _ in range(count)]
    await stream.aclose()
    return found


def test_viewers_share_each_look() -> None:
    async def test() -> None:
        fleet = Fleet()
        feed = fleet.feed()
        first, second = await asyncio.gather(read(feed, 5), read(feed, 5))
        assert fleet.looks <= 6
        assert [name for name, _ in first] == ["history", "fleet", "fleet", "fleet", "fleet"]
        assert first == second
        assert [message["models"]["m"]["fleet"]["tokens_s"] for _, message in first[1:]] == [100.0] * 4
        assert feed.viewers == 0

    run_virtually(test())


def test_a_model_may_be_loaded_while_someone_looks() -> None:
    async def test() -> None:
        fleet = Fleet()
        states = {"m": {"engine#a": "open"}}
        stream = LiveFeed(fleet.processes, lambda: dict(states), loop_time).events()
        assert [parsed(await anext(stream))[0] for _ in range(2)] == ["history", "fleet"]
        states["late"] = {}
        _, event = parsed(await anext(stream))
        assert list(event["models"]) == ["m", "late"]
        await stream.aclose()

    run_virtually(test())


def test_without_viewers_nobody_looks_and_a_new_one_gets_the_past() -> None:
    async def test() -> None:
        fleet = Fleet()
        feed = fleet.feed()
        await read(feed, 4)
        await asyncio.sleep(2 * EVERY_S)
        looks = fleet.looks
        await asyncio.sleep(60.0)
        assert fleet.looks == looks
        (name, past), (_, now) = await read(feed, 2)
        assert (name, len(past["m"]), len(past["asleep"])) == ("history", looks - 1, looks - 1)
        assert list(now["models"]) == ["m", "asleep"]
        assert now["models"]["m"]["fleet"]["tokens_s"] == 100.0  # at once

    run_virtually(test())


def test_a_viewer_learns_of_the_models_that_it_may_see() -> None:
    async def test() -> None:
        feed = Fleet().feed()
        stream, other = feed.events("k", lambda model: model == "asleep"), feed.events("k", lambda _: False)
        for _ in range(2):
            await asyncio.gather(anext(stream), anext(other))
        late = feed.events("k", lambda model: model == "asleep")
        for found in (await anext(late), await anext(stream)):
            name, said = parsed(found)
            assert list(said if name == "history" else said["models"]) == ["asleep"]
        assert parsed(await anext(other))[1]["models"] == {}
        assert feed.of_keys == {"k": 3}
        for each in (stream, other, late):
            await each.aclose()
        assert (feed.viewers, feed.of_keys) == (0, {})

    run_virtually(test())


def test_a_key_leaves_others_as_many_places_as_it_has() -> None:
    async def test() -> None:
        feed = Fleet().feed()
        streams = []
        for key, most in (("a", MAX_VIEWERS // 2), ("b", MAX_VIEWERS // 4), ("", MAX_VIEWERS // 4)):
            for number in range(most):
                assert feed.has_place(key), (key, number)
                streams.append(feed.events(key))
                await anext(streams[-1])
            assert not feed.has_place(key)
        for stream in streams:
            await stream.aclose()

    run_virtually(test())


def test_a_stream_ends_by_itself() -> None:
    async def test() -> None:
        began = loop_time()
        events = [event async for event in Fleet().feed().events()]
        assert STREAM_S <= loop_time() - began <= STREAM_S + 2 * EVERY_S
        assert STREAM_S - 2 <= len(events) <= STREAM_S + 2

    run_virtually(test())


def test_a_defect_ends_the_stream_and_not_the_next_one() -> None:
    async def test() -> None:
        fleet = Fleet()
        feed = fleet.feed()
        fleet.broken = True
        assert [parsed(event)[0] async for event in feed.events()] == ["history"]
        fleet.broken = False
        assert [name for name, _ in await read(feed, 2)] == ["history", "fleet"]

    run_virtually(test())
