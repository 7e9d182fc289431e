"""The queries of the boards and alerts in ``deploy`` and of Ray's own board, and what they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent.parent / "deploy"

WITHOUT_DATA = {
    "ray_vllm_nixl_": "no engine sends KV to another: a request that moves is computed again",
    "ray_vllm_kv_offload_": "KV on the host is that of preempted sequences, and serves no other request",
    "ray_vllm_external_prefix_cache_": "there is no cache outside the engines",
}
"""Beginnings of the names that Ray's Serve LLM board asks for and that Quire does not have, with the reason."""


def rules() -> list[dict[str, Any]]:
    """All alerts."""
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def board() -> dict[str, Any]:
    """The Grafana board."""
    found: dict[str, Any] = json.loads((DEPLOY / "grafana/quire.json").read_text())
    return found


def board_queries() -> list[str]:
    """As Grafana would send them, with all models and a window that fits a test."""
    targets = [target["expr"] for panel in board()["panels"] for target in panel.get("targets", [])]
    return [expr.replace("$model", ".*").replace("$__rate_interval", "1m") for expr in targets]


def ray_board_queries() -> list[str]:
    """Of Ray's own Serve LLM board, those that can have data; with all choices and windows that fit a test."""
    from ray.dashboard.modules.metrics.grafana_dashboard_factory import generate_serve_llm_grafana_dashboard

    rows = json.loads(generate_serve_llm_grafana_dashboard()[0])["panels"]
    panels = [panel for row in rows for panel in (row, *row.get("panels", ()))]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    queries = [query for query in queries if not any(name in query for name in WITHOUT_DATA)]
    chosen = [re.sub(r"\$(?!interval)\w+", ".*", query).replace("$interval", "1m") for query in queries]
    return [query.replace(":1m]", ":1s]") for query in chosen]  # a subquery looks at whole minutes


def alert_queries() -> list[str]:
    """What each alert looks at, without the bounds that are seldom reached."""
    return [
        re.sub(r" (?:> 0 *|[<>] (?:bool )?[\d.]+)$", "", part)
        for rule in rules()
        for part in re.split(r" and ", rule["expr"])
    ]


def metrics_of(query: str) -> set[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Each of our metrics in a query: name, the labels that it selects by, and all that it groups by."""
    grouped = tuple(
        label.strip()
        for by in re.findall(r"\bby \(([^)]*)\)", query)
        for label in by.split(",")
        if label.strip()
    )
    return {
        (name, tuple(re.findall(r"(\w+)\s*=~?", selector)), grouped)
        for name, selector in re.findall(r"\b(quire_\w+)(\{[^}]*\})?", query)
    }
