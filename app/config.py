"""Every option of the application: one tree of typed groups, each group for one part of the system.

Users write flat names: ``option=value`` after ``python -m app`` and ``serve run``, ``args`` of a Serve config
file, and ``QUIRE_<OPTION>`` in the environment, which wins. Words are accepted for numbers (``"2"``), sizes
(``"2GiB"``), and switches (``"true"``); ``"auto"`` stands for "not given".

To add an option, declare it in its group; options of the engine itself are in ``engine/config.py``. Then run
``python -m app.options_page > docs/options.md``.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, model_validator
from pydantic.config import JsonDict

from app import model_entries
from app.logs import LogFormat, LogLevel
from engine.config import EngineConfig, EngineOptions
from engine.errors import ConfigError, shown
from engine.models.folders import BUNDLED_NAME
from engine.sizes import parse_bytes

ENV_PREFIX = "QUIRE_"
MAX_REPLICAS = 10_000
MAX_SCALING_S = 500_000.0
"""Maximum of the scaling policy's times: Serve's controller must never find one out of range."""

CACHE_SECRET = "QUIRE_CACHE_SECRET"
"""Variable with a secret of up to 64 bytes, the same for all ingresses; tenants' digests are keyed with it."""

OTHER_VARIABLES = ("QUIRE_CACHE", "QUIRE_HAPROXY_", "QUIRE_KEYS", "QUIRE_URL", "QUIRE_LOAD_", "QUIRE_PEERS")
"""Prefixes of environment variables that other parts of Quire read."""

CLIENT_KEY = "QUIRE_API_KEY"
"""Variable with the API key of Quire's own clients. It is not an option, although its name resembles one."""

ScalingPolicy = Literal["kv_demand", "occupancy"]
Routing = Literal["prefix", "least_tokens", "round_robin", "power_of_two", "prefix_affinity"]
ToolParser = Literal["auto", "none", "hermes", "llama3_json", "mistral", "pythonic"]
ReasoningParser = Literal["auto", "none", "think", "mistral"]

ROUTERS: dict[str, str] = {
    "prefix": "app.routing.router:EngineRouter",
    "least_tokens": "app.routing.router:EngineRouter",
    "round_robin": "app.routing.router:EngineRouter",
    "power_of_two": "app.routing.router:PowerOfTwoRouter",
    "prefix_affinity": "app.routing.ray_policies:PrefixAffinityRouter",
}
"""The router class for each value of ``routing``."""

logger = logging.getLogger(__name__)


Deployment = Literal["ingress", "engine"]

LIVE_GROUPS: dict[Deployment, tuple[str, ...]] = {"ingress": ("service", "ingress"), "engine": ("service",)}
"""Groups whose live options each deployment applies, in its ``reconfigure``."""

RESTARTED: dict[str, tuple[Deployment, ...]] = {
    "service": ("ingress", "engine"),
    "ingress": ("ingress",),
    "engine": ("engine",),
    "scaling": ("engine",),
}
"""Deployments whose replicas a change restarts, by the option's group; a declaration may override it."""

OF_ONE_MODEL = ("model", "tool_parser", "reasoning_parser")
"""Options that an entry of ``models`` may set besides those of the groups engine and scaling."""

ENGINE_DEPLOYMENT = "engine"
"""Name of the engine deployment. With several models, each has its own, whose name begins with this one."""

ARGS = "args"
"""Key of ``user_config`` under which the application's builder passes engines the options that restart none."""


def option(
    default: Any,
    description: str,
    *,
    live: bool = False,
    policy: bool = False,
    restarts: tuple[Deployment, ...] | None = None,
    **limits: Any,
) -> Any:
    """The declaration of an option; ``limits`` are those of pydantic's ``Field``.

    Args:
        live: a deployment applies it in ``reconfigure``. A change of ``args`` restarts ingresses all the same.
        policy: only the scaling policy reads it, so it has no effect on a fixed number of replicas.
        restarts: the deployments whose replicas a change restarts; by default those of its group.
    """
    restarted = None if restarts is None else list[JsonValue](restarts)
    extra: JsonDict = {"live": live, "policy": policy, "restarts": [] if live else restarted}
    return Field(default=default, description=description, json_schema_extra=extra, **limits)


class Group(BaseModel):
    """Options that concern one part of the system; immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ServiceOptions(Group):
    """Service: options that concern every process."""

    model: str = option(BUNDLED_NAME, "The built-in model, a Hugging Face folder, or a Hugging Face Hub ID")
    models: list[model_entries.Entry] | None = option(
        None,
        "Several models for one server: a mapping from names to options, or a YAML file that contains one; "
        "requests choose by `model`. See [models](models.md#several-models-on-one-server). `auto`: one, "
        "`model`",
        restarts=("ingress",),
    )
    served_model_name: str | None = option(
        None, "Name that clients send as `model`. `auto`: the last part of `model`", restarts=("ingress",)
    )
    log_level: LogLevel = option("INFO", "`DEBUG`, `INFO`, `WARNING`, or `ERROR`", live=True)
    log_format: LogFormat = option(
        "text",
        "`text`, or `json` for one object per line with time, level, process, logger, and message",
        live=True,
    )
    drain_timeout_s: float = option(
        600.0, "Maximum time that a replica may take to stop, in seconds", restarts=("ingress",), gt=0
    )
    stuck_after_s: float = option(
        10.0,
        "Replace an engine replica that has work but makes no progress, not even one layer of a step, for this "
        "long, in seconds; slow steps extend it",
        restarts=(),
        gt=0,
    )

    @property
    def logging(self) -> tuple[LogLevel, LogFormat]:
        """Level and format for ``logs.configure``."""
        return self.log_level, self.log_format

    @property
    def model_name(self) -> str:
        """What clients send as ``model``."""
        return self.served_model_name or os.path.basename(os.path.normpath(self.model))


class IngressOptions(Group):
    """Ingress: HTTP, routing, and overload control."""

    ingress_replicas: int = option(1, "Number of HTTP front ends", ge=1, le=MAX_REPLICAS)
    replicas_per_ingress: int | None = option(
        None,
        "Number of engines to which each ingress opens channels (it may open a few more); see "
        "[routing](routing.md#ingresses-with-a-part-of-the-fleet). `auto`: all",
        ge=1,
    )
    routing: Routing = option(
        "prefix",
        "How the ingress chooses an engine: `prefix` minimizes the estimated cost in seconds, taking cached "
        "prefixes into account; `least_tokens`, `round_robin`, and Ray Serve's own `power_of_two` and "
        "`prefix_affinity` are for comparison",
    )
    max_live_choices: int = option(
        4096,
        "Return 503 beyond this number of choices in progress at one ingress",
        live=True,
        ge=1,
    )
    max_client_choices: int | None = option(
        None,
        "Return 429 beyond this number of choices of one client (see `tenant_header`) in progress at one "
        "ingress. `auto`: seven eighths of `max_live_choices`",
        live=True,
        ge=1,
    )
    max_client_tokens: int | None = option(
        None,
        "Return 429 beyond this number of prompt tokens of one client in progress at one ingress. `auto`: no "
        "limit",
        live=True,
        ge=1,
    )
    max_response_logprobs: int = option(
        2**19,
        "Return 400 for requests whose whole response could have more log probabilities of output tokens than "
        "this: prompts times sequences times `max_tokens` times (alternatives + 1). Without `max_tokens`, the "
        "output ends at the limit. Streams have no limit, except those of Responses: a quarter of this, "
        "because their last events repeat the entries",
        live=True,
        ge=1,
    )
    min_priority: int = option(
        0,
        "Lowest `priority` that clients may use; lower values run first. At 0, no client gets ahead of "
        "requests without a priority",
        live=True,
        ge=-1000,
        le=0,
    )
    max_wait_s: float | None = option(
        None,
        "Return 429 once the expected wait, even with `max_replicas` engines, has stayed above this many "
        "seconds for as many seconds. `auto`: `ttft_target_s` with `max_replicas` (but not with "
        "`scaling_shadow`), otherwise never",
        live=True,
        gt=0,
    )
    max_lag_s: float = option(
        0.5,
        "Return 429 while an ingress does not keep up: for a second, its event loop has been late, or events "
        "from engines or new requests have waited for it, by more than this many seconds",
        live=True,
        gt=0,
    )
    unavailable_after_s: float = option(
        60.0,
        "Return 503 for a request that has found no engine for this long, in seconds",
        live=True,
        gt=0,
    )
    api_keys_file: str | None = option(
        None,
        "File with the API keys of clients, on every node with an ingress; `python -m app.api.keys new NAME` "
        "makes a key. Changes take effect within two seconds. `auto`: the keys in `QUIRE_KEYS`; without any, "
        "anyone may use the server",
    )
    audit_log: str | None = option(
        None,
        "File to which each ingress appends a JSON object for every request: time, request ID, key, address, "
        "route, outcome, tokens. To rotate it, move it away. `auto`: none",
    )
    tracing_endpoint: str | None = option(
        None,
        "Address of an OpenTelemetry collector that accepts OTLP over HTTP, such as `http://collector:4318`: "
        "ingresses send it traces of requests. `OTEL_EXPORTER_OTLP_HEADERS` in the environment sets headers. "
        "`auto`: no traces",
        pattern=r"^https?://[^/\s]+(/\S*)?$",
    )
    trace_sample: float = option(
        0.01,
        "Share of requests that are traced with `tracing_endpoint`, 0 to 1. For a request with a `traceparent` "
        "header, its sender decides",
        ge=0,
        le=1,
    )
    prefix_words: bool = option(
        False,
        "Show the first words of shared prompts to anyone who may open `/dashboard`, even if neither a key nor "
        "`tenant_header` identifies their tenant. Tenants see their own in any case",
        live=True,
    )
    cors_origins: str | None = option(
        None,
        "Web origins whose pages may call the API from a browser: a comma-separated list such as "
        "`https://chat.example.com`, or `*`. `auto`: none",
        live=True,
    )
    tenant_header: str | None = option(
        None,
        "Request header that identifies the tenant, such as `x-tenant` or `authorization`. Tenants do not "
        "share cached prefixes, and get fair shares of the engines. A trusted gateway must set or check the "
        "header. `auto`: the API key is the tenant; without keys, all clients are one tenant, and those with "
        "different `authorization` or `user` get fair shares",
        live=True,
        pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$",
    )
    instance: str | None = option(
        None,
        "Name of this server in `/health` and in the response header `x-quire-instance`, which distinguishes "
        "its answers from another server's. `auto`: random, chosen when the server (on a cluster, Ray) starts",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
    )
    tool_parser: ToolParser = option(
        "auto",
        "Format of the model's tool calls: `hermes` (Hermes, Qwen), `llama3_json`, `mistral`, `pythonic` "
        "(Llama 4), or `none`. `auto`: inferred from the chat template, otherwise `hermes`",
        live=True,
    )
    reasoning_parser: ReasoningParser = option(
        "auto",
        "Format of the model's reasoning: `think` (`<think>`), `mistral` (`[THINK]`), or `none`. `auto`: "
        "inferred from the chat template",
        live=True,
    )
    admin_routes: bool = option(
        False,
        "Serve `POST /admin/reset_prefix_cache`. If there are API keys, only those with `admin` may use it; "
        "without keys, block the route at a gateway",
        live=True,
    )


class ScalingOptions(Group):
    """Scaling: the number of engines, and the CPUs of each."""

    engine_replicas: int = option(
        1,
        "Number of engines, each on its own device (on a CPU: a share of the cores). With `max_replicas`: "
        "the number at startup, at least the minimum",
        restarts=("ingress",),
        ge=1,
        le=MAX_REPLICAS,
    )
    max_replicas: int | None = option(
        None,
        "Scale the number of engines with demand, up to this many. `auto`: a fixed number, `engine_replicas`",
        restarts=("ingress",),
        ge=1,
        le=MAX_REPLICAS,
    )
    min_replicas: int | None = option(
        None,
        "Number of engines to keep when there is no work. `auto`: 1. At 0, the last engine stops, too, and the "
        "next request waits for one to start",
        restarts=("ingress",),
        ge=0,
    )
    engine_cpus: float | None = option(
        None,
        "CPUs that one engine requests from Ray. `auto`: on several nodes its share of the smallest; else it "
        "reserves none",
        ge=0,
    )
    threads: int | None = option(
        None, "CPU threads of one engine. `auto`: its share of the node's cores, at least 1", ge=1
    )
    scaling_policy: ScalingPolicy = option(
        "kv_demand",
        "`kv_demand` counts the blocks that requests hold, lack, and will need; `occupancy` counts referenced "
        "blocks only",
        restarts=(),
        policy=True,
    )
    ttft_target_s: float = option(
        2.0,
        "Target time to the first token, in seconds",
        restarts=("ingress",),
        policy=True,
        ge=0.001,
        le=MAX_SCALING_S,
    )
    tpot_target_s: float = option(
        0.05, "Target time per output token, in seconds", restarts=(), policy=True, ge=0.0001, le=MAX_SCALING_S
    )
    scaling_reserve: float = option(
        0.5,
        "Spare engines beyond what prompts need, to absorb bursts while others start",
        restarts=(),
        policy=True,
        ge=0,
        le=MAX_REPLICAS,
    )
    occupancy_target: float = option(
        0.7,
        "Target share of referenced blocks for `scaling_policy=occupancy`",
        restarts=(),
        policy=True,
        ge=0.01,
        le=1,
    )
    scale_down_after_s: float | None = option(
        None,
        "Stop an engine once it has not been needed for this long, in seconds; stop the last one once it has "
        "had no work for twice as long. `auto`: twice the measured startup time, at least 60; for the last "
        "one, 600",
        restarts=(),
        policy=True,
        ge=0.1,
        le=MAX_SCALING_S,
    )
    startup_s: float = option(
        60.0,
        "Assumed startup time of an engine, in seconds, until startups have been measured",
        restarts=("ingress",),
        policy=True,
        ge=0.1,
        le=MAX_SCALING_S,
    )
    scaling_shadow: bool = option(
        False,
        "Decide and report, but leave the number of engines unchanged",
        restarts=("ingress",),
        policy=True,
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> ScalingOptions:
        if self.max_replicas is None:
            if self.min_replicas is not None:
                raise ValueError("min_replicas needs max_replicas; without it, the number is engine_replicas")
            return self
        for name in ("min_replicas", "engine_replicas"):
            if (getattr(self, name) or 0) > self.max_replicas:
                raise ValueError(f"{name}={getattr(self, name)} exceeds max_replicas={self.max_replicas}")
        return self

    @property
    def scales(self) -> bool:
        """Whether the number of engine replicas follows demand."""
        return self.max_replicas is not None

    @property
    def upper_limit(self) -> int:
        """Maximum number of engine replicas, not counting those that are stopping."""
        return self.engine_replicas if self.max_replicas is None else self.max_replicas

    @property
    def lower_limit(self) -> int:
        """Number of engine replicas without any work."""
        if self.max_replicas is None:
            return self.engine_replicas
        return 1 if self.min_replicas is None else self.min_replicas

    @property
    def initial_replicas(self) -> int:
        """Number of engine replicas at startup."""
        return max(self.engine_replicas, self.lower_limit)

    @property
    def reachable_replicas(self) -> int:
        """Maximum that demand can bring; in shadow mode it adds none to the initial replicas."""
        return self.initial_replicas if self.scaling_shadow else self.upper_limit

    @property
    def limiting_option(self) -> str:
        """The option that sets the maximum number of engine replicas."""
        return "engine_replicas" if self.max_replicas is None else "max_replicas"

    @property
    def to_zero(self) -> bool:
        """Whether the last engine replica stops when there is no work."""
        return self.lower_limit == 0

    @property
    def startup_grace_s(self) -> float:
        """Seconds that overload control allows for replicas to start; 0 if demand starts none."""
        return 0.0 if self.scales and self.scaling_shadow else self.startup_s


class LaunchOptions(Group):
    """Launch: for `make serve` only. On a cluster, set `http_options` in `serve_config.yaml` instead."""

    host: str = option("127.0.0.1", "Address to listen on; `0.0.0.0` accepts connections from other machines")
    open_access: bool = option(False, "Allow a `host` that other machines can reach even without API keys")
    port: int = option(8000, "Port to listen on", ge=1, le=65535)
    ray_dashboard: bool = option(
        False, "Start Ray's dashboard, too, which takes several seconds of CPU time and a quarter of a GB"
    )
    tls_file: str | None = option(
        None,
        "PEM file with the certificate, its chain, and the private key; clients then connect by HTTPS. "
        "`auto`: plain HTTP",
    )


class AppConfig(Group):
    """All options. Made by :func:`load`."""

    service: ServiceOptions = ServiceOptions()
    engine: EngineOptions = EngineOptions()
    ingress: IngressOptions = IngressOptions()
    scaling: ScalingOptions = ScalingOptions()
    launch: LaunchOptions = LaunchOptions()

    @property
    def replica_wait_s(self) -> float:
        """Seconds that a request waits for an engine; covers a startup if there may be no engine at all."""
        wait = self.ingress.unavailable_after_s
        return max(wait, 2.0 * self.scaling.startup_s) if self.scaling.to_zero else wait

    @property
    def max_wait_s(self) -> float:
        """Expected wait above which overload control refuses new requests; infinite if it refuses none."""
        if self.ingress.max_wait_s is not None:
            return self.ingress.max_wait_s
        scaling = self.scaling
        return scaling.ttft_target_s if scaling.scales and not scaling.scaling_shadow else math.inf

    def engine_config(
        self, folder: str, num_threads: int, replicas_on_a_node: int | None = None
    ) -> EngineConfig:
        """Options of one engine for the model in ``folder``.

        Its pool is a share of the machine's memory: by default of as many replicas as there may be.
        """
        return EngineConfig(
            model=folder,
            num_threads=num_threads,
            memory_sharers=replicas_on_a_node or self.scaling.upper_limit,
            **dataclasses.asdict(self.engine),
        )

    def user_config(self) -> dict[str, Any]:
        """The ``user_config`` of engine replicas: all options that they apply without a restart.

        Also those at their defaults, so that one that was taken back has its default again.
        """
        values = {
            name: getattr(self.service, name)
            for name, option in OPTIONS.items()
            if option.group == "service" and "engine" not in option.restarts
        }
        return {ARGS: values}

    def fixed(self, deployment: Deployment) -> dict[str, Any]:
        """The options whose change restarts the replicas of a deployment; with several models, each one's."""
        values = {
            name: getattr(getattr(self, option.group), name)
            for name, option in OPTIONS.items()
            if deployment in option.restarts
        }
        if values.get("models"):
            values["models"] = [model.options.fixed(deployment) for model in served_models(self)]
        return values

    def with_live(self, user_config: Mapping[str, Any], deployment: Deployment) -> AppConfig:
        """These options with a deployment's ``user_config``; live options that it lacks keep their values.

        Raises:
            ConfigError: one line that names each option that is wrong, or that this deployment does not apply.
        """
        given = dict(user_config)
        base = self.model_dump(exclude_unset=True)
        values = given.pop(ARGS, {})
        live = [name for name, option in OPTIONS.items() if deployment in option.live_in]
        fixed = [name for name in given if name not in live]
        if fixed:
            raise ConfigError(
                f"user_config of {deployment} cannot change {', '.join(map(str, fixed))}; its live options: "
                f"{', '.join(live)}; set all others under args"
            )
        return _validate({**values, **given}, base)


class LiveOptions:
    """One replica's current options: those at its start, as changed by its ``user_config``."""

    def __init__(self, initial: AppConfig, deployment: Deployment) -> None:
        self._initial = initial
        self._deployment = deployment
        self.current: AppConfig | None = None  # none before the first update

    def update(self, user_config: Mapping[str, Any]) -> AppConfig:
        """Apply a ``user_config``. In a running replica, an invalid one is logged and changes nothing.

        Serve replaces a replica whose ``reconfigure`` raises, so a typo would take the service down.

        Raises:
            ConfigError: it is invalid at startup, so that the deployment fails and says why.
        """
        try:
            self.current = self._initial.with_live(user_config, self._deployment)
        except ConfigError as error:
            if self.current is None:
                raise
            logger.error("the new user_config has no effect: %s", error)
        return self.current


@dataclass(frozen=True, slots=True)
class Option:
    """What the declaration of an option says. ``optional``: ``"auto"`` is accepted and means ``None``."""

    name: str
    group: str
    default: Any
    description: str
    live: bool
    policy: bool
    restarts: tuple[Deployment, ...]
    optional: bool
    size: bool

    @property
    def of_one_model(self) -> bool:
        """Whether each of several models may have its own value."""
        return self.group in ("engine", "scaling") or self.name in OF_ONE_MODEL

    @property
    def live_in(self) -> tuple[Deployment, ...]:
        """Deployments whose ``user_config`` changes it without a restart."""
        return tuple(name for name, groups in LIVE_GROUPS.items() if self.live and self.group in groups)


def _declared() -> dict[str, Option]:
    found = {}
    for group, field in AppConfig.model_fields.items():
        assert field.annotation is not None
        for name, schema in TypeAdapter[Any](field.annotation).json_schema()["properties"].items():
            found[name] = Option(
                name,
                group,
                schema["default"],
                schema["description"],
                live=schema.get("live", False),
                policy=schema.get("policy", False),
                restarts=_restarts(group, schema),
                optional=any(choice.get("type") == "null" for choice in schema.get("anyOf", ())),
                size=schema.get("size", False),
            )
    return found


def _restarts(group: str, schema: Mapping[str, Any]) -> tuple[Deployment, ...]:
    if schema.get("live"):
        # While an ingress reconfigures, Serve takes it from HAProxy; a successor answers all the time.
        return ("ingress",) if group in LIVE_GROUPS["ingress"] else ()
    declared = schema.get("restarts")
    return RESTARTED.get(group, ()) if declared is None else tuple(declared)


OPTIONS = _declared()
"""Every option by name, in the order of the groups."""


def load(args: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> AppConfig:
    """The options in ``args``, by flat names, overridden by the environment.

    Variables that are not options are ignored with a warning: Kubernetes sets some, such as ``QUIRE_PORT``, for
    a service called quire. For the same reason the environment sets no launch option.

    Raises:
        ConfigError: one line that names each wrong option.
    """
    values: dict[str, Any] = {str(name): value for name, value in (args or {}).items()}
    for variable, value in (os.environ if environment is None else environment).items():
        if not variable.startswith(ENV_PREFIX) or variable.startswith(OTHER_VARIABLES):
            continue
        if variable == CLIENT_KEY:
            continue
        option = OPTIONS.get(variable.removeprefix(ENV_PREFIX).lower())
        if option is None or option.group == "launch":
            logger.warning("%s in the environment sets no option and is ignored", variable)
        else:
            values[option.name] = value
    config = _validate(values)
    of_each = [without_effect(model.options, values) for model in served_models(config)]
    unused = [name for name in of_each[0] if all(name in of_model for of_model in of_each)]
    if unused:
        logger.warning(
            "%s %s no effect without max_replicas", ", ".join(unused), "have" if len(unused) > 1 else "has"
        )
    return config


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of a server: its name, the options of its engines, and the deployment that they are.

    ``neighbors`` has the maximum number of engine replicas of each other model.
    """

    name: str
    options: AppConfig
    deployment: str = ENGINE_DEPLOYMENT
    neighbors: tuple[int, ...] = ()
    one_of_several: bool = False


def served_models(config: AppConfig) -> tuple[ServedModel, ...]:
    """The models, at least one; the first serves requests that name none.

    Raises:
        ConfigError: an entry of ``models`` is wrong; one line that names each option.
    """
    service = config.service
    if service.models is None:
        return (ServedModel(service.model_name, config),)
    given = [name for name in ("model", "served_model_name") if name in service.model_fields_set]
    if given:
        raise ConfigError(
            f"{' and '.join(given)} cannot be combined with models: each entry has its own name and model"
        )
    base = config.model_dump(exclude_unset=True)
    del base["service"]["models"]
    options, problems = {}, []
    for entry in service.models:
        name = entry["name"]
        try:
            options[name] = _options_of(entry, base)
        except ConfigError as error:
            problems.append(f"models: {name}: {error}")
    if problems:
        raise ConfigError("; ".join(problems))
    return tuple(
        ServedModel(
            name,
            own,
            deployment_of(name),
            tuple(other.scaling.upper_limit for key, other in options.items() if key != name),
            True,
        )
        for name, own in options.items()
    )


def deployment_of(model: str) -> str:
    """The engine deployment of one of several models: Serve allows no slashes, and names of files need care."""
    safe = re.sub("[^A-Za-z0-9._-]", lambda match: f"~{ord(match[0]):02x}", model)
    return f"{ENGINE_DEPLOYMENT}-{safe}"


def _options_of(entry: model_entries.Entry, base: Mapping[str, Mapping[str, Any]]) -> AppConfig:
    """The options of one model: the application's, ``base``, with those of its ``entry``."""
    own = {name: value for name, value in entry.items() if name != "name"}
    shared = [name for name in own if name in OPTIONS and not OPTIONS[name].of_one_model]
    unknown = [name for name in own if name not in OPTIONS]
    if unknown:
        raise ConfigError(_unknown(unknown, [name for name, option in OPTIONS.items() if option.of_one_model]))
    if shared:
        raise ConfigError(
            f"{', '.join(shared)} cannot differ between models; set {'them' if len(shared) > 1 else 'it'} for "
            "the whole application"
        )
    config = _validate({"model": entry["name"], **own, "served_model_name": entry["name"]}, base)
    unused = without_effect(config, own)
    if unused:
        raise ConfigError(f"{', '.join(unused)} need{'s' if len(unused) == 1 else ''} max_replicas")
    return config


def refuse_launch_options(args: Mapping[str, Any]) -> None:
    """Reject launch options in ``args`` of a Serve config file, where they have no effect.

    Raises:
        ConfigError: ``args`` has one.
    """
    wrong = [name for name in args if name in LaunchOptions.model_fields]
    if wrong:
        raise ConfigError(f"args cannot set {', '.join(wrong)}; set http_options in the Serve config file")


def without_effect(config: AppConfig, given: Iterable[str]) -> list[str]:
    """Options among ``given`` that only the scaling policy reads, if the number of replicas is fixed."""
    if config.scaling.scales:
        return []
    unread = {name for name, option in OPTIONS.items() if option.policy}
    if config.ingress.max_wait_s is not None:
        unread.discard("startup_s")  # overload control reads it, too
    return [name for name in OPTIONS if name in unread.intersection(given)]


def _validate(values: Mapping[str, Any], base: Mapping[str, Mapping[str, Any]] | None = None) -> AppConfig:
    """The tree of ``base`` (group, then option) with the flat ``values`` in it."""
    tree = {group: dict((base or {}).get(group, {})) for group in AppConfig.model_fields}
    problems: list[str] = []
    unknown = []
    for name, value in values.items():
        option = OPTIONS.get(name)
        if option is None:
            unknown.append(name)
            continue
        try:
            read = _read(option, value)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if read is _NOT_GIVEN:
            tree[option.group].pop(name, None)
        else:
            tree[option.group][name] = read
    try:
        config = AppConfig.model_validate(tree)
    except ValidationError as error:
        problems += [_explain(item) for item in error.errors()]
    except ConfigError as error:  # of options that contradict each other
        problems.append(str(error))
    if unknown:  # last, since all options that there are follow
        problems.append(_unknown(sorted(unknown), OPTIONS))
    if problems:
        raise ConfigError("; ".join(problems))
    return config


_NOT_GIVEN = object()


def _read(option: Option, value: Any) -> Any:
    """Replace ``"auto"``, words for sizes, and several models; pydantic reads all other words."""
    if isinstance(value, str) and option.optional and value.lower() in ("auto", "none", ""):
        return None
    if option.name == "models" and value is not None:
        return model_entries.read_entries(value)
    if not isinstance(value, str):
        return value
    if value.lower() == "auto":
        return _NOT_GIVEN
    if option.size and value.strip() != "0":
        try:
            return parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{option.name}: {error}") from None
    return value


def _unknown(names: list[str], options: Iterable[str]) -> str:
    options = sorted(options)
    meant = [close for name in names for close in difflib.get_close_matches(name, options, n=1)]
    hint = (
        f"did you mean {', '.join(meant)}? docs/options.md has them all"
        if meant
        else f"options: {', '.join(options)}"
    )
    return f"unknown option{'s' if len(names) > 1 else ''} {', '.join(names)}; {hint}"


def _explain(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors: option, value, limit."""
    context = error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal":
            limit = f"must be at least {context['ge']:g}"
        case "greater_than":
            limit = f"must be above {context['gt']:g}"
        case "less_than_equal":
            limit = f"must be at most {context['le']:g}"
        case "literal_error":
            choices = re.findall("'([^']*)'", context["expected"])
            limit = f"must be one of {', '.join(choices)}"
        case "value_error":  # of a whole group: names its options itself
            return str(context["error"])
        case _:
            limit = error["msg"]
    return f"{error['loc'][-1]}={shown(error['input'])}: {limit}"
