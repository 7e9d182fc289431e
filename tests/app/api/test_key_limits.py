"""Limits of a key: rates refill evenly, live requests are counted, refusals say when to try again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.errors import ApiError
from app.api.key_limits import KeyLimits, TokenBucket
from app.api.keys import ApiKey
from engine.errors import InvalidRequestError

DIGEST = "0" * 64


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def refusal(limits: KeyLimits) -> tuple[str, int | None]:
    with pytest.raises(ApiError) as caught:
        limits.admit()
    fault = caught.value.fault
    assert (fault.status, fault.code, fault.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    return fault.message, fault.retry_after_s


def test_requests_per_minute_are_refilled_evenly() -> None:
    clock = Clock()
    limits = KeyLimits(ApiKey(id="a", sha256=DIGEST, requests_per_minute=6), 1.0, clock)
    for _ in range(6):
        limits.admit()
    assert refusal(limits) == (
        "the key 'a' has reached its limit of 6 requests a minute (requests_per_minute); try again in 10 s",
        10,
    )
    clock.now = 10.0
    limits.admit()
    refusal(limits)


def test_tokens_are_charged_at_the_end_and_may_overdraw() -> None:
    clock = Clock()
    limits = KeyLimits(ApiKey(id="a", sha256=DIGEST, tokens_per_minute=60), 1.0, clock)
    limits.admit()
    limits.release(90)
    message, seconds = refusal(limits)
    assert "60 tokens a minute (tokens_per_minute)" in message
    assert seconds == 31  # 30 to come back to zero, 1 for one token
    clock.now = 31.0
    limits.admit()


def test_requests_at_the_same_time_are_counted() -> None:
    limits = KeyLimits(ApiKey(id="a", sha256=DIGEST, concurrent_requests=2))
    limits.admit()
    limits.admit()
    assert "2 requests at the same time (concurrent_requests)" in refusal(limits)[0]
    limits.release(5)
    limits.admit()


def test_each_ingress_enforces_its_share_and_reports_it() -> None:
    limits = KeyLimits(
        ApiKey(id="a", sha256=DIGEST, requests_per_minute=60, tokens_per_minute=100), 0.5, Clock()
    )
    limits.admit()
    limits.release(40)
    assert dict(limits.headers()) == {
        b"x-ratelimit-limit-requests": b"30",
        b"x-ratelimit-remaining-requests": b"29",
        b"x-ratelimit-reset-requests": b"2.0s",
        b"x-ratelimit-limit-tokens": b"50",
        b"x-ratelimit-remaining-tokens": b"10",
        b"x-ratelimit-reset-tokens": b"48.0s",
    }
    assert KeyLimits(ApiKey(id="a", sha256=DIGEST)).headers() == []


def test_a_share_of_less_than_one_request_a_minute_is_still_a_rate() -> None:
    """Two requests a minute, divided among four ingresses: each admits one in two minutes."""
    clock = Clock()
    limits = KeyLimits(ApiKey(id="a", sha256=DIGEST, requests_per_minute=2), 0.25, clock)
    limits.admit()
    assert refusal(limits)[1] == 120
    assert dict(limits.headers())[b"x-ratelimit-limit-requests"] == b"1"
    clock.now = 120.0
    limits.admit()


@pytest.mark.parametrize(
    ("before", "used", "after", "left"),
    [
        (100, 30, 100, 70),  # unchanged
        (100, 30, 1000, 700),
        (1000, 900, 10, 1),
        (100, 100, 200, 0),
        (100, 150, 200, -100),  # in 30 s it is zero, as before
        (None, 30, 100, 100),
        (100, 30, None, None),
    ],
)
def test_of_another_limit_the_same_share_remains(
    before: int | None, used: int, after: int | None, left: float | None
) -> None:
    clock = Clock()
    limits = KeyLimits(ApiKey(id="a", sha256=DIGEST, tokens_per_minute=before), 1.0, clock)
    limits.admit()
    limits.release(used)
    limits.change(ApiKey(id="a", sha256=DIGEST, tokens_per_minute=after, requests_per_minute=5))
    assert limits.requests is not None
    assert limits.requests.level() == 5
    assert limits.tokens is None or limits.tokens.level() == pytest.approx(left)
    assert (limits.tokens is None) == (left is None)


def test_a_change_of_limits_is_no_refill() -> None:
    clock = Clock()
    limits = KeyLimits(ApiKey(id="a", sha256=DIGEST, requests_per_minute=6), 0.5, clock)
    for _ in range(3):
        limits.admit()
    for most in (60, 6) * 5:
        limits.change(ApiKey(id="a", sha256=DIGEST, requests_per_minute=most))
        assert limits.requests is not None
        assert limits.requests.level() == 0
    clock.now = 20.0
    limits.admit()
    refusal(limits)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 500)), max_size=30))
def test_a_bucket_never_gives_more_than_its_rate(steps: list[tuple[float, float]]) -> None:
    """What is taken only while the level is positive stays within rate × time + one bucket + one overdraft."""
    clock = Clock()
    bucket = TokenBucket(60.0, clock)
    taken = largest = 0.0
    for passed, units in steps:
        clock.now += passed
        if bucket.wait_s(1.0) == 0:
            bucket.take(units)
            taken += units
            largest = max(largest, units)
        assert taken <= clock.now + 60.0 + largest + 1e-6
        assert bucket.level() <= 60.0


def test_streams_are_counted_apart_from_other_requests() -> None:
    limits = KeyLimits(ApiKey(id="a", sha256=DIGEST, concurrent_streams=1))
    limits.admit(stream=True)
    limits.admit()
    with pytest.raises(ApiError, match=r"1 streams at the same time \(concurrent_streams\)"):
        limits.admit(stream=True)
    limits.release(2)
    with pytest.raises(ApiError, match="concurrent_streams"):
        limits.admit(stream=True)
    limits.release(2, stream=True)
    limits.admit(stream=True)


@pytest.mark.parametrize(
    ("prompt", "asked", "allowed"),
    [(60, 40, 40), (60, None, 40), (99, None, 1), (60, 41, None), (100, None, None)],
)
def test_a_context_is_prompt_and_output(prompt: int, asked: int | None, allowed: int | None) -> None:
    limits = KeyLimits(ApiKey(id="a", sha256=DIGEST, max_context_tokens=100))
    if allowed is not None:
        assert limits.context(prompt, asked) == allowed
    else:
        with pytest.raises(InvalidRequestError, match=r"exceeds the 100 tokens .*max_context_tokens"):
            limits.context(prompt, asked)
    assert KeyLimits(ApiKey(id="a", sha256=DIGEST)).context(prompt, asked) == asked


def test_a_long_number_is_not_printed_whole() -> None:
    limits = KeyLimits(ApiKey(id="a", sha256=DIGEST, max_context_tokens=100))
    with pytest.raises(InvalidRequestError, match=r"with an integer of 13288 bits more exceeds"):
        limits.context(1, 10**4000)


def test_one_token_is_singular() -> None:
    limits = KeyLimits(ApiKey(id="a", sha256=DIGEST, max_context_tokens=1))
    with pytest.raises(InvalidRequestError, match=r"^a prompt of 1 token with 1 more exceeds the 1 token that"):
        limits.context(1, None)


def test_a_check_takes_nothing() -> None:
    limits = KeyLimits(ApiKey(id="a", sha256="0" * 64, requests_per_minute=1, concurrent_requests=1))
    limits.check()
    limits.check()
    limits.admit()
    with pytest.raises(ApiError, match="concurrent_requests"):
        limits.check()
    limits.release(0)
    with pytest.raises(ApiError, match="requests_per_minute"):
        limits.check()
