"""Who is taken and who is refused, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingress_support import ingress_for, only_model
from loopback import LoopbackHandle

from app import config
from app.background import Background
from app.fleet.overload import EVERY_S, OverloadControl
from app.routing.waiting import ExpectedWait
from engine.errors import ConfigError

LONGEST, STARTUP, MOST = 2.0, 10.0, 4
TICK = 0.0625  # more than EVERY_S; seconds here are sums of powers of two


@dataclass
class Setting:
    """An overload control whose clock and wait are set here; ``asked`` counts its questions."""

    wait: ExpectedWait | Exception | None = None
    longest: float = LONGEST
    now: float = 100.0
    asked: int = 0
    overload: OverloadControl = field(init=False)

    def __post_init__(self) -> None:
        self.overload = OverloadControl(
            self.expected,
            max_wait_s=self.longest,
            max_replicas=MOST,
            startup_s=STARTUP,
            clock=lambda: self.now,
            rng=random.Random(0),
        )

    def expected(self) -> ExpectedWait | None:
        self.asked += 1
        if isinstance(self.wait, Exception):
            raise self.wait
        return self.wait

    def refuses(self, seconds: float | None = None, replicas: int = MOST, after: float = TICK) -> bool:
        """Whether a request is refused ``after`` the last one, with this wait from now on, if any is given."""
        if seconds is not None:
            self.wait = ExpectedWait(seconds, replicas)
        self.now += after
        return self.overload.refusal() is not None


def overloaded(wait: float = 10.0) -> Setting:
    setting = Setting()
    assert not setting.refuses(wait)
    assert setting.refuses(wait, after=LONGEST)
    return setting


def test_a_burst_is_taken_and_a_wait_that_stays_is_not() -> None:
    setting = Setting()
    assert not setting.refuses(50.0)
    assert not setting.refuses(50.0, after=LONGEST - 2 * TICK)
    assert not setting.refuses(1.0)
    assert not setting.refuses(50.0)
    assert not setting.refuses(50.0, after=LONGEST - 2 * TICK)
    assert setting.refuses(50.0, after=2 * TICK)


def test_in_an_overload_each_relief_takes_requests_and_brings_no_new_grace() -> None:
    setting = overloaded()
    assert not setting.refuses(LONGEST)
    assert setting.refuses(LONGEST + 0.1)
    assert not setting.refuses(0.0)
    assert not setting.refuses(0.0, after=LONGEST)
    assert not setting.refuses(10.0), "the overload was over"


def test_with_fewer_replicas_than_there_may_be_others_may_be_on_their_way() -> None:
    for replicas, grace, allowed in (
        (MOST, 0.0, LONGEST),
        (MOST + 1, 0.0, LONGEST),
        (2, STARTUP, (LONGEST + STARTUP) * 2),
    ):
        setting = Setting()
        assert not setting.refuses(allowed, replicas)
        assert not setting.refuses(allowed, replicas, after=60.0)
        assert not setting.refuses(allowed + 0.1, replicas)
        assert setting.refuses(allowed + 0.1, replicas, after=LONGEST)
        refusal = setting.overload.refusal()
        assert refusal is not None
        assert (refusal.limit_s, refusal.startup_s) == (LONGEST + grace, grace)


def test_nothing_known_or_a_defect_or_no_limit_admits(caplog: pytest.LogCaptureFixture) -> None:
    setting = overloaded()
    setting.wait = None
    assert not setting.refuses()
    setting.wait = ZeroDivisionError("a defect")
    with caplog.at_level(logging.ERROR):
        caplog.clear()
        assert not any(setting.refuses() for _ in range(10))
    assert setting.overload.inspect()["faults"] == 10
    assert len(caplog.records) == 4, "at 1, 2, 4 and 8"
    assert not any(Setting(longest=math.inf).refuses(1e9, after=1e6) for _ in range(3))
    assert not overloaded().refuses(math.nan)
    broken = Setting(ExpectedWait(math.nan, 1))
    assert not broken.refuses()
    assert broken.overload.retry_after_s() in (1, 2)
    assert OverloadControl().refusal() is None


def test_it_is_asked_once_in_50_ms() -> None:
    setting = Setting()
    for _ in range(100):
        setting.refuses(1.0, after=EVERY_S / 50)
    assert setting.asked == 2


def test_retry_after_is_what_is_over_the_limit_and_a_little_more() -> None:
    setting = overloaded()

    def asked(wait: float) -> list[int]:
        assert setting.refuses(wait)
        return [setting.overload.retry_after_s() for _ in range(300)]

    for wait, least, most in ((2.01, 1, 2), (10.0, 8, 12), (12.5, 11, 16), (1e5, 40, 60), (math.inf, 40, 60)):
        assert set(asked(wait)) == set(range(least, most + 1)), wait
    refusal = setting.overload.refusal()
    assert refusal is not None
    assert (refusal.wait_s, refusal.limit_s) == (math.inf, LONGEST)


def test_without_a_limit_retry_after_is_the_wait() -> None:
    setting = Setting(longest=math.inf)
    assert set(range(1, 3)) >= {setting.overload.retry_after_s() for _ in range(50)}
    assert not setting.refuses(20.0)
    assert all(20 <= setting.overload.retry_after_s() <= 30 for _ in range(50))


steps = st.lists(
    st.tuples(
        st.sampled_from((TICK, 0.0, 0.015625, 0.25, 1.0, 1.875, 2.0, 7.0)),
        st.sampled_from((2.125, 2.0, 0.0, 5.0, None, 47.0, 50.0, 1e6)),
        st.sampled_from((MOST, MOST, MOST + 1, 1, 2, 0)),
    ),
    min_size=4,
    max_size=40,
)


@settings(max_examples=300)
@given(steps)
def test_it_never_refuses_within_the_limit_nor_admits_for_ever_above_it(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    setting = Setting()
    looks: list[tuple[float, bool]] = []  # when, and whether the wait was over the limit
    for after, seconds, replicas in steps:
        setting.wait = None if seconds is None else ExpectedWait(seconds, replicas)
        asked = setting.asked
        refused = setting.refuses(after=after)
        if setting.asked > asked:
            allowed = LONGEST if replicas >= MOST else LONGEST + STARTUP
            over = seconds is not None and seconds * min(replicas, MOST) / MOST > allowed
            looks.append((setting.now, over))
        # Without a break: from the last change of whether it is over to the last look.
        runs: list[tuple[bool, float, float]] = []
        for when, over in looks:
            if runs and runs[-1][0] == over:
                runs[-1] = over, runs[-1][1], when
            else:
                runs.append((over, when, when))
        over, first, last = runs[-1]
        if not over:
            assert not refused
        elif last - first >= LONGEST:
            assert refused
        else:
            # It began before, in a run that was long enough, and no relief since has been.
            marks = [(was_over, end - start >= LONGEST) for was_over, start, end in runs]
            began = max((i for i, mark in enumerate(marks) if mark == (True, True)), default=-1)
            ended = max((i for i, mark in enumerate(marks) if mark == (False, True)), default=-1)
            assert refused == (began > ended)


def test_it_looks_by_itself_and_once_only() -> None:
    setting = Setting(ExpectedWait(50.0, MOST))

    async def run() -> tuple[int, int]:
        before = len(asyncio.all_tasks())
        setting.overload.start(Background())
        setting.overload.start(Background())
        more = len(asyncio.all_tasks()) - before
        await asyncio.sleep(0)
        setting.overload.stop()
        await asyncio.sleep(0)
        return more, len(asyncio.all_tasks()) - before

    assert asyncio.run(run()) == (1, 0)
    assert setting.asked == 1
    assert setting.overload.inspect()["expected_wait_s"] == 50.0


@pytest.mark.usefixtures("one_tokenizer")
@pytest.mark.filterwarnings("ignore:coroutine .*__del__.* was never awaited")
@pytest.mark.parametrize(("shadow", "limit"), [(True, 4.0), (False, 64.0)])
def test_an_ingress_admits_for_the_replicas_that_demand_can_bring(shadow: bool, limit: float) -> None:
    async def test() -> None:
        options = config.load(
            {
                "max_replicas": 4,
                "engine_replicas": 2,
                "scaling_shadow": shadow,
                "max_wait_s": 4,
                "instance": "x",
            },
            {},
        )
        ingress = ingress_for(options, LoopbackHandle(1))
        overload = only_model(ingress).overload
        overload._expected = lambda: ExpectedWait(6.0, 1)
        overload.update()
        assert overload.inspect()["limit_s"] == limit
        assert overload._scaled_s == (3.0 if shadow else 1.5)
        await ingress.__del__()

    asyncio.run(test())


@pytest.fixture
def replicas_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ingress has the tokenizer of the loopback replicas."""
    monkeypatch.setattr("app.ingress_model.tokenizer_digest", lambda _: "tokenizer")


@pytest.mark.filterwarnings("ignore:coroutine .*__del__.* was never awaited")
@pytest.mark.usefixtures("replicas_tokenizer", "one_tokenizer")
def test_a_live_option_that_is_not_named_keeps_what_was_given_at_the_start() -> None:
    async def test() -> None:
        ingress = ingress_for(config.load({"max_live_choices": 100, "instance": "x"}, {}), LoopbackHandle(1))
        await ingress.reconfigure({})
        assert only_model(ingress).service.options.max_live_choices == 100
        await ingress.reconfigure({"max_live_choices": 7})
        assert only_model(ingress).service.options.max_live_choices == 7
        await ingress.reconfigure({"log_level": "INFO"})
        assert only_model(ingress).service.options.max_live_choices == 100
        await ingress.__del__()

    asyncio.run(test())


@pytest.mark.filterwarnings("ignore:coroutine .*__del__.* was never awaited")
@pytest.mark.usefixtures("replicas_tokenizer", "one_tokenizer")
@pytest.mark.parametrize("wrong", [{"block_size": 8}, {"max_live_choices": 0}, {1: 2}])
def test_a_wrong_user_config_fails_a_start_and_changes_nothing_later(
    wrong: dict[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Serve replaces a replica whose ``reconfigure`` raises: a typing error would take the service down."""

    async def test() -> None:
        ingress = ingress_for(config.load({"max_live_choices": 100, "instance": "x"}, {}), LoopbackHandle(1))
        with pytest.raises(ConfigError, match=r"block_size|max_live_choices=0|cannot change 1"):
            await ingress.reconfigure(wrong)
        await ingress.reconfigure({"max_live_choices": 7})
        await ingress.reconfigure(wrong)
        assert only_model(ingress).service.options.max_live_choices == 7
        assert "the new user_config has no effect" in caplog.text
        await ingress.__del__()

    asyncio.run(test())
