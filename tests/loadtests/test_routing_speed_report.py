"""What the benchmarks of routing say, as figures with bars."""

from __future__ import annotations

from loadtests.routing_speed import figures, row


def test_figures_have_the_bars_of_their_benchmarks() -> None:
    decision = {
        "name": "test_decision[16-replicas-512-blocks]",
        "stats": {"min": 20e-6, "rounds": 3000},
        "extra_info": {"p50_us": 41.0, "p99_us": 90.0, "goals": {"p50_us": 40, "p99_us": 150}},
    }
    events = {
        "name": "test_apply[16]",
        "stats": {"min": 1e-4, "rounds": 100},
        "extra_info": {
            "p50_us": 1.0,
            "p99_us": 2.0,
            "records": 512,
            "records_per_s": 1.9e6,
            "goals": {"records_per_s": 2e6},
        },
    }
    made = {figure.name: figure for figure in figures([decision, events])}
    assert not made["decision[16-replicas-512-blocks] p50"].holds
    assert made["decision[16-replicas-512-blocks] p99"].holds
    assert made["apply[16] p99"].bar is None
    assert not made["apply[16] records_per_s"].holds
    assert row(decision) == ("test_decision[16-replicas-512-blocks]", "3000", "20.0", "41.0", "90.0")
