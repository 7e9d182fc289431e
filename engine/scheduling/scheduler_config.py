"""What a scheduler is made with, besides its pools and policies."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.request import ModelLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much may run at once, and in which order.

    Attributes:
        max_num_seqs: maximum number of running sequences; the scheduler never runs more than ``token_budget``,
            so that all of them can decode in each step.
        token_budget: maximum number of tokens in one step.
        lone_budget: the same while there is only one sequence; ``None`` means ``token_budget``.
        priority_aging: seconds of waiting that offset one level of priority, within a client; ``None`` makes
            priority absolute, so that better priorities can delay worse ones without bound.
        look_ahead: how many waiting sequences that do not fit may be passed over in one step.
        max_overtakes: how often a waiting sequence may be overtaken; after that, nothing overtakes it.
        check_invariants: verify pool, index and state after each call (slow; for tests).

    Raises:
        ConfigError: nothing could run.
    """

    max_num_seqs: int
    token_budget: int
    lone_budget: int | None = None
    prefix_caching: bool = True
    priority_aging: float | None = None
    look_ahead: int = 8
    max_overtakes: int = 32
    check_invariants: bool = False

    def __post_init__(self) -> None:
        for name, value in (("max_num_seqs", self.max_num_seqs), ("token_budget", self.token_budget)):
            if value < 1:
                raise ConfigError(f"{name} is {value} but must be at least 1")


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What scheduling depends on in the model.

    Attributes:
        key: the properties that KV depends on (revision, dtype); part of the root of its prefix trees.
    """

    limits: ModelLimits
    key: tuple[object, ...] = ()
    eos_token_ids: Collection[int] = ()
