"""A request to the engine, its limits, and its results."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import InvalidRequestError, counted, shown
from engine.sampling_params import SamplingParams
from engine.token_logprobs import TokenLogprobs

if TYPE_CHECKING:
    from engine.structured.grammar import Grammar

MAX_PRIORITY = 2**31
"""Magnitude of a request's priority."""


MAX_PROMPT_SCORES = 2**19
"""Log probabilities of prompt tokens that one request may ask for."""


class FinishReason(enum.StrEnum):
    """Why a request ended; the first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """The root of a prefix tree: blocks are shared only within equal namespaces.

    The engine adds its own model revision, dtype and block size; these parts come with the request. ``tenant``
    is set by the server, never by the client, whose own ``salt`` can only divide a tenant's blocks further.
    """

    adapter: str = ""
    tenant: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits for requests; sent from each engine replica to the ingress."""

    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    num_blocks: int
    block_size: int

    @property
    def max_tokens(self) -> int:
        """Longest sequence that can ever run: the context length, or what the whole pool holds."""
        return min(self.max_model_len, self.pool_tokens)

    @property
    def pool_tokens(self) -> int:
        """What the whole pool holds."""
        return self.num_blocks * self.block_size

    def longest_prompt(self, output: int) -> int:
        """Longest prompt with ``output`` more tokens; the pool has a place for one even where none is made."""
        return min(self.max_model_len - output, self.pool_tokens - max(output, 1))


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asks for. Immutable: the scheduler's :class:`Sequence` holds what changes.

    A request that moved here from another replica carries the tokens generated so far at the end of
    ``token_ids`` and their number in ``generated_before``: positions, ``max_tokens``, ``min_tokens`` and random
    draws continue as if it had never moved. If it asks for several sequences (``params.width`` above 1),
    ``token_ids`` is the prompt alone and ``outputs`` holds what each sequence has generated so far (``None``
    for one that has ended).
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    namespace: CacheNamespace = field(default_factory=CacheNamespace)
    priority: int = 0  # lower runs first
    arrival: float = 0.0  # monotonic seconds; 0 lets the engine stamp it
    generated_before: int = 0
    outputs: tuple[tuple[int, ...] | None, ...] = ()
    client: str = ""  # who gets a fair share
    grammar: Grammar | None = field(default=None, compare=False)  # of ``params.structured_output``, compiled


COMPUTATION = "the request's computation"
"""How the error of a request begins whose computation raised; the error's own text follows behind a colon."""


class RequestStats(NamedTuple):
    """What an engine reports about a request with its first token, and about each sequence at its end.

    Where sequences are ranked, also every so many tokens, and with the results: ``generated`` is the number of
    tokens so far, in all sequences, also those that are not returned.

    The times are ``None`` where they are not known, as of all sequences but the first: a request counts once.
    """

    queue_s: float | None = None  # as ``LatencyStats`` counts them
    prefill_s: float | None = None
    preemptions: int = 0  # of the sequence, here
    generated: int = 0


@dataclass(slots=True)  # not frozen: one is made for each token, and that would cost twice as much
class TokenDelta:
    """What one step generated for one sequence of a request. Treat as frozen.

    ``index`` is the offset of the first token in the sequence's whole output (tokens made on earlier
    replicas count). A delta with a ``finish_reason`` is the sequence's last one and may carry no token;
    ``final`` says that it is the request's last one, too. Where sequences are ranked (beam search, ``best_of``
    above ``n``) each result comes as one delta at the end, the best one as sequence 0; deltas before that carry
    nothing but ``stats``. If such a request is aborted or fails, each sequence that was live ends under its own
    number, which may be ``n`` or higher.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens that the prefix cache supplied, exact
    error: str | None = None  # with FinishReason.ERROR
    sequence: int = 0
    final: bool = False
    score: float | None = None  # of a ranked result; higher is better
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of each token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = (
        None  # from its second token on; in one delta of a request
    )
    stats: RequestStats | None = None


def check(request: Request, limits: ModelLimits) -> int:
    """Check the types, values, and sizes of ``request``; return the longest length it may reach, in tokens.

    What passes cannot fail later because of what the caller gave.

    Raises:
        InvalidRequestError: names the parameter, the value, and what it must be.
    """
    if not isinstance(request, Request):
        raise InvalidRequestError(f"the request is {shown(request)} but must be a Request")
    check_text("request_id", request.request_id)
    if not isinstance(request.params, SamplingParams):
        raise _wrong("params", request.params, "SamplingParams")
    namespace = request.namespace
    if not isinstance(namespace, CacheNamespace):
        raise _wrong("namespace", namespace, "a CacheNamespace")
    for name in ("adapter", "tenant", "salt"):
        check_text(f"namespace.{name}", getattr(namespace, name))
    if type(request.priority) is not int or abs(request.priority) > MAX_PRIORITY:
        raise _wrong("priority", request.priority, f"an integer between {-MAX_PRIORITY} and {MAX_PRIORITY}")
    if type(request.arrival) not in (int, float) or not abs(request.arrival) < math.inf:
        raise _wrong("arrival", request.arrival, "a finite number of seconds")
    longest = validate(request.token_ids, request.params, limits, request.generated_before)
    if not isinstance(request.outputs, tuple):
        raise _wrong("outputs", request.outputs, "a tuple")
    for output in request.outputs:
        if output is not None:
            if not isinstance(output, tuple):
                raise _wrong("outputs", output, "a tuple of token ids for each sequence")
            _check_token_ids(output, limits, "outputs")
    return longest


def validate(
    token_ids: list[int], params: SamplingParams, limits: ModelLimits, generated_before: int = 0
) -> int:
    """Check a request against the model and the pool; return the longest length it may reach, in tokens.

    Raises:
        InvalidRequestError: names the parameter, the value and the limit.
    """
    if not isinstance(token_ids, list):
        raise _wrong("prompt", token_ids, "a list of token ids")
    if not token_ids:
        raise InvalidRequestError("the prompt is empty; at least 1 token is needed", "prompt", "empty_prompt")
    _check_token_ids(token_ids, limits, "prompt")
    if type(generated_before) is not int or not 0 <= generated_before < len(token_ids):
        raise _wrong("generated_before", generated_before, f"an integer from 0 to {len(token_ids) - 1}")
    for name, largest in params.largest_ids():
        if largest >= limits.vocab_size:
            raise InvalidRequestError(
                f"{name} has {shown(largest)}, outside the vocabulary; ids go from 0 to "
                f"{limits.vocab_size - 1}",
                name,
            )
    return check_size(len(token_ids) - generated_before, params, limits)


def check_prompt_scores(prompt: int, params: SamplingParams) -> None:
    """Whether so many log probabilities of ``prompt`` tokens may be returned; each takes about 70 bytes.

    Raises:
        InvalidRequestError: they are too many.
    """
    if params.prompt_logprobs is None:
        return
    scores = prompt * (params.prompt_logprobs + 1)
    if scores > MAX_PROMPT_SCORES:
        raise InvalidRequestError(
            f"{prompt} prompt tokens with {params.prompt_logprobs} alternatives each are {scores} log "
            f"probabilities of the prompt, but at most {MAX_PROMPT_SCORES} are returned; ask for fewer "
            "alternatives, or send a shorter prompt",
            "prompt_logprobs",
        )


def check_size(prompt: int, params: SamplingParams, limits: ModelLimits) -> int:
    """The part of :func:`validate` that depends on the length of the prompt, in tokens, but not on its tokens.

    Raises:
        InvalidRequestError: prompt and output exceed the context length or the pool, or too much is asked of
            the prompt's tokens.
    """
    check_prompt_scores(prompt, params)
    wanted = params.max_tokens
    total = prompt + (1 if wanted is None else wanted)
    if total > limits.max_model_len:
        asked = "no room to generate" if wanted is None else f"max_tokens {shown(wanted)}"
        raise InvalidRequestError(
            f"prompt of {counted(prompt, 'token')} with {asked} exceeds the context length of "
            f"{limits.max_model_len} tokens",
            "max_tokens" if wanted is not None and prompt < limits.max_model_len else "prompt",
            "context_length_exceeded",
        )
    if max(total, prompt + 1) > limits.pool_tokens:
        raise InvalidRequestError(
            f"prompt of {counted(prompt, 'token')} with {1 if wanted is None else wanted} more can never fit "
            f"the KV pool of {limits.pool_tokens} tokens ({limits.num_blocks} blocks of "
            f"{limits.block_size}); raise kv_memory or shorten the request",
            "prompt",
            "kv_pool_exceeded",
        )
    longest = limits.max_tokens if wanted is None else total
    if params.use_beam_search:
        _check_beams_fit(prompt, longest, params.width, limits)
    return longest


def _check_token_ids(token_ids: Sequence[int], limits: ModelLimits, param: str) -> None:
    """Each is an ``int`` itself and in the vocabulary. At C speed: there may be a hundred thousand."""
    if set(map(type, token_ids)) - {int}:
        place, token = next((i, t) for i, t in enumerate(token_ids) if type(t) is not int)
        raise InvalidRequestError(
            f"the token id at index {place} is {shown(token)}, a {type(token).__name__}, but must be an int",
            param,
        )
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        token = next(t for t in token_ids if not 0 <= t < limits.vocab_size)
        raise InvalidRequestError(
            f"token id {shown(token)} is outside the vocabulary; ids go from 0 to {limits.vocab_size - 1}",
            param,
        )


def check_text(name: str, value: object, param: str | None = None) -> None:
    """Refuse ``value`` unless it is text that can be encoded; ``param`` is the parameter if it is not ``name``.

    Raises:
        InvalidRequestError: it is not.
    """
    if not isinstance(value, str):
        raise _wrong(name, value, "a string", param)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(name, value, "text without lone surrogates", param) from None


def _wrong(name: str, value: object, must_be: str, param: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {shown(value)} but must be {must_be}", param or name)


def _check_beams_fit(prompt: int, longest: int, width: int, limits: ModelLimits) -> None:
    """Beams advance in lockstep: all must fit at once, sharing no more than the full blocks of the prompt."""
    shared = prompt // limits.block_size
    needed = shared + width * (-(-longest // limits.block_size) - shared)
    if needed > limits.num_blocks:
        raise InvalidRequestError(
            f"{width} beams of up to {longest} tokens may need {needed} KV blocks of {limits.block_size} "
            f"tokens but the pool has {limits.num_blocks}; lower beam_width or max_tokens, or raise kv_memory",
            "beam_width",
            "kv_pool_exceeded",
        )
