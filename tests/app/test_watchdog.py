"""A stuck engine is noticed within its limit, a slow or idle one is not taken for stuck."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest
from engine_client_setting import collect, quiet, request, run, started, until
from engine_stats import STATS
from loopback import LIMITS, expected_tokens, stepping
from virtual_time import loop_time, run_virtually

from app.channel import wire
from app.channel.channel_hub import ChannelHub
from app.channel.engine_channel import UnknownEpochError
from app.channel.silence import Silence
from app.watchdog import FIRST_STEP, LOOK_S, Watchdog
from engine.scheduling.load_report import EngineLoad
from engine.stats import EngineStats

STUCK_AFTER_S = 10.0
LOAD = EngineLoad(0, 1, 0, 0, 0, 0, 100.0, 0.5, 0, 0, 0, 8, 0, 0, 0)


class Thread:
    """An engine's thread; ``layers`` grow when told. ``None``: it is idle."""

    def __init__(self) -> None:
        self.layers: int | None = 0
        self.step_stats = STATS

    def progress(self) -> tuple[int, int] | None:
        return None if self.layers is None else (1, self.layers)

    def stats(self) -> EngineStats:
        return self.step_stats

    def is_alive(self) -> bool:
        return True


class Setting:
    """A watchdog that looks every ``LOOK_S`` seconds of its own clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.thread = Thread()
        self.hub = ChannelHub(wire.Hello(LIMITS), lambda name: None, load=LOAD)
        self.watchdog = Watchdog(self.thread, self.hub, STUCK_AFTER_S, lambda: self.now)

    def pass_time(self, seconds: float, act: Callable[[], None] = lambda: None) -> None:
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            act()
            self.watchdog.look()


def run_setting(test: Callable[[Setting], Awaitable[None]]) -> None:
    async def main() -> None:
        await test(Setting())

    run_virtually(main())


def test_no_progress_ends_every_channel_and_says_why() -> None:
    async def test(setting: Setting) -> None:
        stream = setting.hub.stream("ingress", 1)
        await anext(stream)
        setting.watchdog.look()
        setting.pass_time(STUCK_AFTER_S)
        assert not setting.watchdog.stuck
        setting.pass_time(LOOK_S)
        assert "no progress in a step for 10.5 s" in setting.watchdog.stuck
        reports = [wire.unpack_frame(frame).load async for frame in stream]
        assert [load.stalled_s for load in reports if load is not None][-1:] in ([], [10.5])
        with pytest.raises(UnknownEpochError, match="stuck"):
            await anext(setting.hub.stream("ingress", 2))

    run_setting(test)


def test_reports_say_how_long_and_that_it_is_over() -> None:
    async def test(setting: Setting) -> None:
        stream = setting.hub.stream("ingress", 1)
        await anext(stream)
        setting.watchdog.look()
        await anext(stream)
        setting.pass_time(4.0)
        assert wire.unpack_frame(await anext(stream)).load == dataclasses.replace(
            setting.hub._report(LOAD, 0), stalled_s=4.0
        )
        assert setting.thread.layers is not None
        setting.thread.layers += 1
        setting.pass_time(LOOK_S)
        load = wire.unpack_frame(await anext(stream)).load
        assert load is not None
        assert load.stalled_s == 0.0
        await stream.aclose()  # type: ignore[attr-defined]

    run_setting(test)


def test_a_long_step_whose_layers_proceed_is_not_stuck() -> None:
    async def test(setting: Setting) -> None:
        def proceed() -> None:
            if setting.now % 8.0 == 0:
                assert setting.thread.layers is not None
                setting.thread.layers += 1

        setting.pass_time(300.0, proceed)
        assert not setting.watchdog.stuck

    run_setting(test)


def test_an_idle_engine_is_not_stuck() -> None:
    async def test(setting: Setting) -> None:
        setting.thread.layers = None
        setting.pass_time(300.0)
        assert not setting.watchdog.stuck

    run_setting(test)


@pytest.mark.parametrize(
    ("stats", "limit_s"),
    [
        (dataclasses.replace(STATS, steps=0, step_seconds=0.0), FIRST_STEP * STUCK_AFTER_S),
        (dataclasses.replace(STATS, steps=5, step_seconds=1.0), STUCK_AFTER_S),
        (dataclasses.replace(STATS, steps=5, step_seconds=20.0), 60.0),
    ],
)
def test_the_limit_allows_for_compiling_and_for_slow_steps(stats: EngineStats, limit_s: float) -> None:
    async def test(setting: Setting) -> None:
        setting.thread.step_stats = stats
        setting.watchdog.look()
        setting.pass_time(limit_s)
        assert not setting.watchdog.stuck
        setting.pass_time(LOOK_S)
        assert setting.watchdog.stuck

    run_setting(test)


def test_a_stopped_judge_knows_nothing_of_the_time_it_was_stopped() -> None:
    async def test(setting: Setting) -> None:
        setting.watchdog.look()
        for _ in range(5):
            setting.now += 60.0
            setting.watchdog.look()
        assert not setting.watchdog.stuck
        assert setting.watchdog._silence.seconds == 5 * 2 * LOOK_S

    run_setting(test)


def test_silence_counts_between_looks_and_starts_over_with_each_sign_of_life() -> None:
    now = [0.0]
    silence = Silence(1.0, lambda: now[0])
    seconds = []
    for past, seen in [(1.0, 0), (1.5, 0), (7.0, 0), (1.0, 1), (0.5, 1), (1.0, 2)]:
        now[0] += past
        seconds.append(silence.look(seen))
    assert seconds == [0.0, 1.5, 3.5, 0.0, 0.5, 0.0]


def test_requests_of_a_stuck_engine_move_within_15_s_and_new_ones_avoid_it_before() -> None:
    async def test() -> None:
        handle, client = await started(2)
        first = next(iter(handle.replicas.values()))
        thread = Thread()
        first.hub._load = LOAD
        watchdog = Watchdog(thread, first.hub, STUCK_AFTER_S, loop_time)
        jobs = [asyncio.ensure_future(collect(client, request([index], 200))) for index in range(8)]
        async with stepping(handle):
            await until(lambda: len(first.engine.live) == 4)
            first.engine.step = lambda: None  # type: ignore[method-assign]
            stuck_at, watching = loop_time(), asyncio.ensure_future(watchdog.run())
            await until(lambda: client.status()["stalled"] == [first.name])
            assert loop_time() - stuck_at < 5.0
            assert client.status()["routable"] == 1
            assert await collect(client, request([100], 20)) == expected_tokens([100], 20)
            assert len(first.engine.live) == 4
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 200) for index in range(8)]
            assert loop_time() - stuck_at < 15.0
        first.engine.live.clear()
        await until(lambda: quiet(handle, client))
        await watching
        await client.stop()

    run(test)
