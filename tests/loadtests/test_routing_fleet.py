"""The simulated fleet in miniature: arms that know more do better, and nothing gets lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.experiments.routing import constants
from loadtests.experiments.routing.approximate import ApproximateIndex
from loadtests.experiments.routing.arms import Arm
from loadtests.experiments.routing.command import main
from loadtests.experiments.routing.constants import (
    BLOCK_SIZE,
    COST,
    REPLICAS,
    SHARED,
    Load,
    Shape,
    saturating_rate,
)
from loadtests.experiments.routing.fleet import Fleet
from loadtests.experiments.routing.runs import Run, Summary, simulate, ttft
from loadtests.experiments.routing.scenarios import SAME, SCENARIOS
from loadtests.experiments.routing.workloads import Conversations, burst, shared, unshared

SMALL = Shape(groups=12, system=1_600, questions=0, question=64, output=16)
FULL = Load(replicas=3, blocks=600, rate=200.0, warm_up=0.0, seconds=5.4)
CALM = Load(replicas=3, blocks=1_000, rate=10.0, warm_up=1.0, seconds=3.0)

TIMES = [0.1 * i for i in range(40)]


def run(arm: Arm, load: Load = FULL, **more: int) -> Summary:
    saturated = load is FULL
    return simulate(Run("small", SAME, SMALL, load, arm, 1, saturated, **more))


def test_the_oracle_dominates() -> None:
    outcomes = {arm: run(arm) for arm in Arm}
    best = outcomes[Arm.ORACLE]
    for arm, other in outcomes.items():
        assert other.throughput <= 1.03 * best.throughput, arm
        assert other.hit_rate <= best.hit_rate + 0.02, arm


def test_prefixes_are_found_where_they_are() -> None:
    load = Load(replicas=3, blocks=600, rate=40.0, warm_up=2.0, seconds=3.0)
    ours, turns = run(Arm.PREFIX, load), run(Arm.ROUND_ROBIN, load)
    assert ours.hit_rate > turns.hit_rate + 0.2
    assert ttft([ours], 0.9) < 0.5 * ttft([turns], 0.9)


@pytest.mark.parametrize("arm", list(Arm))
def test_every_request_ends_once(arm: Arm) -> None:
    workload = shared(SMALL, TIMES, 1, vary=True)
    fleet = Fleet(arm, workload, CALM.replica, replicas=3, ingresses=2, seed=1)
    outcome = fleet.run()
    assert outcome.unfinished == 0
    assert sorted(record.job.number for record in outcome.records) == [job.number for job in workload.jobs]
    assert all(record.job.arrival < record.first <= record.last for record in outcome.records)
    assert sum(replica.scheduler.stats().generated_tokens for replica in fleet.replicas) == sum(
        job.output for job in workload.jobs
    )
    for replica in fleet.replicas:
        replica.scheduler.check()
        assert replica.load().waiting_tokens == replica.load().running == 0


def test_the_same_seed_gives_the_same_run() -> None:
    assert run(Arm.PREFIX, CALM) == run(Arm.PREFIX, CALM)


def test_a_replica_that_joins_gets_requests() -> None:
    summary = run(Arm.PREFIX, CALM, first=2)
    assert summary.replicas_used == 3
    early = [place for when, place in summary.choices if when < CALM.warm_up]
    assert early
    assert all(place < 2 for place in early)


def test_marks_count_what_lies_between_them() -> None:
    workload = shared(SMALL, TIMES, 1, vary=False)
    fleet = Fleet(Arm.ROUND_ROBIN, workload, CALM.replica, replicas=2)
    outcome = fleet.run(marks=(0.0, 1e3))
    assert outcome.marks[0].generated == 0
    assert outcome.marks[1].generated == SMALL.output * len(workload.jobs)
    assert outcome.marks[1].queried == SMALL.prompt * len(workload.jobs)


def test_seeds_pool_their_times_to_the_first_token() -> None:
    one, other = run(Arm.ROUND_ROBIN, CALM), run(Arm.PREFIX, CALM)
    times = sorted([*one.ttft[""], *other.ttft[""]])
    assert ttft([one, other], 0.0) == times[0]
    assert ttft([one, other], 1.0) == times[-1]
    assert ttft([one, other], 1.0, "another") != ttft([one, other], 1.0, "another")  # of none, not a number


def test_rates_saturate() -> None:
    row_seconds = COST.context_token * (SHARED.prompt + SHARED.output / 2)
    assert saturating_rate(SHARED, REPLICAS) * SHARED.output * row_seconds == pytest.approx(REPLICAS)


def test_working_set_fills_its_share() -> None:
    blocks = SHARED.blocks(0.73, REPLICAS)
    assert SHARED.working_set / (blocks * BLOCK_SIZE * REPLICAS) == pytest.approx(0.73, rel=1e-3)
    assert blocks == 19_264  # as published: 308 thousand tokens


def test_popularity_follows_zipf() -> None:
    tiny = Shape(groups=12, system=16, questions=0, question=16, output=1)
    jobs = shared(tiny, [0.0] * 20_000, 1, vary=False).jobs
    first = [job.prompt.tokens[0] for job in jobs]
    counts = sorted((first.count(token) for token in set(first)), reverse=True)
    assert counts[0] / counts[3] == pytest.approx(4.0, rel=0.15)


def test_prompts_share_what_they_should() -> None:
    same = burst(SMALL, [], 1, distinct=False).jobs
    other = burst(SMALL, [], 1, distinct=True).jobs
    assert len({tuple(job.prompt.keys[:100]) for job in same}) == 1
    assert len({job.prompt.keys[0] for job in other}) == len(other)
    jobs = unshared(SMALL, TIMES, 1).jobs
    assert len({job.prompt.keys[0] for job in jobs}) == len(jobs)


def test_conversations_grow() -> None:
    talk = Conversations(SMALL, TIMES, 1)
    job = talk.jobs[0]
    follow = talk.follow(job, 10.0, [7] * job.output)
    assert follow is not None
    before = len(job.prompt.tokens)
    assert follow.prompt.tokens[: before + job.output] == [*job.prompt.tokens, *[7] * job.output]
    assert follow.prompt.keys[: len(job.prompt.keys)] == job.prompt.keys
    assert (follow.session, follow.turn) == (job.session, 1)
    assert follow.arrival > 10.0


def test_an_approximate_index_forgets_the_ends_first() -> None:
    index = ApproximateIndex(capacity=6)
    index.add("a")
    index.add("b")
    index.claim("a", [1, 2, 3, 4], 0.0, 1.0)
    index.claim("a", [11, 12, 13, 14], 0.0, 1.0)
    assert dict(index.longest([1, 2, 3, 4])) == {"a": 2, "b": 0}
    assert dict(index.longest([11, 12, 13, 14, 15])) == {"a": 4, "b": 0}


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_scenarios_are_complete(name: str) -> None:
    runs = SCENARIOS[name](2).runs
    assert len(set(runs)) == len(runs)
    assert all(one.load.replicas > 0 and one.load.blocks > one.shape.prompt // BLOCK_SIZE for one in runs)


def test_a_scenario_judges_its_runs() -> None:
    scenario = SCENARIOS["hot"](2)
    summaries = [run(one.arm, CALM) for one in scenario.runs]
    summaries[0].unfinished = 3
    figures = scenario.judge(summaries)
    outputs = [figure.name for figure in figures if "output" in figure.name]
    assert outputs == [f"served: {arm}: output" for arm in ("prefix", "least tokens", "round robin")]
    lost = figures[-1]
    assert (lost.value, lost.holds) == (3, False)


def test_the_command_reports_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "BURST_TRIALS", 1)
    out = tmp_path / "figures.json"
    main(["--only", "burst", "--workers", "1", "--json", str(out)])
    figures = {figure["name"]: figure for figure in json.loads(out.read_text())["figures"]}
    assert figures["burst: distinct prefixes, busiest/mean"]["holds"]
    assert figures["burst: requests without an end"]["value"] == 0
    assert "64 requests in 5 ms" in capsys.readouterr().out
