"""What one API key may use. One set of limits for each ingress replica."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from app.api.errors import ApiError
from app.api.keys import ApiKey
from engine.errors import InvalidRequestError, counted, shown

MINUTE_S = 60.0


class TokenBucket:
    """A rate limit: gains ``per_minute`` units in a minute, evenly, and holds as many, at least one.

    Taking may drive it below zero, since the cost of a request is known only at its end; nothing can be taken
    until it is positive again.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self.size = max(per_minute, 1.0)  # else an ingress whose share is less would never admit a request
        self._per_minute = per_minute
        self._clock = clock
        self._level = self.size
        self._at = clock()

    def changed(self, per_minute: float) -> TokenBucket:
        """One for another rate, as full as this one in proportion; so it takes as long to be full again."""
        bucket = TokenBucket(per_minute, self._clock)
        bucket._level = self.level() / self.size * bucket.size
        return bucket

    def level(self) -> float:
        """What it holds now."""
        now = self._clock()
        self._level = min(self.size, self._level + (now - self._at) * self._per_minute / MINUTE_S)
        self._at = now
        return self._level

    def take(self, units: float) -> None:
        """Take ``units``, whatever it holds."""
        self._level = self.level() - units

    def wait_s(self, units: float) -> float:
        """Seconds until it holds ``units``; 0 if it does."""
        return max(0.0, (units - self.level()) * MINUTE_S / self._per_minute)


@dataclass(slots=True)
class KeyLimits:
    """The state of one key at one ingress replica, which enforces its even share of the rates.

    It outlives a change of the key's entry (:meth:`change`), and requests that run then are still counted.
    """

    key: ApiKey
    share: float = 1.0  # of the rates: 1 / number of ingress replicas
    clock: Callable[[], float] = time.monotonic
    live: int = 0  # requests
    streams: int = 0  # of them
    requests: TokenBucket | None = field(init=False)
    tokens: TokenBucket | None = field(init=False)

    def __post_init__(self) -> None:
        self.requests = self._bucket(self.key.requests_per_minute)
        self.tokens = self._bucket(self.key.tokens_per_minute)

    def change(self, key: ApiKey) -> None:
        """``key`` is the entry from now on; of a rate that has another limit, the same share remains unused."""
        before, self.key = self.key, key
        if key.requests_per_minute != before.requests_per_minute:
            self.requests = self._bucket(key.requests_per_minute, self.requests)
        if key.tokens_per_minute != before.tokens_per_minute:
            self.tokens = self._bucket(key.tokens_per_minute, self.tokens)

    def _bucket(self, per_minute: int | None, before: TokenBucket | None = None) -> TokenBucket | None:
        if per_minute is None:
            return None
        rate = per_minute * self.share
        return TokenBucket(rate, self.clock) if before is None else before.changed(rate)

    def check(self, stream: bool = False) -> None:
        """Refuse a request that could not begin now; it takes nothing.

        Raises:
            ApiError: 429; a limit is reached, with the time after which it is not.
        """
        key = self.key
        if key.concurrent_requests is not None and self.live >= key.concurrent_requests:
            raise self._refusal(f"{self.live} requests at the same time (concurrent_requests)", 1.0)
        if stream and key.concurrent_streams is not None and self.streams >= key.concurrent_streams:
            raise self._refusal(f"{self.streams} streams at the same time (concurrent_streams)", 1.0)
        if self.requests is not None and (wait := self.requests.wait_s(1.0)) > 0:
            raise self._refusal(f"{key.requests_per_minute} requests a minute (requests_per_minute)", wait)
        if self.tokens is not None and (wait := self.tokens.wait_s(1.0)) > 0:
            raise self._refusal(f"{key.tokens_per_minute} tokens a minute (tokens_per_minute)", wait)

    def admit(self, stream: bool = False) -> None:
        """Count a request that begins; call :meth:`release` at its end.

        Raises:
            ApiError: that of :meth:`check`.
        """
        self.check(stream)
        if self.requests is not None:
            self.requests.take(1.0)
        self.live += 1
        self.streams += stream

    def release(self, tokens: int, stream: bool = False) -> None:
        """A request has ended; it cost ``tokens``, of prompt and output."""
        self.live -= 1
        self.streams -= stream
        if self.tokens is not None:
            self.tokens.take(tokens)

    def may_see(self, model: str) -> bool:
        """Whether the key may know of a model and its load; an administrator's key of all."""
        return self.key.admin or self.may_use(model)

    def may_use(self, model: str) -> bool:
        """Whether the key is for this model."""
        return self.key.models is None or model in self.key.models

    def context(self, prompt: int, max_tokens: int | None) -> int | None:
        """Output tokens for a prompt of so many tokens, within the key's longest context; ``None``: no limit.

        Raises:
            InvalidRequestError: prompt and output exceed it.
        """
        most = self.key.max_context_tokens
        if most is None:
            return max_tokens
        asked = 1 if max_tokens is None else max_tokens
        if prompt + asked > most:
            raise InvalidRequestError(
                f"a prompt of {counted(prompt, 'token')} with {shown(asked)} more exceeds the "
                f"{counted(most, 'token')} that the key {self.key.id!r} may use in one context "
                "(max_context_tokens)",
                "max_tokens" if prompt < most else "prompt",
                "context_length_exceeded",
            )
        return most - prompt if max_tokens is None else max_tokens

    def headers(self) -> list[tuple[bytes, bytes]]:
        """``x-ratelimit-*`` as OpenAI names them, for the limits that the key has."""
        found: list[tuple[bytes, bytes]] = []
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                values = {
                    "limit": str(math.floor(bucket.size)),
                    "remaining": str(max(0, math.floor(bucket.level()))),
                    "reset": f"{bucket.wait_s(bucket.size):.1f}s",
                }
                found += [(f"x-ratelimit-{what}-{name}".encode(), v.encode()) for what, v in values.items()]
        return found

    def _refusal(self, limit: str, wait_s: float) -> ApiError:
        seconds = max(1, math.ceil(wait_s))
        return ApiError(
            429,
            f"the key {self.key.id!r} has reached its limit of {limit}; try again in {seconds} s",
            code="rate_limit_exceeded",
            kind="rate_limit_error",
            retry_after_s=seconds,
        )
