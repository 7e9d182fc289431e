"""The engine's figures reach Ray's metrics: gauges as they are, counters by what has come since."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from engine_stats import RECOVERY, SCHEDULER, STATS
from ray.serve import metrics

from app.metrics import EngineMetrics, OverloadMetrics
from engine.scheduling.recovery import Recovery


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], float]:
    """What Ray was told, by metric and by its tag's value: the last of a gauge, the sum of a counter."""
    found: dict[tuple[str, str], float] = {}

    def key(metric: Any, tags: dict[str, str]) -> tuple[str, str]:
        assert set(tags) == set(metric.info["tag_keys"])
        assert tags["model_name"] == "m"
        return metric.info["name"], "".join(value for name, value in tags.items() if name != "model_name")

    def set_gauge(self: Any, value: float, tags: dict[str, str]) -> None:
        found[key(self, tags)] = value

    def increase(self: Any, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        found[key(self, tags)] = found.get(key(self, tags), 0) + value

    monkeypatch.setattr(metrics.Gauge, "set", set_gauge)
    monkeypatch.setattr(metrics.Counter, "inc", increase)
    return found


def test_memory_and_recovery_are_published(published: dict[tuple[str, str], float]) -> None:
    EngineMetrics("m").update(STATS)
    wanted = {
        ("quire_kv_blocks", "referenced"): 30,
        ("quire_kv_occupancy", ""): 0.3,
        ("quire_host_blocks", "used"): 9,
        ("quire_host_blocks", "free"): 7,
        ("quire_requests", "running"): 7,
        ("quire_requests", "preempted"): 5,
        ("quire_requests", "swapped"): 4,
        ("quire_copied_blocks", ""): 11,
        ("quire_recovery_decisions", "swap"): 5,
        ("quire_recovery_decisions", "recompute"): 2,
        ("quire_recoveries", "swap"): 4,
        ("quire_recovery_estimated_seconds", "recompute"): 0.25,
        ("quire_recovery_seconds", "swap"): 0.75,
        ("quire_recovery_fallbacks", ""): 3,
        ("quire_finished_requests", "stop"): 12,
    }
    assert {key: published.get(key) for key in wanted} == wanted


def test_counters_move_by_what_has_come_since(published: dict[tuple[str, str], float]) -> None:
    figures = EngineMetrics("m")
    figures.update(STATS)
    figures.update(STATS)
    recovery = dataclasses.replace(RECOVERY, outcomes={Recovery.SWAP: 1.0, Recovery.RECOMPUTE: 0.125})
    scheduler = dataclasses.replace(SCHEDULER, recovery=recovery, generated_tokens=95, swapped=0)
    figures.update(dataclasses.replace(STATS, scheduler=scheduler))
    assert published["quire_generated_tokens", ""] == 95
    assert published["quire_recovery_seconds", "swap"] == 1.0
    assert published["quire_recovery_seconds", "recompute"] == 0.125
    assert published["quire_requests", "swapped"] == 0


def test_overload_control_is_published(published: dict[tuple[str, str], float]) -> None:
    figures = OverloadMetrics("m")
    for wait_s, refused in ((0.5, 0), (7.5, 3), (7.25, 5)):
        figures.update(wait_s, refused)
    assert published["quire_expected_wait_seconds", ""] == 7.25
    assert published["quire_admission_refused", ""] == 5
