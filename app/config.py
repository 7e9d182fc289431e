"""Every option of the application, one typed tree.

Values come from ``args`` of a Serve config file, from ``key=value`` of ``serve run`` and of ``python -m app``,
and from ``QUIRE_<NAME>`` in the environment, which wins. Words are accepted for numbers (``"2"``), sizes
(``"2GiB"``) and switches (``"true"``); ``"auto"`` stands for "not given".
"""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from app.routing.policies import Policy
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.folders import BUNDLED_NAME
from engine.sizes import parse_bytes

ENV_PREFIX = "QUIRE_"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
MOST_REPLICAS = 10_000
LONGEST_S = 500_000.0
"""Of the times that the scaling policy is given: in Serve's controller it must not find them wrong."""

_SCALING_OPTIONS = (
    *("scaling_policy", "ttft_target_s", "tpot_target_s", "scaling_reserve", "occupancy_target"),
    *("scale_down_after_s", "startup_s", "scaling_shadow"),
)

# Read elsewhere, not options of the application.
_OTHER_ENV = ("QUIRE_CACHE", "QUIRE_URL", "QUIRE_LOAD_")

logger = logging.getLogger(__name__)


def _absent(value: object) -> object:
    return None if isinstance(value, str) and value.lower() in ("auto", "none", "") else value


def _bytes(value: object) -> object:
    """Of ``"2GiB"``, ``"500MB"`` or a plain number; other types pass through to pydantic."""
    value = _absent(value)
    try:
        return parse_bytes(value) if isinstance(value, str) and value.strip() != "0" else value
    except ConfigError as error:
        raise ValueError(str(error)) from None


OptionalInt = Annotated[int | None, BeforeValidator(_absent)]
OptionalFloat = Annotated[float | None, BeforeValidator(_absent)]
OptionalStr = Annotated[str | None, BeforeValidator(_absent)]
Size = Annotated[int | None, BeforeValidator(_bytes)]


ROUTERS = {
    "prefix": "app.routing.router:EngineRouter",
    "least_tokens": "app.routing.router:EngineRouter",
    "round_robin": "app.routing.router:EngineRouter",
    "power_of_two": "app.routing.router:PowerOfTwoRouter",
    "prefix_affinity": "app.routing.ray_policies:PrefixAffinityRouter",
}
"""Choices of a replica, and the router class of each."""

SCALING_POLICIES = ("kv_demand", "occupancy")
"""Ways to set the number of engine replicas; see ``app/autoscaling``."""


class LiveOptions(BaseModel):
    """Options that change without a restart, by ``user_config`` of a deployment in the Serve config file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    log_level: str = Field("INFO", pattern=f"^({'|'.join(LOG_LEVELS)})$")
    max_live_requests: int = Field(4096, ge=1, description="more at one ingress replica are refused with a 503")


class AppConfig(BaseModel):
    """Options of the application; a change of any of them restarts the engine replicas.

    See ``EngineConfig`` for those of one engine.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = BUNDLED_NAME
    served_model_name: OptionalStr = None
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    block_size: int = Field(16, ge=1, le=4096)
    kv_memory: Size = Field(None, ge=1)
    num_blocks: OptionalInt = Field(None, ge=1)
    memory_fraction: float = Field(0.9, gt=0, le=1)
    max_model_len: OptionalInt = Field(None, ge=1)
    max_num_seqs: int = Field(256, ge=1)
    token_budget: OptionalInt = Field(None, ge=1)
    prefix_caching: bool = True
    swap_space: Size = Field(None, ge=0)
    recovery: str = "auto"
    priority_ageing: OptionalFloat = Field(None, gt=0)
    seed: int = 0
    check_invariants: bool = False
    check_at_idle: bool = False

    routing: str = Field("prefix", pattern=f"^({'|'.join(ROUTERS)})$")
    engine_replicas: int = Field(2, ge=1, le=MOST_REPLICAS)  # with max_replicas only at first
    ingress_replicas: int = Field(1, ge=1, le=MOST_REPLICAS)
    max_replicas: OptionalInt = Field(None, ge=1, le=MOST_REPLICAS)  # engine replicas follow demand
    min_replicas: OptionalInt = Field(None, ge=0)  # else 1; 0 lets the last one go
    scaling_policy: str = Field("kv_demand", pattern=f"^({'|'.join(SCALING_POLICIES)})$")
    ttft_target_s: float = Field(2.0, ge=0.001, le=LONGEST_S)
    tpot_target_s: float = Field(0.05, ge=0.0001, le=LONGEST_S)
    scaling_reserve: float = Field(1.0, ge=0, le=MOST_REPLICAS)  # replicas beyond the need
    occupancy_target: float = Field(0.7, ge=0.01, le=1)  # of KV blocks, for the policy of that name
    scale_down_after_s: float = Field(300.0, ge=0.1, le=LONGEST_S)  # of less need
    startup_s: float = Field(60.0, ge=0.1, le=LONGEST_S)  # of a replica, until starts have been seen
    scaling_shadow: bool = False  # decide and report, but leave the number alone
    max_wait_s: OptionalFloat = Field(
        None,
        gt=0,
        description="requests are refused with a 429 once new ones have had to wait longer than this for so "
        "long with as many replicas as there may be; unless given, ttft_target_s with max_replicas (but not in "
        "shadow mode), else never",
    )
    engine_cpus: OptionalFloat = Field(
        None, ge=0
    )  # Ray's num_cpus of one replica; else cores / replicas on a node
    threads: OptionalInt = Field(None, ge=1)  # of one engine; else its share of the node's cores
    log_level: str = Field("INFO", pattern=f"^({'|'.join(LOG_LEVELS)})$")
    max_live_requests: int = Field(4096, ge=1)
    unavailable_after_s: float = Field(60.0, gt=0)
    drain_timeout_s: float = Field(600.0, gt=0)
    tenant_header: OptionalStr = Field(
        None,
        pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$",
        description="header whose value names a tenant, such as x-tenant or authorization: prefixes are shared "
        "only within one. A gateway must set or check it, since whoever can choose it chooses the tenant; only "
        "its digest is kept. Without it all clients are one tenant, divided by their own cache_salt alone",
    )
    admin_routes: bool = Field(
        False,
        description="serve POST /admin/reset_prefix_cache to whoever reaches the port; keep clients from it",
    )

    @model_validator(mode="after")
    def _bounds(self) -> AppConfig:
        if self.max_replicas is None:
            if self.min_replicas is not None:
                raise ValueError("min_replicas needs max_replicas: without it their number is engine_replicas")
        elif self.least_replicas > self.max_replicas:
            least, most = self.least_replicas, self.max_replicas
            raise ValueError(f"min_replicas={least} is more than max_replicas={most}")
        return self

    @property
    def model_name(self) -> str:
        """What clients write in ``model``."""
        return self.served_model_name or os.path.basename(os.path.normpath(self.model))

    @property
    def policy(self) -> Policy:
        """How the ledger chooses; where Serve's own router does, the ledger has one candidate."""
        return Policy(self.routing) if self.routing in list(Policy) else Policy.LEAST_TOKENS

    @property
    def scales(self) -> bool:
        """Whether the number of engine replicas follows demand."""
        return self.max_replicas is not None

    @property
    def most_replicas(self) -> int:
        """Engine replicas that there may be at a time, starting and stopping ones left out."""
        return self.engine_replicas if self.max_replicas is None else self.max_replicas

    @property
    def least_replicas(self) -> int:
        """Engine replicas that there are without any work."""
        if self.max_replicas is None:
            return self.engine_replicas
        return 1 if self.min_replicas is None else self.min_replicas

    @property
    def first_replicas(self) -> int:
        """Engine replicas that a deployment starts with."""
        least = max(self.least_replicas, 1)
        if self.scales and "engine_replicas" not in self.model_fields_set:
            return least
        return min(max(self.engine_replicas, least), self.most_replicas)

    @property
    def replicas_option(self) -> str:
        """The option that says how many engine replicas there may be."""
        return "engine_replicas" if self.max_replicas is None else "max_replicas"

    @property
    def sleeps(self) -> bool:
        """Whether the last engine replica may go while there is no work."""
        return self.least_replicas == 0

    @property
    def replica_wait_s(self) -> float:
        """Seconds that a request waits for a replica; long enough for one to start where all may be gone."""
        return max(self.unavailable_after_s, 2.0 * self.startup_s) if self.sleeps else self.unavailable_after_s

    @property
    def longest_wait_s(self) -> float:
        """What admission lets a new request wait; infinite if it refuses none."""
        if self.max_wait_s is not None:
            return self.max_wait_s
        return self.ttft_target_s if self.scales and not self.scaling_shadow else math.inf

    @property
    def reachable_replicas(self) -> int:
        """Engine replicas that demand can bring; in shadow mode it brings none beyond the first."""
        return self.first_replicas if self.scaling_shadow else self.most_replicas

    @property
    def startup_grace_s(self) -> float:
        """Seconds that admission grants replicas to start; none where demand starts none."""
        return 0.0 if self.scales and self.scaling_shadow else self.startup_s

    @property
    def live(self) -> LiveOptions:
        """The first ``user_config``."""
        return LiveOptions(log_level=self.log_level, max_live_requests=self.max_live_requests)

    def engine_config(
        self, folder: str, num_threads: int, replicas_on_a_node: int | None = None
    ) -> EngineConfig:
        """Options of one engine; unless told otherwise, all replicas share its machine's memory.

        Raises:
            ConfigError: a value that the engine refuses.
        """
        return EngineConfig(
            model=folder,
            dtype=self.dtype,
            device=self.device,
            kernels=self.kernels,
            block_size=self.block_size,
            kv_memory=self.kv_memory,
            num_blocks=self.num_blocks,
            memory_sharers=replicas_on_a_node or self.most_replicas,
            memory_fraction=self.memory_fraction,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            token_budget=self.token_budget,
            prefix_caching=self.prefix_caching,
            swap_space=self.swap_space,
            recovery=self.recovery,
            priority_ageing=self.priority_ageing,
            num_threads=num_threads,
            seed=self.seed,
            check_invariants=self.check_invariants,
            check_at_idle=self.check_at_idle,
        )


def load(args: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> AppConfig:
    """The options of ``args`` (an ``AppConfig``'s fields), overridden by the environment.

    Variables that are no options are passed over with a warning: Kubernetes sets some of its own, such as
    ``QUIRE_PORT``, for a service called quire.

    Raises:
        ConfigError: one line that names each wrong option.
    """
    values: dict[str, Any] = {str(name): value for name, value in (args or {}).items()}
    for name, value in (os.environ if environment is None else environment).items():
        option = name.removeprefix(ENV_PREFIX).lower()
        if name.startswith(ENV_PREFIX) and option in AppConfig.model_fields:
            values[option] = value
        elif name.startswith(ENV_PREFIX) and not name.startswith(_OTHER_ENV):
            logger.warning("%s in the environment is no option and has no effect", name)
    unknown = sorted(set(values) - set(AppConfig.model_fields))
    if unknown:
        raise ConfigError(_unknown(unknown))
    try:
        options = AppConfig(**values)
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None
    # Not among the bounds: in what AppConfig is made of again in a replica, each option counts as given.
    if "engine_replicas" in values and options.engine_replicas > options.most_replicas:
        raise ConfigError(
            f"engine_replicas={options.engine_replicas} is more than max_replicas={options.most_replicas}"
        )
    idle = without_effect(options)
    if idle:
        have = "have" if len(idle) > 1 else "has"
        logger.warning("%s %s no effect without max_replicas", ", ".join(idle), have)
    return options


def without_effect(options: AppConfig) -> list[str]:
    """Options that were given, but that only scaling reads, where there is none."""
    if options.scales:
        return []
    # Admission grants startup_s to replicas that may be on their way, whether demand starts them or not.
    read = {"startup_s"} if options.max_wait_s is not None else set()
    return [name for name in _SCALING_OPTIONS if name in options.model_fields_set and name not in read]


def load_live(user_config: Mapping[str, Any]) -> LiveOptions:
    """The live options of a ``user_config``.

    Raises:
        ConfigError: one line that names each wrong option.
    """
    unknown = sorted(set(user_config) - set(LiveOptions.model_fields))
    if unknown:
        raise ConfigError(
            f"unknown user_config {', '.join(unknown)}; "
            f"there are: {', '.join(sorted(LiveOptions.model_fields))}"
        )
    try:
        return LiveOptions(**user_config)
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None


def set_log_level(level: str) -> None:
    """Of Quire's own loggers in this process."""
    for name in ("app", "engine", "kernels", "quire"):
        logging.getLogger(name).setLevel(level)


def _unknown(names: Sequence[str]) -> str:
    options = sorted(AppConfig.model_fields)
    meant = [close for name in names for close in difflib.get_close_matches(name, options, n=1)]
    hint = f"did you mean {', '.join(meant)}? " if meant else ""
    there = f"{hint}there are: {', '.join(options)}"
    return f"unknown option{'s' if len(names) > 1 else ''} {', '.join(names)}; {there}"


def _one_line(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        pattern = str(item.get("ctx", {}).get("pattern", ""))
        choices = pattern.startswith("^(") and pattern.endswith(")$")
        said = f"must be one of {pattern[2:-2].replace('|', ', ')}" if choices else item["msg"]
        parts.append(f"{name}={item['input']!r}: {said}" if name else said.removeprefix("Value error, "))
    return "; ".join(parts)
