"""A fleet's figures in Prometheus's format: each process once, every metric of the table, nothing lost."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from engine_stats import SCALING, SCHEDULER, STATS
from prometheus_client.parser import text_string_to_metric_families

from app.metrics.aliases import ALIASES
from app.metrics.engine_figures import engine_samples
from app.metrics.exposition import render, render_keys
from app.metrics.fleet_figures import FleetFigures, ModelFigures
from app.metrics.ingress_figures import ingress_samples
from app.metrics.page import page
from app.metrics.request_figures import RequestFigures
from app.metrics.samples import METRICS, Process, Samples, pack, unpack
from app.metrics.scaling_figures import DecisionReader, scaling_samples
from app.metrics.table import TABLE, MetricKind, Source
from engine.scheduling.latency_stats import LatencyStats

CLIENT: dict[str, Any] = {
    "live_requests": 3,
    "channels": {"engine#a": "open", "engine#b": "open", "engine#c": "suspect"},
    "moved": 4,
    "resubmitted": 5,
    "reasons": {"prefix": 6},
    "event_faults": 7,
    "call_faults": 2,
    "channel_faults": {"lost": 8, "silent": 9, "dead": 10},
    "cached_tokens": {"requests": 1, "predicted": 64, "actual": 48, "error": 16},
}
OVERLOAD = {"lag_s": 0.25, "expected_wait_s": None, "faults": 0}
DECISION = {
    "at": 100.0,
    "target": 3,
    "running": 2,
    "reason": "kv",
    "held_by": "maximum",
    "demand": 1.25,
    "needs": {"kv": 3.5, "prefill": 0.5, "decode": 0.0},
    "missing_reports": 0,
    "faults": {"decision": 0, "publishing": 0},
    "victims": {"yes": 2, "no": 1},
}
OLDER = b'{"at": 100.0, "target": 3, "running": 2}'  # of a release that told less


def engine(generated: int) -> Samples:
    latency = LatencyStats(lambda: 0.0)
    latency.queue.add(0.5)
    scheduler = dataclasses.replace(SCHEDULER, generated_tokens=generated, latency=latency)
    return engine_samples(dataclasses.replace(STATS, scheduler=scheduler), SCALING, 1)


def ingress(tokens: int) -> Samples:
    requests = RequestFigures()
    requests.output_tokens.add(tokens)
    requests.ended["chat", "ok"] += 1
    for used in (requests.key_requests, requests.key_prompt_tokens, requests.key_cached_tokens):
        used["alice"] += 1
    requests.key_output_tokens["alice"] += tokens
    return ingress_samples(requests, CLIENT, OVERLOAD, {"victims": 3})


def parsed(text: bytes) -> dict[str, dict[str, float]]:
    """Of each sample's name: value by the labels other than the model's."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            replica = [labels.pop("replica")] if "replica" in labels else []
            known = found.setdefault(sample.name, {})
            key = ",".join([*replica, *labels.values()])
            assert key not in known, f"{sample.name} {key} came twice"
            known[key] = sample.value
    return found


def names(name: str, kind: MetricKind) -> list[str]:
    if kind is MetricKind.HISTOGRAM:
        return [f"{name}_bucket", f"{name}_sum", f"{name}_count"]
    return [f"{name}_total" if kind is MetricKind.COUNTER else name]


def test_an_engines_figures_are_the_same_after_the_way_over_the_channel() -> None:
    samples = engine(90)
    arrived = unpack(tuple(pack(samples)))
    assert {name: {**arrived[name], **values} for name, values in samples.items()} == arrived
    assert arrived["generated_tokens"] == {(): 90}
    assert arrived["queue_seconds"] == samples["queue_seconds"]
    for wrong in (pack(samples)[:-1], [*pack(samples), 0.0]):
        with pytest.raises(ValueError, match="too"):
            unpack(wrong)


def test_every_metric_has_samples_under_its_name_and_its_others() -> None:
    fleet = [
        Process("i", ingress(5), "m"),
        Process("e", engine(90), "m"),
        Process("", scaling_samples(DECISION), "m"),
    ]
    found = parsed(render(fleet) + render_keys(fleet, None))
    wanted = [name for metric in TABLE for name in names(metric.full_name, metric.kind)]
    wanted += [name for alias in ALIASES for name in names(f"vllm:{alias.name}", alias.kind)]
    assert [name for name in wanted if not found.get(name)] == []
    assert set(found) == set(wanted)
    assert found["quire_key_output_tokens_total"] == {"i,alice": 5}
    assert found["quire_replicas"] == {"i,opening": 0, "i,open": 2, "i,suspect": 1, "i,closed": 0}
    assert found["quire_routing_decisions_total"]["i,prefix"] == 6
    assert found["quire_lost_channels_total"] == {"i": 8}
    assert found["quire_moved_requests_total"] == {"i": 4}
    assert found["quire_faults_total"] == {"i,events": 7, "i,calls": 2, "i,routing": 0, "i,overload": 0}
    assert found["quire_ray_faults_total"] == {"i,victims": 3, "i,decision": 0}
    assert found["quire_cached_tokens_error_total"] == {"i": 16}
    assert found["quire_scaling_held"] == {"maximum": 1}
    assert found["quire_scaling_need_replicas"] == {"kv": 3.5, "prefill": 0.5, "decode": 0}
    assert found["vllm:num_requests_waiting"] == {"e": 11}
    buckets = found["quire_queue_seconds_bucket"]
    assert [buckets[f"e,{bound}"] for bound in ("0.3", "0.5", "0.75", "+Inf")] == [0, 1, 1, 1]


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "ä {}=,"])
def test_names_may_have_any_characters(name: str) -> None:
    fleet = [Process(name, ingress(5), name)]
    text = (render(fleet) + render_keys(fleet, None)).decode()
    labels = {
        (sample.labels["model_name"], sample.labels["replica"])
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert labels == {(name, name)}


def test_whichever_ingress_answers_each_process_appears_once() -> None:
    engines = {"e": pack(engine(90)), "f": pack(engine(10))}
    everyone = [Process("i", ingress(5), "m"), Process("j", ingress(7), "m")]

    async def others() -> list[Process]:
        return everyone

    async def scaling() -> Samples:
        return scaling_samples(DECISION)

    async def answers() -> list[dict[str, dict[str, float]]]:
        fleets = [
            FleetFigures([ModelFigures("m", lambda own=own: own, lambda: engines, scaling)], others)
            for own in everyone
        ]
        return [parsed(await fleet.text()) for fleet in fleets]

    first, second = asyncio.run(answers())
    assert first == second
    assert first["quire_generated_tokens_total"] == {"e": 90, "f": 10}
    assert first["quire_request_output_tokens_sum"] == {"i": 5, "j": 7}
    assert first["quire_scaling_target"] == {"": 3}


def test_an_engine_that_two_other_ingresses_report_appears_once() -> None:
    """While a deploy rolls, an old ingress and a new one may both do it."""

    async def others() -> list[Process]:
        return [Process(i, ingress(7), "m") for i in "jk"] + 2 * [Process("e", engine(90), "m")]

    fleet = FleetFigures([ModelFigures("m", lambda: Process("i", ingress(5), "m"))], others)
    assert parsed(asyncio.run(fleet.text()))["quire_generated_tokens_total"] == {"e": 90}


def test_models_have_series_of_their_own() -> None:
    """The ingress counts for each model; replicas and the policy's decision belong to one."""

    async def scaling() -> Samples:
        return scaling_samples(DECISION)

    async def others() -> list[Process]:
        return [Process("j", ingress(7), "one"), Process("j", ingress(8), "other")]

    models = [
        ModelFigures("one", lambda: Process("i", ingress(5), "one"), lambda: {"e": pack(engine(90))}, scaling),
        ModelFigures("other", lambda: Process("i", ingress(6), "other"), lambda: {"f": pack(engine(10))}),
    ]
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(asyncio.run(FleetFigures(models, others).text()).decode()):
        for sample in family.samples:
            key = tuple(sample.labels.values())
            assert key not in found.setdefault(sample.name, {}), f"{sample.name} {key} came twice"
            found[sample.name][key] = sample.value
    assert found["quire_generated_tokens_total"] == {("one", "e"): 90, ("other", "f"): 10}
    assert found["quire_request_output_tokens_sum"] == {
        ("one", "i"): 5,
        ("other", "i"): 6,
        ("one", "j"): 7,
        ("other", "j"): 8,
    }
    assert found["quire_scaling_target"] == {("one",): 3}


def test_frequent_scrapes_share_an_answer() -> None:
    now, made = [0.0], []

    def own() -> Process:
        made.append(now[0])
        return Process("i", ingress(1), "m")

    async def scrape() -> None:
        fleet = FleetFigures([ModelFigures("m", own)], clock=lambda: now[0])
        await asyncio.gather(*(fleet.text() for _ in range(5)))
        now[0] = 0.9
        await fleet.text()
        now[0] = 1.0
        await fleet.text()

    asyncio.run(scrape())
    assert made == [0.0, 1.0]


def test_a_key_sees_its_own_figures_among_those_of_all_ingresses() -> None:
    def used(*keys: str) -> Samples:
        figures = RequestFigures()
        figures.key_requests.update(keys)
        return figures.samples()

    everyone = [Process("i", used("alice", "bob", 'a"b'), "m"), Process("j", used("bob", "bob", "carol"), "m")]

    async def others() -> list[Process]:
        return everyone

    async def seen(key: str | None) -> dict[str, float]:
        return parsed(await fleet.text(key)).get("quire_key_requests_total", {})

    async def scrape() -> list[dict[str, float]]:
        return [await seen(key) for key in (None, "bob", "carol", "nobody", "bob")]

    fleet = FleetFigures([ModelFigures("m", lambda: everyone[0])], others, clock=lambda: 0.0)
    every, bob, carol, nobody, again = asyncio.run(scrape())
    assert every == {"i,alice": 1, "i,bob": 1, 'i,a"b': 1, "j,bob": 2, "j,carol": 1}
    assert bob == again == {"i,bob": 1, "j,bob": 2}
    assert (carol, nobody) == ({"j,carol": 1}, {})


@pytest.mark.parametrize(
    ("value", "now", "known"),
    [
        (json.dumps(DECISION).encode(), 160.0, True),
        (json.dumps(DECISION).encode(), 161.0, False),  # its controller has died
        (None, 100.0, False),
        (b"{", 100.0, False),
        (b"{}", 100.0, False),
        (OLDER, 100.0, False),
    ],
)
def test_a_decision_counts_while_it_is_new_and_whole(value: bytes | None, now: float, known: bool) -> None:
    reader = DecisionReader("quire", "engine", read=lambda key: value, clock=lambda: now)
    decision = asyncio.run(reader.latest())
    assert decision == (scaling_samples(DECISION) if known else {})
    assert reader.faults.count == (value in (b"{", b"{}", OLDER))


def test_the_documented_table_is_the_codes() -> None:
    root = Path(__file__).parents[3]
    assert (root / "docs/metrics.md").read_text() == page()


def test_names_are_unique_and_what_an_engine_sends_has_fixed_labels() -> None:
    assert len(METRICS) == len(TABLE)
    for metric in TABLE:
        if metric.source is Source.ENGINE:
            assert bool(metric.values) == bool(metric.labels)
