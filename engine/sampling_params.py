"""How to choose the tokens of one request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

from engine.errors import InvalidRequestError, shown
from engine.structured_output import StructuredOutput

GREEDY_BELOW = 1e-5
"""Temperatures below this choose the most likely token."""

MAX_SEED = 2**63 - 1
MAX_STOP_TOKEN_IDS = 128
MAX_SEQUENCES = 64
MAX_LOGPROBS = 20
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MAX_BIAS = 100.0
MAX_BIAS_ENTRIES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 256
MAX_ALLOWED_TOKEN_IDS = 1 << 18


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated on creation; every error names the parameter and its limit.

    What changes a row's logits does so in this order, that of vLLM's sampler: ``allowed_token_ids``, forbidden
    tokens (``bad_words``, ``min_tokens``), ``logit_bias``, ``repetition_penalty``, ``frequency_penalty`` and
    ``presence_penalty``, then temperature, min-p, top-k and top-p. Where every token is forbidden, the sequence
    ends with the finish reason ``LENGTH``.

    Attributes:
        max_tokens: most tokens to generate; ``None`` means up to the context length. 0 computes the prompt
            alone, for ``prompt_logprobs``.
        min_tokens: no end-of-sequence or stop token is chosen before this many.
        temperature: 0 (greedy) to 2.
        top_k: keep this many most likely tokens; 0 or -1 keeps all.
        top_p: keep the most likely tokens whose probabilities reach this sum, in (0, 1].
        min_p: keep tokens at least this share as likely as the most likely one, in [0, 1].
        seed: key of the random draws; the same (seed, position) draws the same on any device.
            ``None`` or -1 lets the engine choose one.
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
        presence_penalty: -2 to 2, subtracted once from the logit of each token that the output has, as OpenAI
            defines it.
        frequency_penalty: -2 to 2, subtracted as many times as the output has the token (OpenAI).
        repetition_penalty: 0.01 to 100; logits above 0 of tokens in prompt or output are divided by it, others
            multiplied (CTRL, arXiv:1909.05858, as transformers and vLLM have it). 1 changes nothing.
        logit_bias: -100 to 100, added to the logits of up to 1,024 tokens (OpenAI); a mapping, or pairs.
        bad_words: up to 256 sequences of token ids that the output must not contain: the last token of one is
            forbidden where the output ends with those before it (vLLM).
        allowed_token_ids: the only tokens that may be chosen; ``None`` allows all.
        logprobs: return the log probability of each chosen token, and the 0 to 20 likeliest tokens there. Log
            probabilities are those of the raw logits, before everything that these parameters change.
        prompt_logprobs: the same for each token of the prompt but the first.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, off, meaning in (("top_k", -1, 0), ("seed", -1, None)):
            value = getattr(self, name)
            if type(value) is int and value == off:  # what clients of other engines send for "off"
                object.__setattr__(self, name, meaning)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _int_range(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.max_tokens is not None:
            _int_range("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0, None)
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
        self._check_edits()
        self._check_sequences()

    def _check_edits(self) -> None:
        """What changes logits."""
        _float_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _float_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        low = 1 / MAX_REPETITION_PENALTY
        _float_range("repetition_penalty", self.repetition_penalty, low, MAX_REPETITION_PENALTY)
        if self.logit_bias:
            object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        elif self.logit_bias != ():
            object.__setattr__(self, "logit_bias", ())
        if self.bad_words:
            object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        elif self.bad_words != ():
            object.__setattr__(self, "bad_words", ())
        if self.allowed_token_ids is not None:
            allowed = tuple(
                dict.fromkeys(_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS))
            )
            if not allowed:
                raise InvalidRequestError(
                    "allowed_token_ids is empty, so no token could be chosen; leave it out to allow all",
                    "allowed_token_ids",
                )
            object.__setattr__(self, "allowed_token_ids", tuple(dict.fromkeys(allowed)))

    def _check_sequences(self) -> None:
        _int_range("n", self.n, 1, MAX_SEQUENCES)
        for name in ("best_of", "beam_width"):
            if getattr(self, name) is not None:
                _int_range(name, getattr(self, name), self.n, MAX_SEQUENCES)
        _boolean("use_beam_search", self.use_beam_search)
        if self.max_tokens == 0 and self.ranked:
            raise InvalidRequestError(
                "max_tokens is 0, so there is nothing to rank; leave best_of and use_beam_search out",
                "max_tokens",
            )
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
                "structured_output is given but use_beam_search is true, and beams cannot be constrained to a "
                "form; leave one of them out",
                "structured_output",
            )
        if self.temperature not in (0.0, 1.0):
            raise InvalidRequestError(
                f"temperature is {self.temperature!r} but beam search draws nothing; it must be 0 or 1",
                "temperature",
            )
        for name, off in _NOT_WITH_BEAMS:
            if getattr(self, name) != off:
                raise InvalidRequestError(
                    f"{name} is {shown(getattr(self, name))} but beam search uses the model's probabilities "
                    "unchanged; leave it out",
                    name,
                )

    def with_seed(self, seed: int) -> SamplingParams:
        """The same with a seed in its range. The rest is not checked again: a whole vocabulary takes 20 ms."""
        other = copy(self)
        object.__setattr__(other, "seed", seed)
        return other

    def largest_ids(self) -> Iterator[tuple[str, int]]:
        """The parameters that name tokens, each with the largest id that it names."""
        if self.stop_token_ids:
            yield "stop_token_ids", max(self.stop_token_ids)
        if self.logit_bias:
            yield "logit_bias", self.bias[-1][0]
        if self.bad_words:
            yield "bad_words", max(map(max, self.bad_words))
        if self.allowed_token_ids:
            yield "allowed_token_ids", max(self.allowed_token_ids)

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as pairs, by id."""
        assert isinstance(self.logit_bias, tuple), "made one on creation"
        return self.logit_bias

    @property
    def edits_logits(self) -> bool:
        """Whether anything but ``min_tokens`` changes logits before the temperature does."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids is not None
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


_NOT_WITH_BEAMS: tuple[tuple[str, object], ...] = (
    ("top_k", 0),
    ("top_p", 1.0),
    ("min_p", 0.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
    ("logit_bias", ()),
    ("bad_words", ()),
    ("allowed_token_ids", None),
)


def _bias(given: object) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, by id."""
    if isinstance(given, Mapping):
        given = tuple(given.items())
    if not isinstance(given, tuple | list):
        raise InvalidRequestError(
            f"logit_bias is {shown(given)} but must map token ids to numbers", "logit_bias"
        )
    if len(given) > MAX_BIAS_ENTRIES:
        raise InvalidRequestError(
            f"logit_bias has {len(given)} entries but at most {MAX_BIAS_ENTRIES} are allowed", "logit_bias"
        )
    pairs: dict[int, float] = {}
    for entry in given:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise InvalidRequestError(
                f"logit_bias has the entry {shown(entry)} but must map token ids to numbers", "logit_bias"
            )
        token, bias = entry
        _int_range("logit_bias", token, 0, None)
        _float_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        pairs[token] = float(bias)
    return tuple(sorted(pairs.items()))


def _bad_words(given: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(given, tuple | list):
        raise InvalidRequestError(f"bad_words is {shown(given)} but must be lists of token ids", "bad_words")
    if len(given) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words has {len(given)} sequences of tokens but at most {MAX_BAD_WORDS} are allowed",
            "bad_words",
        )
    words = []
    for word in given:
        ids = _ids("bad_words", word, MAX_BAD_WORD_TOKENS)
        if not ids:
            raise InvalidRequestError("bad_words has an empty sequence of tokens", "bad_words")
        words.append(ids)
    return tuple(dict.fromkeys(words))


def _ids(name: str, given: object, most: int) -> tuple[int, ...]:
    """A list of token ids that others check against the vocabulary."""
    if not isinstance(given, Sequence | set | frozenset | range) or isinstance(given, str | bytes):
        raise InvalidRequestError(f"{name} is {shown(given)} but must be a list of token ids", name)
    if len(given) > most:
        raise InvalidRequestError(f"{name} has {len(given)} tokens but at most {most} are allowed", name)
    ids = tuple(given)
    if set(map(type, ids)) - {int} or min(ids, default=0) < 0:
        wrong = next(token for token in ids if type(token) is not int or token < 0)
        _int_range(name, wrong, 0, None)
    return ids


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
