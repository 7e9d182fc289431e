"""What Serve is started with and what it deploys: ``serve_config.yaml`` as code, for the launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.config import HAPROXY
from app.launch import haproxy
from app.option_groups import LaunchOptions

APP_NAME = "quire"
IMPORT_PATH = "app.application:build"

LONGEST_STREAM_S = 3600
"""Each change of replicas reloads HAProxy, and a reload cuts streams older than this, in seconds."""

SILENT_CLIENT_S = 60
"""HAProxy disconnects a client that should send its request or read its answer but does neither for this many
seconds. Waiting for an answer does not count."""

PATIENCE = {
    # By default Ray kills a proxy that takes longer than 5 s to start; on a busy machine it does.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}

ONE_LOOP = {
    # By default, Serve runs a deployment's code in a separate thread from its HTTP and gRPC servers. Passing an
    # event between the two costs an ingress more than everything else, and an engine a third (docs/channel.md),
    # and events that slow clients have not read accumulate between them without a bound.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""Environment of all replicas; one of their own would have Ray load twice in them."""

SELDOM = {
    # By default each replica and each router exports Serve's own metrics ten times a second, read or not.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
}

INLINED = {
    # Results and arguments above this many bytes go to Ray's object store, by default those above 100 KiB, as
    # some of each deploy and of each replica's start are. A store whose file system is full kills Ray's node
    # process, and with it all replicas of the node. A call carries up to 10 MiB.
    "RAY_max_direct_call_object_size": str(8 * 2**20),
}

HAPROXY_ENVIRONMENT = {
    HAPROXY: "1",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_S),
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(SILENT_CLIENT_S),
    # An ingress that leaves fails HAProxy's checks at once, though it answers for a while. By default a second
    # failure 0.25 s later puts it out of use, even where HAProxy has yet to hear of its successor.
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_FASTINTER": "4s",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_RISE": "1",  # or an ingress that recovers waits for 4 s, too
    # Serve restarts a dead HAProxy after three failed checks, 10 s apart by default; until then none connects.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "3",
}


def full_shm_warning(environ: Mapping[str, str] = os.environ) -> str | None:
    """What a process of Serve with these variables is to log at its start; ``None`` if all is well."""
    missing = [f"{name}={value}" for name, value in INLINED.items() if name not in environ]
    if not missing:
        return None
    return (
        f"a full /dev/shm will end Ray on its node, with all replicas there: set {', '.join(missing)} as in "
        "serve_config.yaml, run `serve shutdown`, and deploy again; or export it before `ray start` and "
        "`serve run` (docs/deployment.md)"
    )


def controller_environment() -> dict[str, str]:
    """Environment variables of the Serve controller, which its replicas inherit.

    A running cluster ignores the environment of the shell that deploys, so they go into ``controller_options``.
    HAProxy needs Linux.
    """
    proxy = HAPROXY_ENVIRONMENT if haproxy_expected() else {}
    return {**PATIENCE, **ONE_LOOP, **SELDOM, **INLINED, **proxy}


def haproxy_expected() -> bool:
    """Whether Ray can run HAProxy on this platform."""
    return sys.platform == "linux"


def haproxy_mended(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process's Serve runs HAProxy through ``app/launch/haproxy.py``."""
    return (
        Path((os.environ if environment is None else environment).get(haproxy.BINARY, "")).name == haproxy.NAME
    )


def deploy_config(args: Mapping[str, Any], launch: LaunchOptions | None = None) -> dict[str, Any]:
    """What ``serve deploy`` reads, with the application's options ``args``."""
    launch = launch or LaunchOptions()
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": launch.host, "port": launch.port},
        "controller_options": {"runtime_env": {"env_vars": controller_environment()}},
        "applications": [
            {"name": APP_NAME, "route_prefix": "/", "import_path": IMPORT_PATH, "args": dict(args)},
        ],
    }
