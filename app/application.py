"""The Ray Serve application: ``serve run app.application:build`` and ``serve deploy`` start here."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from app import config, serving
from app.routing.fleet import DEPLOYMENT

INGRESS = "ingress"
MAX_ONGOING = 100_000
"""Serve's own bound stays out of the way: the engine queues, and each channel counts as an ongoing request."""

WAIT_LOOP_S = 0.2
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


def build(args: dict[str, Any]) -> Application:
    """The application with the options of ``args``; see ``AppConfig``.

    Raises:
        ConfigError: one line that names each wrong option.
    """
    options = config.load(args)
    options.engine_config("", 1)  # refuses wrong values here rather than in each replica
    if serving.haproxy_expected() and not serving.haproxy_enabled():
        logger.warning(
            "this Serve was started without HAProxy, so tokens pass through its slower stock proxy; "
            "run `serve shutdown`, then `serve deploy serve_config.yaml`"
        )
    return assemble(options)


def assemble(options: config.AppConfig, replica_class: type | None = None) -> Application:
    """Both deployments, bound; ``replica_class`` is ``EngineReplica`` unless given."""
    from app.ingress import Ingress

    live = options.live.model_dump()
    engine = engine_deployment(options, replica_class).bind(options.model_dump())
    ingress = Ingress.options(
        name=INGRESS,
        num_replicas=options.ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=options.drain_timeout_s,
        graceful_shutdown_wait_loop_s=WAIT_LOOP_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        user_config=live,
    )
    return ingress.bind(options, engine)


def engine_deployment(options: config.AppConfig, replica_class: type | None = None) -> Any:
    """The engine deployment, not bound yet; ``replica_class`` is ``EngineReplica`` unless given."""
    if replica_class is None:
        from app.replica import EngineReplica as replica_class

    return serve.deployment(replica_class).options(
        name=DEPLOYMENT,
        num_replicas=options.engine_replicas,
        ray_actor_options=actor_options(options),
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=options.drain_timeout_s,
        graceful_shutdown_wait_loop_s=WAIT_LOOP_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        logging_config={"enable_access_log": False},  # a beat each second is no news
        request_router_config=RequestRouterConfig(request_router_class="app.routing.router:EngineRouter"),
        user_config=options.live.model_dump(),
    )


def actor_options(options: config.AppConfig) -> dict[str, Any]:
    """What one engine replica asks of Ray.

    Left to itself, each actor asks for one CPU, so that an ingress and two engines never all start on two
    cores. Ours ask for their share of the smallest node: with the ingress at 0 they always fit.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    cores = min((node.get("CPU", 0.0) for node in nodes), default=float(os.cpu_count() or 1))
    on_a_node = math.ceil(options.engine_replicas / max(len(nodes), 1))
    share = max(cores, 1.0) / on_a_node
    cpus = (
        options.engine_cpus
        if options.engine_cpus is not None
        else (int(share) if share >= 1 else round(share, 3))
    )
    wants_gpu = options.device.startswith("cuda") or (
        options.device == "auto" and any(node.get("GPU", 0) for node in nodes)
    )
    return {"num_cpus": cpus, **({"num_gpus": 1} if wants_gpu else {})}
