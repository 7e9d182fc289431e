"""The Ray Serve application: ``serve run app.application:build`` and ``serve deploy`` start here."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from app import config
from app.autoscaling.deployment import replicas_options
from app.launch import placement, serving
from app.routing.fleet import DEPLOYMENT
from engine.errors import ConfigError

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
        ConfigError: one line that names each wrong option, or what the cluster lacks for it.
    """
    options = config.load(args)
    options.engine_config("", 1)  # refuses wrong values here rather than in each replica
    check_router(options)
    placement.check_gpus(options, placement.cluster_nodes())
    if serving.haproxy_expected() and not serving.haproxy_enabled():
        logger.warning(
            "this Serve was started without HAProxy, so tokens pass through its slower stock proxy; "
            "run `serve shutdown`, then `serve deploy serve_config.yaml`"
        )
    return assemble(options)


def check_router(options: config.AppConfig) -> None:
    """Refuse a router that cannot be imported here: the deployment would fail with less to go on.

    Raises:
        ConfigError: it needs a library that is not there.
    """
    module = config.ROUTERS[options.routing].partition(":")[0]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"routing={options.routing} needs parts of Ray that cannot be imported here ({error}); "
            "choose another routing"
        ) from None


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
        **replicas_options(options),
        ray_actor_options=placement.actor_options(options, placement.cluster_nodes()),
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=options.drain_timeout_s,
        graceful_shutdown_wait_loop_s=WAIT_LOOP_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        logging_config={"enable_access_log": False},  # a beat each second is no news
        request_router_config=RequestRouterConfig(request_router_class=config.ROUTERS[options.routing]),
        user_config=options.live.model_dump(),
    )
