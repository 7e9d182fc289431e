"""What the live page shows of figures: rates of what has come, percentiles of it, and nobody twice."""

from __future__ import annotations

import dataclasses

import pytest
from engine_stats import SCALING, SCHEDULER, STATS
from hypothesis import given
from hypothesis import strategies as st

from app.dashboard.fleet_view import Moment, quantile, view
from app.metrics.engine_figures import engine_samples
from app.metrics.ingress_figures import ingress_samples
from app.metrics.request_figures import RequestFigures
from app.metrics.samples import Process, Samples
from app.metrics.scaling_figures import scaling_samples
from engine.histogram import Histogram

CLIENT = {"live_requests": 3, "channels": {}, "moved": 4, "reasons": {"prefix": 6}}
OVERLOAD = {"lag_s": 0.25, "expected_wait_s": 1.5, "faults": 0}


def engine(generated: int, hits: int = 70, queries: int = 80) -> Samples:
    scheduler = dataclasses.replace(
        SCHEDULER, generated_tokens=generated, prefix_hit_tokens=hits, prefix_query_tokens=queries
    )
    return engine_samples(dataclasses.replace(STATS, scheduler=scheduler), SCALING, 1)


def ingress(first_tokens: list[float], reasons: int = 6) -> Samples:
    requests = RequestFigures()
    for seconds in first_tokens:
        requests.first_token.add(seconds)
        requests.ended["chat", "ok"] += 1
    return ingress_samples(requests, {**CLIENT, "reasons": {"prefix": reasons}}, OVERLOAD)


def moment(at: float, *processes: tuple[str, Samples]) -> Moment:
    return Moment.of(at, [Process(*process, "m") for process in processes])


def test_rates_are_of_what_came_between_two_moments() -> None:
    before = moment(10.0, ("i", ingress([5.0])), ("a", engine(100)), ("gone", engine(1000)))
    now = moment(14.0, ("i", ingress([5.0, 0.1, 0.1], 9)), ("a", engine(180, 90, 120)), ("new", engine(40)))
    shown = view(before, now, {"a": "open", "new": "open", "starting": "opening"})
    assert [replica["name"] for replica in shown["replicas"]] == ["a", "new", "starting"]
    here, new, starting = shown["replicas"]
    assert (here["tokens_s"], new["tokens_s"]) == (20.0, 10.0)
    assert here["hit_share"] == 0.5
    assert here["blocks"] == [10, 20, 20, 50]
    assert (here["pool"], here["host"], here["demand"]) == (100, [9, 16], 42.8)
    assert starting == {"name": "starting", "state": "opening"}
    assert shown["fleet"] == {
        "ingresses": 1,
        "pool": 200,
        "demand": 85.6,
        "tokens_s": 30.0,
        "prompt_tokens_s": 25.0,
        "live": 3,
        "waiting": 22,
        "lag_s": 0.25,
        "wait_s": 1.5,
    }
    assert shown["latency"]["first_token"] == {
        "count": 2,
        "p50": pytest.approx(0.0875),
        "p95": pytest.approx(0.0988),
    }
    assert shown["latency"]["inter_token"] == {"count": 0, "p50": None, "p95": None}
    assert shown["routing"] == {"prefix": 3}
    assert shown["ended"] == {"chat ok": 2}
    assert shown["totals"]["moved_requests"] == 4
    assert shown["totals"]["lost_leases"] == 2
    assert shown["scaling"] is None


def test_the_last_decision_is_shown_with_its_reason() -> None:
    decision = {
        "target": 3,
        "running": 2,
        "reason": "hold",
        "held_by": "replicas start",
        "demand": 1.25,
        "needs": {"kv": 3.5, "prefill": 0.5, "decode": 0.0},
        "missing_reports": 0,
        "faults": {},
        "victims": {},
    }
    now = moment(1.0, ("i", ingress([])), ("", scaling_samples(decision)))
    assert view(now, now, {})["scaling"] == {
        "target": 3,
        "running": 2,
        "demand": 1.25,
        "reason": "hold",
        "held_by": "replicas start",
        "needs": {"kv": 3.5, "prefill": 0.5, "decode": 0.0},
        "missing_reports": 0,
    }


def test_a_process_that_left_takes_nothing_away() -> None:
    before = moment(0.0, ("i", ingress([0.1] * 9, 50)), ("j", ingress([0.1])))
    now = moment(1.0, ("j", ingress([0.1])))
    shown = view(before, now, {})
    assert shown["latency"]["first_token"]["count"] == 0
    assert (shown["routing"], shown["ended"]) == ({}, {})


@given(st.lists(st.floats(0.0, 9.0), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_within_its_bucket(values: list[float], share: float) -> None:
    bounds = (1.0, 2.0, 4.0, 10.0)
    histogram = Histogram(bounds)
    for value in values:
        histogram.add(value)
    found = quantile(bounds, histogram.totals.counts, share)
    rank = share * len(values)
    exact = sorted(values)[min(max(-(-int(rank * 1e9) // int(1e9)), 1), len(values)) - 1]
    upper = next(bound for bound in bounds if exact <= bound)
    lower = max((bound for bound in (0.0, *bounds) if bound < upper), default=0.0)
    assert found is not None
    assert lower - 1e-6 <= found <= upper + 1e-6


def test_of_nothing_there_is_no_quantile() -> None:
    assert quantile((1.0, 2.0), (0, 0, 0), 0.5) is None
    assert quantile((1.0, 2.0), (0, 0, 4), 0.5) == 2.0
