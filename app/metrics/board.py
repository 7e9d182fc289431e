"""The Grafana board of the fleet: ``python -m app.metrics.board > deploy/grafana/quire.json``.

It is in Grafana's JSON model, as an import takes it. Queries are of ``GET /metrics`` of the server; tests
compare every name in them with the table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

COLUMNS, WIDTH, HEIGHT = 3, 8, 8
"""Grafana's grid is 24 wide."""

SCHEMA_VERSION = 39
SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """``queries`` are PromQL and legend; ``$m`` in them stands for the chosen models."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""


def _quantiles(name: str) -> tuple[tuple[str, str], ...]:
    rate = f"sum by (le) (rate(quire_{name}_bucket{{$m}}[$__rate_interval]))"
    return tuple((f"histogram_quantile({share}, {rate})", f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))


def _rate(name: str, by: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate(quire_{name}_total{{$m}}[$__rate_interval]))"


def _sum(name: str, by: str) -> str:
    return f"sum by ({by}) (quire_{name}{{$m}})"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "What users feel",
        (
            Panel("Time to first token", "s", _quantiles("time_to_first_token_seconds")),
            Panel("Between tokens", "s", _quantiles("inter_token_seconds")),
            Panel("Whole request", "s", _quantiles("request_seconds")),
            Panel("Requests by outcome", "reqps", ((_rate("ended_requests", "outcome"), "{{outcome}}"),)),
            Panel("Refused", "reqps", ((_rate("refused_requests", "reason"), "{{reason}}"),)),
            Panel(
                "Tokens",
                "short",
                (
                    (_rate("prompt_tokens"), "prompt, per second"),
                    (_rate("generated_tokens"), "output, per second"),
                ),
            ),
        ),
    ),
    (
        "KV memory",
        (
            Panel(
                "Demand of the pools",
                "percentunit",
                (
                    ("sum(quire_kv_demand_blocks{$m}) / sum(quire_kv_blocks{$m})", "demand"),
                    ('sum(quire_kv_blocks{$m,state="referenced"}) / sum(quire_kv_blocks{$m})', "referenced"),
                ),
                "Above 100%, requests wait for memory, and engines are added up to the maximum.",
            ),
            Panel("Blocks", "short", ((_sum("kv_blocks", "state"), "{{state}}"),)),
            Panel(
                "Prompt tokens from the cache",
                "percentunit",
                (
                    (f"{_rate('prefix_hit_tokens')} / {_rate('prefix_query_tokens')}", "found"),
                    (f"{_rate('predicted_cached_tokens')} / {_rate('prefix_query_tokens')}", "expected"),
                ),
            ),
            Panel("Occupancy by engine", "percentunit", (("quire_kv_occupancy{$m}", "{{replica}}"),)),
            Panel(
                "Preemptions",
                "ops",
                ((_rate("recovery_decisions", "recovery"), "{{recovery}}"),),
                "By how the KV is to come back.",
            ),
            Panel("Blocks on the host", "short", ((_sum("host_blocks", "state"), "{{state}}"),)),
        ),
    ),
    (
        "Engines",
        (
            Panel("Sequences", "short", ((_sum("requests", "state"), "{{state}}"),)),
            Panel("Queue", "s", _quantiles("queue_seconds")),
            Panel("Prefill", "s", _quantiles("prefill_seconds")),
            Panel("Step by engine", "s", (("quire_step_seconds{$m}", "{{replica}}"),)),
            Panel("Decode", "s", _quantiles("decode_seconds")),
            Panel(
                "Finished", "reqps", ((_rate("finished_requests", "finished_reason"), "{{finished_reason}}"),)
            ),
        ),
    ),
    (
        "Scaling",
        (
            Panel(
                "Engines",
                "short",
                (
                    ("max(quire_scaling_target{$m})", "target"),
                    ("max(quire_scaling_running{$m})", "running"),
                    ('max(quire_replicas{$m,state="open"})', "open channels"),
                ),
            ),
            Panel("Needed", "short", (("max by (need) (quire_scaling_need_replicas{$m})", "{{need}}"),)),
            Panel(
                "Reason, and what holds the target",
                "short",
                (
                    ("max by (reason) (quire_scaling_reason{$m})", "{{reason}}"),
                    ("max by (held_by) (quire_scaling_held{$m})", "held by: {{held_by}}"),
                ),
            ),
        ),
    ),
    (
        "Ingresses",
        (
            Panel("Live choices", "short", (("quire_live_requests{$m}", "{{replica}}"),)),
            Panel("Lag of the loop", "s", (("quire_loop_lag_seconds{$m}", "{{replica}}"),)),
            Panel("Why a replica was chosen", "ops", ((_rate("routing_decisions", "reason"), "{{reason}}"),)),
            Panel(
                "Moves and resubmissions",
                "ops",
                ((_rate("moved_requests"), "moved"), (_rate("resubmissions"), "resubmitted")),
            ),
            Panel(
                "Channels and engines lost",
                "ops",
                (
                    (_rate("lost_channels"), "channels"),
                    (_rate("dead_engines"), "engines"),
                    (_rate("lost_leases"), "leases"),
                ),
            ),
            Panel("Faults that were caught", "ops", ((_rate("faults", "part"), "{{part}}"),)),
        ),
    ),
)


def board() -> dict[str, Any]:
    """The whole board."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        place = {"x": 0, "y": top, "w": COLUMNS * WIDTH, "h": 1}
        panels.append(
            {
                "type": "row",
                "title": title,
                "id": len(panels) + 1,
                "gridPos": place,
                "collapsed": False,
                "panels": [],
            }
        )
        top += 1
        for number, panel in enumerate(row):
            x, y = WIDTH * (number % COLUMNS), top + HEIGHT * (number // COLUMNS)
            panels.append(_panel(panel, len(panels) + 1, {"x": x, "y": y, "w": WIDTH, "h": HEIGHT}))
        top += HEIGHT * -(-len(row) // COLUMNS)
    return {
        "title": "Quire",
        "uid": "quire-fleet",
        "tags": ["quire"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source_variable(), _model_variable()]},
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "id": number,
        "gridPos": place,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query.replace("$m", 'model_name=~"$model"'),
                "legendFormat": legend,
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}


def _model_variable() -> dict[str, Any]:
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(quire_kv_occupancy, model_name)", "refId": "models"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    print(json.dumps(board(), indent=1))
