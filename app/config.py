"""Options as users give them, read and checked: one tree of the groups that ``app/option_groups.py`` declares.

Users write flat names: ``option=value`` after ``python -m app`` and ``serve run``, ``args`` of a Serve config
file, and ``QUIRE_<OPTION>`` in the environment, which wins. Words are accepted for numbers (``"2"``), sizes
(``"2GiB"``), and switches (``"true"``); ``"auto"`` stands for "not given".
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from app import model_entries
from app.disk_room import WATCHED
from app.option_groups import (
    Deployment,
    Group,
    IngressOptions,
    LaunchOptions,
    ScalingOptions,
    ServiceOptions,
)
from app.wrong_values import must_be
from engine.config import EngineConfig, EngineOptions
from engine.errors import ConfigError, nearest, shown
from engine.sizes import parse_bytes

ENV_PREFIX = "QUIRE_"

CACHE_SECRET = "QUIRE_CACHE_SECRET"
"""Variable with a secret of up to 64 bytes, the same for all ingresses; tenants' digests are keyed with it."""

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
"""Variable of the Serve controller and its replicas: "1" if HAProxy stands before the ingresses."""

RAY_COLLECTS = "QUIRE_RAY_COLLECTS"
"""Variable that is "0" in a server whose Ray has no agents that collect metrics: then nothing is passed to Ray.
An ingress with 32 streams would spend 6% of its processor time on it."""

OTHER_VARIABLES = (
    "QUIRE_CACHE",
    "QUIRE_HAPROXY_",
    "QUIRE_KEYS",
    "QUIRE_URL",
    "QUIRE_LOAD_",
    "QUIRE_PEERS",
    RAY_COLLECTS,
    WATCHED,
)
"""Environment variables, or their prefixes, that other parts of Quire read."""

CLIENT_KEY = "QUIRE_API_KEY"
"""Variable with the API key of Quire's own clients. It is not an option, although its name resembles one."""

ROUTERS: dict[str, str] = {
    "prefix": "app.routing.router:EngineRouter",
    "least_tokens": "app.routing.router:EngineRouter",
    "round_robin": "app.routing.router:EngineRouter",
    "power_of_two": "app.routing.router:PowerOfTwoRouter",
    "prefix_affinity": "app.routing.ray_policies:PrefixAffinityRouter",
}
"""The router class for each value of ``routing``."""

logger = logging.getLogger(__name__)

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
    """What the declaration of an option says. ``optional``: ``"auto"`` is accepted and means ``None``.

    ``aliases`` has other names of values, in lower case, and the values that they mean. ``form`` describes
    a text that has to match a pattern.
    """

    name: str
    group: str
    default: Any
    description: str
    live: bool
    policy: bool
    restarts: tuple[Deployment, ...]
    optional: bool
    size: bool
    aliases: Mapping[str, str]
    form: str

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
                aliases=schema.get("aliases", {}),
                form=schema.get("form", ""),
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


def load(
    args: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None, *, warn: bool = True
) -> AppConfig:
    """The options in ``args``, by flat names, overridden by the environment.

    Variables that are not options are ignored with a warning: Kubernetes sets some, such as ``QUIRE_PORT``, for
    a service called quire. For the same reason the environment sets no launch option. Without ``warn``,
    nothing is logged: for a caller that loads the same options again.

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
        if option is not None and option.group != "launch":
            values[option.name] = value
        elif warn:
            logger.warning("%s", _ignored(variable))
    config = _validate(values)
    of_each = [without_effect(model.options, values) for model in served_models(config)]
    unused = [name for name in of_each[0] if all(name in of_model for of_model in of_each)]
    if unused and warn:
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


def haproxy_enabled() -> bool:
    """Whether HAProxy stands before the ingresses of this process's Serve."""
    return os.environ.get(HAPROXY) == "1"


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
    """Replace ``"auto"``, words for sizes, aliases, and several models; pydantic reads all other words."""
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
    return option.aliases.get(value.lower(), value)


def _ignored(variable: str) -> str:
    """That a variable of the environment has no effect, and what would have one."""
    name = variable.removeprefix(ENV_PREFIX).lower()
    if name in OPTIONS:
        return f"{variable} in the environment is ignored: only the command line sets {name}"
    meant = nearest(name, [option.name for option in OPTIONS.values() if option.group != "launch"])
    hint = f"; did you mean {ENV_PREFIX}{meant.upper()}?" if meant else ""
    return f"{variable} in the environment sets no option and is ignored{hint}"


def _unknown(names: list[str], options: Iterable[str]) -> str:
    return f"unknown option{'s' if len(names) > 1 else ''} {', '.join(names)}; {did_you_mean(names, options)}"


def did_you_mean(names: list[str], options: Iterable[str]) -> str:
    """The options nearest to ``names``, which are none; all options if none is near."""
    options = sorted(options)
    meant = [close for name in names if (close := nearest(name, options))]
    if meant:
        return f"did you mean {', '.join(meant)}? docs/options.md has them all"
    return f"options: {', '.join(options)}"


def _explain(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors: option, value, limit."""
    if error["type"] == "value_error":  # of a whole group: names its options itself
        return str(error["ctx"]["error"])
    name = error["loc"][-1]
    return f"{name}={shown(error['input'])}: {must_be(error, OPTIONS[name].form)}"
