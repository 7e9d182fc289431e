"""In threads that clients share, one with much work delays another by one work of its own."""

from __future__ import annotations

import asyncio
import threading
import weakref

import httpx
import pytest
from local_server import LocalServer

from app.api import fair_threads, generated_response, prompt_tokenizer, request_body
from app.api.fair_threads import FairThreads


def test_clients_take_turns() -> None:
    threads, done = FairThreads(1, "test"), list[str]()
    begin = threading.Event()

    async def main() -> None:
        first = asyncio.create_task(threads.run("a", begin.wait))
        names = ["a1", "a2", "a3", "b1", "b2", "c1"]
        others = [asyncio.create_task(threads.run(name[0], lambda n=name: done.append(n))) for name in names]  # type: ignore[misc]
        await asyncio.sleep(0)  # each has called
        begin.set()
        await asyncio.gather(first, *others)

    asyncio.run(main())
    assert done == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert not threads._waiting


def test_what_nobody_waits_for_is_not_begun_and_errors_come_back() -> None:
    threads, done = FairThreads(1, "test"), list[str]()
    begin = threading.Event()

    def fail() -> None:
        raise ValueError("wrong")

    async def main() -> None:
        first = asyncio.create_task(threads.run("a", begin.wait))
        left = asyncio.create_task(threads.run("a", lambda: done.append("left")))
        stays = asyncio.create_task(threads.run("a", lambda: done.append("stays")))
        fails = asyncio.create_task(threads.run("b", fail))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait((left,))
        begin.set()
        await asyncio.gather(first, stays)
        with pytest.raises(ValueError, match="wrong"):
            await fails

    asyncio.run(main())
    assert done == ["stays"]


def test_what_nobody_waits_for_leaves_memory_before_its_turn() -> None:
    """A large body no longer counts toward the limit once its request has been cancelled."""

    class Work:
        def __call__(self) -> None:
            raise AssertionError("nobody waits for it")

    threads, work = FairThreads(1, "test"), Work()
    begin, left = threading.Event(), weakref.ref(work)
    busy, behind = threads.submit("a", begin.wait), threads.submit("a", work)
    del work
    assert left() is not None
    behind.cancel()
    assert left() is None
    begin.set()
    assert busy.result()
    assert threads.submit("a", lambda: 5).result() == 5


def test_all_that_a_request_needs_of_threads_is_in_its_senders_name(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "INLINE_BYTES", 100)
    monkeypatch.setattr(generated_response, "INLINE_DETAILS", 0)
    monkeypatch.setattr(generated_response, "INLINE_TOKENS", 0)
    monkeypatch.setattr(prompt_tokenizer, "INLINE_CHARS", 0)
    seen = list[tuple[int, str]]()
    submit = FairThreads.submit

    def noted(self: FairThreads, client: str, work: object) -> object:
        seen.append((id(self), client))
        return submit(self, client, work)  # type: ignore[arg-type]

    monkeypatch.setattr(fair_threads.FairThreads, "submit", noted)
    server.set_options(monkeypatch, tenant_header="x-tenant")
    body = {"prompt": "a " * 60, "max_tokens": 2, "logprobs": 1, "bad_words": ["zz"], "echo": True}
    clients = []
    for tenant in ("one", "two"):
        seen.clear()
        answer = http.post("/v1/completions", json=body, headers={"x-tenant": tenant})
        assert answer.status_code == 200, answer.text
        assert len(seen) >= 5  # to parse, tokenize twice, check, and describe
        assert len({pool for pool, _ in seen}) == 2
        (client,) = {client for _, client in seen}
        clients.append(client)
    assert "" not in clients
    assert clients[0] != clients[1]
