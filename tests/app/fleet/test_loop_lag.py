"""An ingress that does not keep up takes no new requests, until it does."""

from __future__ import annotations

import random

from app.fleet.ingress_lag import IngressLag
from app.fleet.loop_lag import CAUGHT_UP, HOLD_S, LoopLag
from app.fleet.overload import OverloadControl

EVERY_S = 0.25
LIMIT_S = 0.5


class Ingress:
    """A lag that is looked at four times a second of its own clock, and the overload control of a model."""

    def __init__(self) -> None:
        self.now, self.frames_s = 1000.0, 0.0
        self.lag = IngressLag(LIMIT_S, clock=lambda: self.now, rng=random.Random(1))
        self.lag.watch_frames(lambda: 0.0)
        self.lag.watch_frames(lambda: self.frames_s)
        self.control = OverloadControl(lag=self.lag, clock=lambda: self.now)

    def pass_time(self, seconds: float, late_s: float = 0.0) -> None:
        for _ in range(round(seconds / EVERY_S)):
            self.now += EVERY_S
            self.lag.look(late_s)


def test_a_loop_that_is_late_for_a_while_refuses_until_it_keeps_up() -> None:
    ingress = Ingress()
    ingress.pass_time(HOLD_S, late_s=LIMIT_S + 0.1)
    assert ingress.control.refusal() is None
    ingress.pass_time(EVERY_S, late_s=2.3)
    refusal = ingress.control.refusal()
    assert refusal is not None
    assert refusal.behind
    assert (refusal.wait_s, refusal.limit_s) == (2.3, LIMIT_S)
    assert 4 <= refusal.retry_after_s <= 8
    assert ingress.control.refusing
    ingress.pass_time(10.0, late_s=CAUGHT_UP * LIMIT_S + 0.1)
    assert ingress.control.refusing
    ingress.pass_time(HOLD_S + EVERY_S)
    assert ingress.control.refusal() is None
    assert ingress.control.inspect()["refused"] == ingress.lag.inspect()["refused"] == 1


def test_frames_that_wait_unread_count_as_well() -> None:
    ingress = Ingress()
    ingress.frames_s = 3.0
    ingress.pass_time(HOLD_S + EVERY_S)
    refusal = ingress.control.refusal()
    assert refusal is not None
    assert refusal.wait_s == 3.0


def test_a_single_pause_however_long_refuses_nobody() -> None:
    ingress = Ingress()
    for _ in range(5):
        ingress.now += 60.0
        ingress.lag.look(60.0)
        ingress.pass_time(2.0)
        assert not ingress.control.refusing


def test_the_limit_changes_while_it_runs() -> None:
    ingress = Ingress()
    ingress.lag.limit_s = 5.0
    ingress.pass_time(10.0, late_s=4.0)
    assert not ingress.control.refusing
    ingress.pass_time(HOLD_S + EVERY_S, late_s=5.1)
    refusal = ingress.control.refusal()
    assert refusal is not None
    assert refusal.limit_s == 5.0


def test_lag_between_the_bounds_changes_nothing() -> None:
    lag = LoopLag(LIMIT_S)
    for step in range(100):
        lag.look(step * EVERY_S, (LIMIT_S + CAUGHT_UP * LIMIT_S) / 2)
        assert not lag.behind


def test_an_ingress_that_is_behind_refuses_requests_for_all_of_its_models() -> None:
    ingress = Ingress()
    other = OverloadControl(lag=ingress.lag, clock=lambda: ingress.now)
    ingress.frames_s = 3.0  # of one model
    ingress.pass_time(HOLD_S + EVERY_S)
    for control in (ingress.control, other):
        assert control.refusing
        assert control.refusal() is not None
    assert ingress.lag.inspect()["refused"] == 2
