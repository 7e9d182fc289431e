"""Many requests at once begin one by one, clients in turn; who would wait too long is refused instead."""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
from local_server import COUNT, LocalServer
from starlette.requests import Request

from app.api.errors import ApiError, overloaded
from app.api.request_body import BEGIN_TURNS, BodyReader
from app.fleet.ingress_lag import LOOK_EVERY_S, IngressLag
from app.fleet.loop_lag import HOLD_S
from app.fleet.overload import OverloadControl

MANY = 300
LIMIT_S, BEGIN_S = 0.5, 0.004
"""The limit of a wait, and what each begin takes, of the ingress's own clock."""


def request(client: str) -> Request:
    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps({"from": client}).encode(), "more_body": False}

    return Request({"type": "http", "headers": [(b"client", client.encode())]}, receive)


class Ingress:
    """Bodies and the lag of their ingress, under a clock that each begin lets go on."""

    def __init__(self) -> None:
        self.now, self._looked = 1000.0, 1000.0
        self.begun: list[str] = []
        self.bodies = BodyReader(lambda request: request.headers["client"], self._check, lambda: self.now)
        self.lag = IngressLag(LIMIT_S, lambda: self.bodies.wait_s, clock=lambda: self.now, rng=random.Random(1))

    def _check(self, waited_s: float) -> None:
        refusal = self.lag.begin_refusal(waited_s)
        if refusal is not None:
            raise overloaded(refusal)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self.now - self._looked >= LOOK_EVERY_S:
            self._looked = self.now
            self.lag.look(0.0)

    async def begin(self, client: str) -> float | ApiError:
        """When it has begun, in seconds since it came, or why it is refused."""
        came = self.now

        def parse(body: Any) -> None:
            self.begun.append(body["from"])
            self.pass_time(BEGIN_S)

        try:
            await self.bodies.read(request(client), parse)
        except ApiError as refusal:
            return refusal
        return self.now - came

    def come(self, client: str) -> asyncio.Task[float | ApiError]:
        return asyncio.get_running_loop().create_task(self.begin(client))


def run(test: Callable[[Ingress], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await test(Ingress())

    asyncio.run(main())


def test_a_health_check_and_another_client_overtake_many_requests() -> None:
    """Counted in requests that have begun when the others are answered, whatever these take."""

    async def test(ingress: Ingress) -> None:
        async def begin(client: str) -> int:
            await ingress.begin(client)
            return len(ingress.begun)

        async def check() -> int:
            for _ in range(10):  # turns that the server itself takes for a request that does nothing
                await asyncio.sleep(0)
            return len(ingress.begun)

        crowd = [ingress.come("greedy") for _ in range(MANY)]
        await asyncio.sleep(0)
        first, second, checked = await asyncio.gather(begin("modest"), begin("modest"), check())
        assert first <= 5
        assert second <= first + 2
        assert checked <= 3
        await asyncio.gather(*crowd)
        assert len(ingress.begun) == MANY + 2

    run(test)


def test_clients_that_connect_and_leave_one_by_one_do_not_begin() -> None:
    """As with a loop that accepts one in each turn, and learns a few later that its client has left."""

    async def test(ingress: Ingress) -> None:
        gone: deque[asyncio.Task[float | ApiError]] = deque()
        for _ in range(MANY):
            gone.append(ingress.come("greedy"))
            await asyncio.sleep(0)
            if len(gone) > 7:
                gone.popleft().cancel()
        assert len(ingress.begun) <= MANY / BEGIN_TURNS + 1
        for one in gone:
            one.cancel()

    run(test)


def test_a_short_crowd_begins_whole() -> None:
    async def test(ingress: Ingress) -> None:
        waits = await asyncio.gather(*(ingress.come("greedy") for _ in range(MANY)))
        assert max(float(wait) for wait in waits if not isinstance(wait, ApiError)) > 2 * LIMIT_S
        assert len(ingress.begun) == MANY

    run(test)


def test_a_long_crowd_waits_no_longer_than_it_may_and_nobody_else_is_refused() -> None:
    count = 10 * MANY  # 12 s of begins

    async def test(ingress: Ingress) -> None:
        crowd = [ingress.come("greedy") for _ in range(count)]
        while not ingress.lag.behind:  # noqa: ASYNC110  (begins let its clock go on)
            await asyncio.sleep(0)
        late, modest = ingress.come("greedy"), ingress.come("modest")
        refusal = await late
        assert isinstance(refusal, ApiError)  # before any of the crowd that still waits
        assert not all(one.done() for one in crowd)
        assert not isinstance(await modest, ApiError)
        answers = await asyncio.gather(*crowd)
        waits = [answer for answer in answers if not isinstance(answer, ApiError)]
        assert HOLD_S < max(waits) < LIMIT_S + HOLD_S + 3 * LOOK_EVERY_S
        refusals = [answer.fault for answer in answers if isinstance(answer, ApiError)]
        assert len(refusals) == count - len(waits) > count / 2
        for fault in (refusal.fault, refusals[0]):
            assert (fault.status, fault.code) == (429, "overloaded")
            assert "max_lag_s" in fault.message
            assert fault.retry_after_s is not None
            assert 2 <= fault.retry_after_s <= 8
        assert ingress.lag.inspect()["refused"] == len(refusals) + 1

    run(test)


def test_a_crowd_that_keeps_coming_waits_as_long_as_the_limit() -> None:
    """About twice as many come as can begin: some are refused, and those taken wait no longer."""

    async def test(ingress: Ingress) -> None:
        tasks = []
        for _ in range(4 * MANY):
            tasks += [ingress.come("greedy"), ingress.come("greedy")]
            before = len(ingress.begun)
            await asyncio.sleep(0)
            while len(ingress.begun) == before and ingress.bodies._begins._waiting:  # noqa: ASYNC110
                await asyncio.sleep(0)
        answers = await asyncio.gather(*tasks[-MANY:])
        waits = [answer for answer in answers if not isinstance(answer, ApiError)]
        assert 0.2 < len(waits) / len(answers) < 0.9
        assert max(waits) < LIMIT_S + 2 * BEGIN_S
        await asyncio.gather(*tasks)

    run(test)


def test_when_the_crowd_has_gone_all_is_as_before() -> None:
    async def test(ingress: Ingress) -> None:
        await asyncio.gather(*(ingress.come("greedy") for _ in range(10 * MANY)))
        assert ingress.lag.behind
        assert not isinstance(await ingress.come("greedy"), ApiError)  # it waits for nobody
        while ingress.lag.behind:
            ingress.pass_time(LOOK_EVERY_S)
        assert ingress.lag.inspect()["lag_s"] == 0.0
        assert ingress.bodies.wait_s == 0.0

    run(test)


def test_a_pause_of_the_loop_refuses_nobody() -> None:
    async def test(ingress: Ingress) -> None:
        crowd = [ingress.come("greedy") for _ in range(MANY // 10)]
        await asyncio.sleep(0)
        ingress.pass_time(60.0)
        assert not [answer for answer in await asyncio.gather(*crowd) if isinstance(answer, ApiError)]

    run(test)


def test_the_server_judges_the_wait_before_it_knows_the_model(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, wait_s = 1000.0, 2.0
    lag = IngressLag(LIMIT_S, lambda: wait_s, clock=lambda: now)
    monkeypatch.setattr(server.api, "lag", lag)
    monkeypatch.setattr(server.service, "overload", OverloadControl(lag=lag))
    while not lag.behind:
        lag.look(0.0)
        now += LOOK_EVERY_S
    assert http.get("/health").json()["status"] == "overloaded"
    assert http.post("/v1/completions", json=COUNT).status_code == 200  # of a client that does not wait
    monkeypatch.setattr(type(server.api.bodies._begins), "waited_s", lambda turns, client: wait_s)
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"):
        response = http.post(path, content=b"not read")
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 3
        assert "2.0 s behind" in response.json()["error"]["message"]
