"""How to choose the tokens of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import InvalidRequestError, shown
from engine.structured_output import StructuredOutput

GREEDY_BELOW = 1e-5
"""Temperatures below this choose the most likely token."""

MAX_SEED = 2**63 - 1
MAX_STOP_TOKEN_IDS = 128
MAX_SEQUENCES = 64


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
        ignore_eos: continue past the model's end-of-sequence tokens.
        n: sequences to return, 1 to 64; the prompt is computed once for all of them.
        best_of: sequences to draw, of which the ``n`` with the highest mean log probability are returned.
        use_beam_search: search for the likeliest sequences instead of drawing; needs temperature 0 or 1 and no
            filter.
        beam_width: beams to keep, at least ``n``; ``None`` takes ``best_of`` or ``n``.
        length_penalty: exponent of the length that a finished beam's summed log probability is divided by.
        early_stopping: end as soon as there are ``beam_width`` finished beams; ``False`` continues while a
            running beam looks better than the worst of them, ``"never"`` while any could become better.
        structured_output: what every sequence must match; not with beam search.
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
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    structured_output: StructuredOutput | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _int_range("max_tokens", self.max_tokens, 1, None)
        _int_range("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {shown(self.min_tokens)} but must be at most max_tokens "
                f"({shown(self.max_tokens)})",
                "min_tokens",
            )
        _float_range("temperature", self.temperature, 0.0, 2.0)
        _int_range("top_k", self.top_k, 0, None)
        _float_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _float_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _int_range("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        _boolean("ignore_eos", self.ignore_eos)
        stops = self.stop_token_ids
        if not isinstance(stops, tuple | list | set | frozenset):
            raise InvalidRequestError(
                f"stop_token_ids is {shown(stops)} but must be a list of token ids", "stop_token_ids"
            )
        if len(stops) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(stops)} entries but at most {MAX_STOP_TOKEN_IDS} are allowed",
                "stop_token_ids",
            )
        for token in stops:
            _int_range("stop_token_ids", token, 0, None)
        object.__setattr__(self, "stop_token_ids", tuple(stops))
        if self.structured_output is not None and not isinstance(self.structured_output, StructuredOutput):
            raise InvalidRequestError(
                f"structured_output is {shown(self.structured_output)} but must be a StructuredOutput",
                "structured_output",
            )
        self._check_sequences()

    def _check_sequences(self) -> None:
        _int_range("n", self.n, 1, MAX_SEQUENCES)
        for name in ("best_of", "beam_width"):
            if getattr(self, name) is not None:
                _int_range(name, getattr(self, name), self.n, MAX_SEQUENCES)
        _boolean("use_beam_search", self.use_beam_search)
        _float_range("length_penalty", self.length_penalty, -10.0, 10.0)
        if not isinstance(self.early_stopping, bool | str) or self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError(
                f"early_stopping is {shown(self.early_stopping)} but must be true, false or 'never'",
                "early_stopping",
            )
        if not self.use_beam_search:
            if self.beam_width is not None:
                raise InvalidRequestError(
                    f"beam_width is {self.beam_width} but use_beam_search is not true; set it, or leave "
                    "beam_width out",
                    "beam_width",
                )
            return
        if self.structured_output is not None:
            raise InvalidRequestError(
                "structured_output is given but use_beam_search is true, and beams are not held to a form; "
                "leave one of them out",
                "structured_output",
            )
        if self.temperature not in (0.0, 1.0):
            raise InvalidRequestError(
                f"temperature is {self.temperature!r} but beam search draws nothing; it must be 0 or 1",
                "temperature",
            )
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(self, name) != off:
                raise InvalidRequestError(
                    f"{name} is {getattr(self, name)!r} but beam search filters nothing; leave it out", name
                )

    @property
    def width(self) -> int:
        """Sequences that run at once when the prompt is computed."""
        if self.use_beam_search and self.beam_width is not None:
            return self.beam_width
        return self.n if self.best_of is None else self.best_of

    @property
    def ranked(self) -> bool:
        """Whether results come at the end, best first, instead of token by token."""
        return self.use_beam_search or self.width > self.n

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
        raise InvalidRequestError(f"{name} is {shown(value)} but must be an integer, {bound}", name)


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {shown(value)} but must be true or false", name)


def _float_range(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    bound = f"{'above' if open_low else 'at least'} {low:g} and at most {high:g}"
    wrong = not isinstance(value, int | float) or isinstance(value, bool)
    if not wrong:
        assert isinstance(value, int | float)
        wrong = value != value or value > high or value < low or (open_low and value <= low)
    if wrong:
        raise InvalidRequestError(f"{name} is {shown(value)} but must be a number, {bound}", name)
