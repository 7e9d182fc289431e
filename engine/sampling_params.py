"""How to choose the tokens of one request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.errors import InvalidRequestError

GREEDY_BELOW = 1e-5
"""Temperatures below this choose the most likely token."""

MAX_SEED = 2**63 - 1
MAX_STOP_TOKEN_IDS = 128


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated on creation; every error names the parameter and its limit.

    Attributes:
        max_tokens: most tokens to generate; ``None`` means up to the context length.
        min_tokens: no end-of-sequence or stop token is chosen before this many.
        temperature: 0 (greedy) to 2.
        top_k: keep this many most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens whose probabilities reach this sum, in (0, 1].
        min_p: keep tokens at least this share as likely as the most likely one, in [0, 1].
        seed: key of the random draws; the same (seed, position) draws the same on any device.
            ``None`` lets the engine choose one.
        stop_token_ids: tokens that end the request, besides the model's own end-of-sequence tokens.
        ignore_eos: go on past the model's end-of-sequence tokens.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = field(default=())
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _int_range("max_tokens", self.max_tokens, 1, None)
        _int_range("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens} but must be at most max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        _float_range("temperature", self.temperature, 0.0, 2.0)
        _int_range("top_k", self.top_k, 0, None)
        _float_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _float_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _int_range("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries but at most "
                f"{MAX_STOP_TOKEN_IDS} are allowed",
                "stop_token_ids",
            )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _int_range("stop_token_ids", token, 0, None)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < GREEDY_BELOW


def _int_range(name: str, value: object, low: int, high: int | None) -> None:
    bound = f"at least {low}" if high is None else f"between {low} and {high}"
    wrong = not isinstance(value, int) or isinstance(value, bool)
    if not wrong:
        assert isinstance(value, int)
        wrong = value < low or (high is not None and value > high)
    if wrong:
        raise InvalidRequestError(f"{name} is {value!r} but must be an integer, {bound}", name)


def _float_range(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    bound = f"{'above' if open_low else 'at least'} {low:g} and at most {high:g}"
    wrong = not isinstance(value, int | float) or isinstance(value, bool)
    if not wrong:
        assert isinstance(value, int | float)
        wrong = not math.isfinite(value) or value > high or value < low or (open_low and value <= low)
    if wrong:
        raise InvalidRequestError(f"{name} is {value!r} but must be a number, {bound}", name)
