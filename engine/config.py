"""Options of one engine: each is declared once, with its default, bounds, and meaning.

The metadata of a field has the keys of pydantic's ``Field``, so the application validates the same declarations
with pydantic; the engine itself runs without it.
"""

# ruff: noqa: RUF009  (option() makes a dataclass field)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from engine.errors import ConfigError, shown
from engine.sizes import parse_bytes

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
WeightsOption = Literal["auto", "model", "int8", "int4"]
RecoveryOption = Literal["auto", "swap", "recompute"]


DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp32": "float32",
}
"""Other usual names of data types."""


def option(
    default: Any,
    description: str,
    *,
    size: bool = False,
    aliases: Mapping[str, str] | None = None,
    **bounds: float,
) -> Any:
    """A field with its meaning and its limits.

    Args:
        size: whether the value is a number of bytes, which users may write as ``"2GiB"``.
        aliases: other names of values, in lower case, and the values that they mean.
        bounds: any of ``ge``, ``gt``, and ``le``.
    """
    extra = {**({"size": True} if size else {}), **({"aliases": dict(aliases)} if aliases else {})}
    return field(default=default, metadata={"description": description, "json_schema_extra": extra, **bounds})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Engine: data types, KV memory, and scheduling."""

    dtype: Dtype = option(
        "auto",
        "Data type of weights and KV: `bfloat16`, `float16`, or `float32`; also `bf16`, `half`, `fp16`, "
        "`float`, or `fp32`. `auto`: the checkpoint's",
        aliases=DTYPE_ALIASES,
    )
    weights: WeightsOption = option(
        "auto",
        "Format of matrices on a CPU: `model`, in `dtype`; `int8`; or `int4`. `auto`: 4 bits if the "
        "checkpoint's matrices came from 4-bit codes, which are then kept exactly; otherwise, with "
        "`dtype=float32`, and on CPUs with AMX, `dtype`",
    )
    device: str = option("auto", "`cpu` or `cuda`. `auto`: CUDA if there is a GPU")
    kernels: str = option("auto", "Kernels: `cpu`, `triton`, or `reference`. `auto`: by device")
    block_size: int = option(16, "Tokens in one KV block", ge=1, le=4096)
    kv_memory: int | None = option(
        None,
        "Size of one engine's KV pool, such as `2GiB`. `auto`: on a GPU, what `memory_fraction` leaves after "
        "the weights; on a CPU, a bounded share of the free memory",
        size=True,
        ge=1,
    )
    num_blocks: int | None = option(None, "Size of the KV pool in blocks; overrides `kv_memory`", ge=1)
    memory_fraction: float = option(0.9, "Share of a GPU's memory for weights and KV", gt=0, le=1)
    max_model_len: int | None = option(
        None, "Maximum length of a sequence (prompt plus output), in tokens. `auto`: the model's", ge=1
    )
    max_num_seqs: int = option(
        256,
        "Maximum number of sequences in one step; at most `token_budget`, or three quarters of it if it was "
        "measured",
        ge=1,
    )
    token_budget: int | None = option(
        None,
        "Maximum number of tokens in one step. `auto`: measured at startup so that a step takes about 100 ms "
        "on a CPU",
        ge=1,
    )
    prefix_caching: bool = option(True, "Share KV blocks between requests with equal prefixes")
    swap_space: int | None = option(
        None,
        "Host memory for the KV of preempted requests, such as `2GiB`. `auto`: on a GPU, a quarter of the free "
        "RAM, at most 4 GiB; on a CPU, none, because a larger `kv_memory` does more",
        size=True,
        ge=0,
    )
    recovery: RecoveryOption = option(
        "auto",
        "How a preempted request gets its KV back: `swap`, `recompute`, or `auto`, whichever has the lower "
        "estimated time",
    )
    speculation: int | None = option(
        None,
        "Maximum number of tokens to guess for a sequence in one step, from its own text; 0 turns speculation "
        "off. `auto`: 15. Only as many are guessed as are expected to save time",
        ge=0,
        le=63,
    )
    priority_aging: float | None = option(
        None,
        "Seconds of waiting that offset one level of a request's `priority`. `auto`: waiting never offsets "
        "priority",
        gt=0,
    )
    seed: int = option(0, "Seed from which the engine derives the seeds of requests that have none")
    check_invariants: bool = option(False, "Verify the block pool after every step (slow)")
    check_at_idle: bool = option(False, "Verify all bookkeeping whenever the engine becomes idle")

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for declared in fields(self):
            value = getattr(self, declared.name)
            extra = declared.metadata.get("json_schema_extra", {})
            if isinstance(value, str) and ("size" in extra or "aliases" in extra):
                value = parse_bytes(value) if "size" in extra else extra["aliases"].get(value.lower(), value)
                object.__setattr__(self, declared.name, value)
            _check(declared.name, value, hints[declared.name], declared.metadata)
        if self.recovery == "swap" and self.swap_space == 0:
            raise ConfigError("recovery=swap needs a swap_space above 0; set swap_space")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineOptions):
    """How to run one model on one device.

    Raises:
        ConfigError: an option is out of range; one line with the option, its value, and the limit.
    """

    model: str  # folder with config.json and *.safetensors
    memory_sharers: int = option(
        1, "Engines on this machine, including this one; on a CPU each takes its share of the memory", ge=1
    )
    num_threads: int | None = option(None, "CPU threads. `None`: all cores", ge=1)


_TYPE_WORDS = {str: "text", bool: "true or false", int: "an integer", float: "a number", NoneType: "None"}


def _check(name: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> None:
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    if get_origin(hint) is Literal:
        if not isinstance(value, str) or value not in get_args(hint):
            raise ConfigError(f"{name}={shown(value)}: must be one of {', '.join(get_args(hint))}")
        return
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        words = " or ".join(_TYPE_WORDS[kind] for kind in kinds)
        raise ConfigError(f"{name}={shown(value)}: must be {words}")
    if value is None:
        return
    if "ge" in limits and not value >= limits["ge"]:
        raise ConfigError(f"{name}={shown(value)}: must be at least {limits['ge']}")
    if "gt" in limits and not value > limits["gt"]:
        raise ConfigError(f"{name}={shown(value)}: must be above {limits['gt']}")
    if "le" in limits and not value <= limits["le"]:
        raise ConfigError(f"{name}={shown(value)}: must be at most {limits['le']}")
