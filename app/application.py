"""The Ray Serve application: ``serve run app.application:build`` and ``serve deploy`` start here."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException

from app import config
from app.config import AppConfig, ServedModel, haproxy_enabled
from app.deployment_version import version_of, with_version
from app.launch import placement, serving
from app.launch.model_check import check_models
from app.scaling_deployment import replicas_options
from engine.errors import ConfigError

INGRESS = "ingress"
MAX_ONGOING = 100_000
"""High enough that Serve's limit never applies: the engine queues, and each channel is an ongoing request."""

WAIT_LOOP_S = 0.2
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


class DeployError(ConfigError, RayServeException):  # type: ignore[misc]
    """The application cannot be deployed. Serve shows such an error without a traceback."""


def build(args: dict[str, Any]) -> Application:
    """The application with the options in ``args``; ``app/option_groups.py`` declares them.

    Serve runs this before it replaces anything, so everything that can be checked is checked here.

    Raises:
        DeployError: one line that names each wrong option, or what the cluster lacks for it.
    """
    return build_with(args, None)


def build_with(
    args: dict[str, Any],
    replica_class: type | None,
    tries: Mapping[str, int] | None = None,
    *,
    warn: bool = True,
) -> Application:
    """``build``, with another class for the engine replicas if given.

    Args:
        tries: how often Serve has given up starting each model, by name.
        warn: whether to log warnings about the options; a launcher that has loaded them has done so.

    Raises:
        DeployError: see ``build``.
    """
    try:
        return _checked(args, replica_class, tries, warn)
    except ConfigError as error:
        raise DeployError(str(error)) from None


def _checked(
    args: dict[str, Any], replica_class: type | None, tries: Mapping[str, int] | None, warn: bool
) -> Application:
    config.refuse_launch_options(args)
    options = config.load(args, warn=warn)
    check_router(options)
    models = config.served_models(options)
    placement.check_gpus(models, placement.cluster_nodes())
    room = check_models(models)
    placement.warn_of_lack(models, *placement.nodes_and_free(), placement.running_replicas())
    warn_of_serve()
    return assemble(options, replica_class, room, tries)


def warn_of_serve() -> None:
    """Warn of what this process's Serve was started without; it reads such settings only when it starts."""
    if serving.haproxy_expected() and not haproxy_enabled():
        logger.warning(
            "Serve was started without HAProxy, so responses pass through its slower built-in proxy; run "
            "`serve shutdown`, then `serve deploy serve_config.yaml`"
        )
    elif haproxy_enabled() and not serving.haproxy_mended():
        logger.warning(
            "Serve's HAProxy keeps running requests whose clients have left, and lets idle connections lock "
            "others out; before `ray start`, set RAY_SERVE_HAPROXY_BINARY_PATH to what `which quire-haproxy` "
            "prints (docs/deployment.md)"
        )


def check_router(options: AppConfig) -> None:
    """Reject a router that cannot be imported here; a failed deployment would be less clear.

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


def assemble(
    options: AppConfig,
    replica_class: type | None = None,
    room: bool = True,
    tries: Mapping[str, int] | None = None,
) -> Application:
    """All deployments, bound; ``replica_class`` is ``EngineReplica`` unless given.

    ``room``: whether nodes have the memory for one engine more. ``tries``: see ``build_with``.
    """
    from app.ingress import Ingress, IngressReplica

    ingress = Ingress.options(
        name=INGRESS,
        num_replicas=options.ingress.ingress_replicas,
        max_surge_percent=100,
        ray_actor_options={"num_cpus": 0},
        logging_config={"enable_access_log": False},  # it names the route, "/", and not the path
        user_config={},  # None would keep Serve from calling reconfigure()
        **_common_options(options),
    )
    ingress = with_version(ingress, version_of(options, "ingress", IngressReplica))
    models = config.served_models(options)
    nodes, free = placement.nodes_and_free()
    surges = placement.surge_percents(models, nodes, free) if room else [0] * len(models)
    engines = {}
    for model, surge in zip(models, surges, strict=True):
        if nodes and not surge:
            logger.warning(
                "there is no room for an additional engine replica%s, so a deploy stops old ones before new "
                "ones start%s",
                f" of {model.name}" if model.one_of_several else "",
                ", including the only one" if model.options.scaling.upper_limit == 1 else "",
            )
        deployment = engine_deployment(model, replica_class, nodes, surge)
        if tries and model.name in tries:
            # Serve gives a deployment that it has given up another try only if something of it changes.
            deployment = deployment.options(max_ongoing_requests=MAX_ONGOING + tries[model.name])
        engines[model.name] = deployment.bind(model)
    return ingress.bind(options, engines)


def engine_deployment(
    model: ServedModel,
    replica_class: type | None = None,
    nodes: Sequence[placement.Resources] = (),
    surge: int = 0,
) -> Any:
    """The deployment of a model's engines, not bound yet; ``surge`` is in percent. See ``assemble``."""
    from app.replica import EngineReplica

    replica_class = replica_class or EngineReplica
    options = model.options
    deployment = serve.deployment(replica_class).options(
        name=model.deployment,
        **replicas_options(options.scaling),
        max_surge_percent=surge,
        ray_actor_options=placement.actor_options(model, nodes),
        logging_config={"enable_access_log": False},  # there is a beat each second
        request_router_config=RequestRouterConfig(request_router_class=config.ROUTERS[options.ingress.routing]),
        user_config=options.user_config(),
        **_common_options(options),
    )
    return with_version(deployment, version_of(options, "engine", replica_class))


def _common_options(options: AppConfig) -> dict[str, Any]:
    return {
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_timeout_s": options.service.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": WAIT_LOOP_S,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
    }
