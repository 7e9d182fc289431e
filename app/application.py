"""The Ray Serve application: ``serve run app.application:build`` and ``serve deploy`` start here."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from app import config
from app.config import AppConfig
from app.launch import placement, serving
from app.routing.fleet import DEPLOYMENT
from app.scaling_deployment import replicas_options
from engine.errors import ConfigError

INGRESS = "ingress"
MAX_ONGOING = 100_000
"""High enough that Serve's limit never applies: the engine queues, and each channel is an ongoing request."""

WAIT_LOOP_S = 0.2
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


def build(args: dict[str, Any]) -> Application:
    """The application with the options in ``args``; ``app/config.py`` declares them.

    Raises:
        ConfigError: one line that names each wrong option, or what the cluster lacks for it.
    """
    config.refuse_launch_options(args)
    options = config.load(args)
    check_router(options)
    placement.check_gpus(options, placement.cluster_nodes())
    if serving.haproxy_expected() and not serving.haproxy_enabled():
        logger.warning(
            "Serve was started without HAProxy, so responses pass through its slower built-in proxy; run "
            "`serve shutdown`, then `serve deploy serve_config.yaml`"
        )
    elif serving.haproxy_enabled() and not serving.haproxy_mended():
        logger.warning(
            "Serve's HAProxy lets requests run on whose clients have left, and idle connections lock others "
            "out; set RAY_SERVE_HAPROXY_BINARY_PATH to what `which quire-haproxy` prints (docs/deployment.md)"
        )
    return assemble(options)


def check_router(options: AppConfig) -> None:
    """Refuse a router that cannot be imported here: a failed deployment would say less.

    Raises:
        ConfigError: the router needs a library that is not installed.
    """
    routing = options.ingress.routing
    try:
        importlib.import_module(config.ROUTERS[routing].partition(":")[0])
    except ImportError as error:
        raise ConfigError(
            f"routing={routing} needs parts of Ray that cannot be imported here ({error}); "
            "choose another routing"
        ) from None


def assemble(options: AppConfig, replica_class: type | None = None) -> Application:
    """Both deployments, bound; ``replica_class`` is ``EngineReplica`` unless given."""
    from app.ingress import Ingress

    ingress = Ingress.options(
        name=INGRESS,
        num_replicas=options.ingress.ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        **_common_options(options),
    )
    return ingress.bind(options, engine_deployment(options, replica_class).bind(options))


def engine_deployment(options: AppConfig, replica_class: type | None = None) -> Any:
    """The engine deployment, not bound yet; ``replica_class`` is ``EngineReplica`` unless given."""
    if replica_class is None:
        from app.replica import EngineReplica as replica_class

    return serve.deployment(replica_class).options(
        name=DEPLOYMENT,
        **replicas_options(options.scaling),
        ray_actor_options=placement.actor_options(options, placement.cluster_nodes()),
        logging_config={"enable_access_log": False},  # there is a beat each second
        request_router_config=RequestRouterConfig(request_router_class=config.ROUTERS[options.ingress.routing]),
        **_common_options(options),
    )


def _common_options(options: AppConfig) -> dict[str, Any]:
    return {
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_timeout_s": options.service.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": WAIT_LOOP_S,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "user_config": {},  # None would keep Serve from calling reconfigure()
    }
