"""The queries of the boards and alerts in ``deploy``, and what they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent.parent / "deploy"


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
