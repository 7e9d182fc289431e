"""How Serve is started and what is deployed: the content of ``serve_config.yaml``, in code for the launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

APP_NAME = "quire"
IMPORT_PATH = "app.application:build"

LONGEST_STREAM_S = 3600
"""HAProxy's reloads, one for each change of replicas, cut streams that are older than its hard stop."""

PATIENCE = {
    # Ray kills a proxy that takes longer than 5 s to start, which a busy machine makes it do.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}

HAPROXY_ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_S),
}


def controller_environment() -> dict[str, str]:
    """Variables of the Serve controller, inherited by its replicas.

    A cluster that runs already ignores the environment of the shell that deploys, so they travel in
    ``controller_options``. HAProxy is there on Linux only.
    """
    return {**PATIENCE, **(HAPROXY_ENVIRONMENT if haproxy_expected() else {})}


def haproxy_expected() -> bool:
    """Whether Ray can run HAProxy on this platform."""
    return sys.platform == "linux"


def haproxy_enabled(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the Serve that this process belongs to was started with HAProxy."""
    return (os.environ if environment is None else environment).get("RAY_SERVE_ENABLE_HA_PROXY") == "1"


def deploy_config(args: Mapping[str, Any], host: str = "127.0.0.1", port: int = 8000) -> dict[str, Any]:
    """What ``serve deploy`` reads, with the application's options ``args``."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": port},
        "controller_options": {"runtime_env": {"env_vars": controller_environment()}},
        "applications": [
            {"name": APP_NAME, "route_prefix": "/", "import_path": IMPORT_PATH, "args": dict(args)},
        ],
    }
