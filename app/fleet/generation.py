"""The requests that the engine client accepts, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from app.fleet.fleet_limits import FleetLimits
from app.fleet.journal import Journal
from engine.errors import QuireError
from engine.request import CacheNamespace
from engine.sampling_params import SamplingParams
from engine.token_logprobs import TokenLogprobs


class UnavailableError(QuireError):
    """No engine replica accepted the request within the time limit; becomes a 503 with Retry-After."""


class CannotStartError(UnavailableError):
    """No engine replica runs, and those that Serve tried to start failed; ``why`` says why, in one line."""

    def __init__(self, why: str) -> None:
        super().__init__(f"no engine replica of this model can start: {why}")


class GenerationError(QuireError):
    """The engine failed to compute the request; becomes a 500."""


class EngineDeathsError(GenerationError):
    """Engines died while running the request, which must not be sent again."""


def ignored(sequence: int) -> None:
    """Nobody needs to know that a sequence has ended: its request has, or has not begun."""


@dataclass(slots=True, eq=False)
class TextEnd:
    """What the client's text says about a request that ends before the engine has finished it."""

    tokens: int | None = None  # in all sequences, if stop strings have ended them all
    on_sequence_end: Callable[[int], None] = ignored
    """Called with the number of a sequence that a stop string has ended while others go on."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt, and the sequences to generate from it.

    ``request_id`` is for logs; it need not be unique. ``checked`` are the limits by which it has been
    found valid: by the same ones it is not checked again, which takes milliseconds for a long prompt.
    ``take`` is the direct path to the reader: see ``Taker``.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    namespace: CacheNamespace = field(default_factory=CacheNamespace)
    priority: int = 0  # lower runs first
    client: str = ""  # who gets a fair share of the engines
    sender: str = ""  # whose budget pays for expensive work; a name that a client cannot invent
    checked: FleetLimits | None = field(default=None, compare=False)
    text_end: TextEnd = field(default_factory=TextEnd, compare=False)
    journal: Journal = field(default_factory=Journal, compare=False)
    take: Taker | None = field(default=None, compare=False)


@dataclass(slots=True)
class Delta:
    """New tokens of one sequence of a request. Nothing changes it; ``frozen`` would make construction slow.

    ``index`` is the offset of the first token in the sequence's output. Only a sequence's last delta has a
    ``finish_reason`` (``"stop"`` or ``"length"``). That delta may be empty, and with ``"stop"`` its last token
    may be the end-of-sequence or stop token. ``final`` marks the last delta of the request. ``cached_tokens``
    is the number of prompt tokens that the prefix cache supplied at the first admission. ``fingerprint``
    names the model that generates them. If the request asks for log probabilities, ``logprobs`` has those of
    the tokens, and one delta has those of the prompt, from its second token on.
    """

    token_ids: tuple[int, ...]
    finish_reason: str | None
    cached_tokens: int
    index: int
    sequence: int = 0
    final: bool = False
    fingerprint: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


Taker: TypeAlias = Callable[[Delta], bool]
"""Called with a delta while its reader waits. If it returns true, it has dealt with the delta, and the reader
waits on; otherwise it has done nothing, and the reader continues with the delta."""
