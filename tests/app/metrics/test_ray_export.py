"""Figures reach Ray: gauges as they are, counters by what has come since, histograms by their parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from engine_stats import RECOVERY, SCALING, SCHEDULER, STATS
from ray.serve import metrics

from app.metrics.engine_figures import engine_samples
from app.metrics.ray_export import RayExport
from app.metrics.request_figures import RequestFigures
from app.metrics.table import Source
from engine.scheduling.recovery import Recovery


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], float]:
    """What Ray was told, by metric and by its tags' values: the last of a gauge, the sum of a counter."""
    found: dict[tuple[str, str], float] = {}

    def key(metric: Any, tags: dict[str, str]) -> tuple[str, str]:
        assert set(tags) == set(metric.info["tag_keys"])
        assert "route" not in tags
        return metric.info["name"], ",".join(
            value for name, value in tags.items() if (name, value) != ("model_name", "m")
        )

    def set_gauge(self: Any, value: float, tags: dict[str, str]) -> None:
        found[key(self, tags)] = value

    def increase(self: Any, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        found[key(self, tags)] = found.get(key(self, tags), 0) + value

    monkeypatch.setattr(metrics.Gauge, "set", set_gauge)
    monkeypatch.setattr(metrics.Counter, "inc", increase)
    return found


def test_memory_and_recovery_are_published(published: dict[tuple[str, str], float]) -> None:
    export = RayExport(Source.ENGINE)
    export.update("m", engine_samples(STATS, SCALING, 2))
    assert export.faults.count == 0
    wanted = {
        ("quire_kv_blocks", "referenced"): 30,
        ("quire_kv_shared_blocks", ""): 10,
        ("quire_kv_demand_blocks", ""): 30 + 12 + 0.8,
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
        ("quire_lost_leases", ""): 2,
        ("vllm_num_requests_waiting", ""): 11,
        ("vllm_kv_cache_usage_perc", ""): 0.3,
        ("vllm_prefix_cache_hits", ""): 70,
        ("vllm_request_success", "stop"): 12,
    }
    assert {key: published.get(key) for key in wanted} == wanted


def test_counters_move_by_what_has_come_since(published: dict[tuple[str, str], float]) -> None:
    export = RayExport(Source.ENGINE)
    export.update("m", engine_samples(STATS, SCALING, 0))
    export.update("m", engine_samples(STATS, SCALING, 0))
    recovery = dataclasses.replace(RECOVERY, outcomes={Recovery.SWAP: 1.0, Recovery.RECOMPUTE: 0.125})
    scheduler = dataclasses.replace(SCHEDULER, recovery=recovery, generated_tokens=95, swapped=0)
    export.update("m", engine_samples(dataclasses.replace(STATS, scheduler=scheduler), SCALING, 0))
    assert published["quire_generated_tokens", ""] == 95
    scheduler = dataclasses.replace(SCHEDULER, generated_tokens=100)
    export.update("m", engine_samples(dataclasses.replace(STATS, scheduler=scheduler), SCALING, 0))
    assert published["quire_generated_tokens", ""] == 100
    assert published["quire_recovery_seconds", "swap"] == 1.0
    assert published["quire_recovery_seconds", "recompute"] == 0.125
    assert published["quire_requests", "swapped"] == 4


def test_models_count_for_themselves(published: dict[tuple[str, str], float]) -> None:
    export = RayExport(Source.ENGINE)
    for model in ("m", "other", "m", "other"):
        export.update(model, engine_samples(STATS, SCALING, 0))
    assert published["quire_generated_tokens", ""] == published["quire_generated_tokens", "other"] > 0


def test_nothing_is_passed_on_where_ray_has_no_agents(
    published: dict[tuple[str, str], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_RAY_COLLECTS", "0")
    RayExport(Source.ENGINE).update("m", engine_samples(STATS, SCALING, 0))
    assert not published
    monkeypatch.delenv("QUIRE_RAY_COLLECTS")
    RayExport(Source.ENGINE).update("m", engine_samples(STATS, SCALING, 0))
    assert published


def test_a_histogram_is_cumulative_and_has_sum_and_count(published: dict[tuple[str, str], float]) -> None:
    figures = RequestFigures()
    for seconds in (0.004, 0.02, 0.04, 500.0):
        figures.first_token.add(seconds)
    figures.ended["chat", "ok"] += 4
    RayExport(Source.INGRESS).update("m", figures.samples())
    for name in ("quire_time_to_first_token_seconds", "vllm_time_to_first_token_seconds"):
        buckets = {
            bound: published[f"{name}_bucket", bound] for bound in ("0.005", "0.02", "0.05", "120.0", "+Inf")
        }
        assert buckets == {"0.005": 1, "0.02": 2, "0.05": 3, "120.0": 3, "+Inf": 4}
        assert (published[f"{name}_count", ""], published[f"{name}_sum", ""]) == (4, pytest.approx(500.064))
    assert published["quire_ended_requests", "chat,ok"] == 4


def test_ray_whose_port_asks_for_no_key_is_told_of_none(published: dict[tuple[str, str], float]) -> None:
    figures = RequestFigures()
    figures.key_requests["alice"] += 1
    figures.key_output_tokens["alice"] += 5
    figures.ended["chat", "ok"] += 1
    RayExport(Source.INGRESS).update("m", figures.samples())
    assert ("quire_ended_requests", "chat,ok") in published
    assert [key for key in published if "alice" in key[1] or key[0].startswith("quire_key_")] == []


def test_a_failure_of_ray_is_counted_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no agent")

    monkeypatch.setattr(metrics.Gauge, "set", fail)
    export = RayExport(Source.ENGINE)
    for _ in range(2):
        export.update("m", engine_samples(STATS, SCALING, 0))
    assert export.faults.count == 2
