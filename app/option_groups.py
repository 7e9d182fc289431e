"""Declarations of the options: typed groups, each for one part of the system.

To add an option, declare it in its group; options of the engine itself are in ``engine/config.py``. Then run
``python -m app.options_page > docs/options.md``.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic.config import JsonDict

from app import model_entries
from app.logs import LogFormat, LogLevel
from engine.models.folders import BUNDLED_NAME

MAX_REPLICAS = 10_000
MAX_CPUS = 10_000
"""More than one node has."""

MAX_SCALING_S = 500_000.0
"""Maximum of the scaling policy's times: Serve's controller must never find one out of range."""

RESOURCE_PARTS = 10_000
"""Parts of a resource that Ray tells apart: it refuses requests for less than one, with an exception."""

SMALLEST_CPU = 1 / RESOURCE_PARTS

ScalingPolicy = Literal["kv_demand", "occupancy"]
Routing = Literal["prefix", "least_tokens", "round_robin", "power_of_two", "prefix_affinity"]
ToolParser = Literal["auto", "none", "hermes", "llama3_json", "mistral", "pythonic"]
ReasoningParser = Literal["auto", "none", "think", "mistral"]

Deployment = Literal["ingress", "engine"]


def option(
    default: Any,
    description: str,
    *,
    live: bool = False,
    policy: bool = False,
    restarts: tuple[Deployment, ...] | None = None,
    form: str = "",
    **limits: Any,
) -> Any:
    """The declaration of an option; ``limits`` are those of pydantic's ``Field``.

    Args:
        live: a deployment applies it in ``reconfigure``. A change of ``args`` restarts ingresses all the same.
        policy: only the scaling policy reads it, so it has no effect on a fixed number of replicas.
        restarts: the deployments whose replicas a change restarts; by default those of its group.
        form: describes, for errors, a text that has to match a ``pattern``.
    """
    restarted = None if restarts is None else list[JsonValue](restarts)
    extra: JsonDict = {"live": live, "policy": policy, "restarts": [] if live else restarted, "form": form}
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
        "Return 429 once the expected wait, even with `max_replicas` engines, has been above this many "
        "seconds for that long. `auto`: `ttft_target_s` with `max_replicas` (but not with "
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
        form="an address that begins with http:// or https://",
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
        form="the name of a request header, without a colon",
    )
    instance: str | None = option(
        None,
        "Name of this server in `/health` and in the response header `x-quire-instance`, which distinguishes "
        "its answers from another server's. `auto`: random, chosen when the server (on a cluster, Ray) starts",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        form="1 to 64 letters, digits, and . _ -",
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
        "Scale the number of engines with demand, up to this many. `auto`: a fixed number, `engine_replicas`. "
        "Setting or removing it restarts engines, too; another number does not",
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
        "CPUs that one engine requests from Ray. `auto`: almost none; engines are spread over the nodes",
        ge=0,
        le=MAX_CPUS,
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
    def _check_cpus(self) -> ScalingOptions:
        if self.engine_cpus and self.engine_cpus < SMALLEST_CPU:
            raise ValueError(
                f"engine_cpus={self.engine_cpus:g} must be 0 or at least {SMALLEST_CPU:g}: Ray counts no less"
            )
        return self

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
        False, "Start Ray's dashboard, too, which slows down the start and takes memory"
    )
    tls_file: str | None = option(
        None,
        "PEM file with the certificate, its chain, and the private key; clients then connect by HTTPS. "
        "`auto`: plain HTTP",
    )
