"""The terminal program over a real server's events: what it shows in 80 columns, and its keys."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_server import LocalServer
from textual.pilot import Pilot

from app.api.authentication import Gate
from app.api.keys import KeyFile, digest_of
from app.top import server as top_server
from app.top.screen import Top
from app.top.server import FleetView, Server, Trouble


def seen(top: Top) -> str:
    """What is on the terminal."""
    return "\n".join(strip.text.rstrip() for strip in top.screen._compositor.render_strips())


async def until(pilot: Pilot[Any], text: str) -> str:
    assert isinstance(pilot.app, Top)
    for _ in range(3000):
        if text in seen(pilot.app):
            await pilot.pause()  # what has grown moves the rest
            return seen(pilot.app)
        await pilot.pause(0.02)
    raise AssertionError(f"no {text!r} in\n{seen(pilot.app)}")


def test_it_shows_a_real_fleet_and_opens_a_replica(fleet: LocalServer, http: httpx.Client) -> None:
    body = {"prompt": [5] * 40, "max_tokens": 3, "ignore_eos": True}
    http.post("/v1/completions", json=body).raise_for_status()
    pool = fleet.client.engine.stats().num_blocks

    async def test() -> None:
        top = Top(Server(fleet.url))
        async with top.run_test(size=(80, 24)) as pilot:
            screen = await until(pilot, "░·")  # the prompt is cached, most is free: what the next report says
            assert "live, 1 ingress" in screen
            assert f"of {pool} blocks" in screen
            assert "Replicas     1 of 1 open, a fixed number" in screen
            assert "█ shared  ▓ referenced  ░ cached  · free" in screen
            row = next(line for line in screen.splitlines() if "a1b2" in line)
            assert len(row) <= 80
            assert "░·" in row
            assert "Replica▾" in screen
            await pilot.press("s")
            assert "Demand▾" in await until(pilot, "Demand▾")
            await pilot.press("enter")
            screen = await until(pilot, "Replica a1b2 of")
            assert f"of {pool}" in screen
            await until(pilot, "Each sign is a block, by position.")
            await pilot.press("escape")
            await until(pilot, "live, 1 ingress")
            await pilot.press("p")
            screen = await until(pilot, "no common prefix")
            assert "Shared prefixes of" in screen
            await pilot.press("escape")
            await until(pilot, "live, 1 ingress")
            await pilot.press("q")
        assert top.return_code == 0

    asyncio.run(test())


def test_it_says_that_the_key_is_missing_or_wrong_and_goes_on_with_the_right_one(
    fleet: LocalServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n  - {{id: a, sha256: {digest_of('right')}}}\n")
    keys = KeyFile(str(path), {})
    monkeypatch.setattr(fleet.api, "gate", Gate(keys))
    monkeypatch.setattr(top_server, "AGAIN_S", 0.02)

    async def test() -> None:
        async with Top(Server(fleet.url)).run_test(size=(80, 24)) as pilot:
            await until(pilot, "needs a key: set QUIRE_API_KEY")
        async with Top(Server(fleet.url, "wrong")).run_test(size=(80, 24)) as pilot:
            await until(pilot, "rejects the key: the API key is not valid")
            path.write_text(f"keys:\n  - {{id: a, sha256: {digest_of('wrong')}, requests_per_minute: 9}}\n")
            keys.reread()  # the operator has added it
            await until(pilot, "live, 1 ingress")
            await pilot.press("enter")
            await until(pilot, "only an administrator's key may see it")

    asyncio.run(test())


def test_an_event_that_comes_while_it_ends_draws_nothing() -> None:
    Top(Server("http://quire")).redraw()  # it has no screen, as after its end


class Scripted(Server):
    """Says what a test wants."""

    def __init__(self, *said: Any) -> None:
        super().__init__("http://quire")
        self.said = asyncio.Queue[Any]()
        for event in said:
            self.said.put_nowait(event)

    async def events(self) -> AsyncIterator[Any]:
        while True:
            yield await self.said.get()


REPLICA = {
    **{"name": "q#engine#aaaa", "state": "open", "blocks": [10, 20, 30, 40], "pool": 100, "host": [0, 8]},
    **{"demand": 35.0, "running": 4, "waiting": 1, "preempted": 1, "swapped": 0, "tokens_s": 99.5},
    **{"prompt_tokens_s": 1234.0, "hit_share": 0.5, "step_s": 0.0123, "prefill_rate": 4000, "preemptions": 7},
    **{
        "recoveries": {"swap": 3, "recompute": 4},
        "copied_blocks": 2,
        "generated_tokens": 9,
        "prompt_tokens": 99,
    },
    **{"finished": {"stop": 5, "abort": 0}, "lost_leases": 0},
}
LATENCY = {"count": 9, "p50": 0.12, "p95": 1.5}
SHOWN = {
    "replicas": [
        REPLICA,
        {**REPLICA, "name": "q#engine#bbbb", "demand": 80.0},
        {"name": "q#engine#cccc", "state": "opening"},
    ],
    "fleet": {
        **{"ingresses": 2, "pool": 200, "demand": 115.0, "tokens_s": 199.0, "prompt_tokens_s": 2468.0},
        **{"live": 12, "waiting": 4, "lag_s": 0.0, "wait_s": 0.1},
    },
    "latency": dict.fromkeys(("first_token", "inter_token", "queue", "prefill"), LATENCY),
    "routing": {"prefix": 6, "balance": 12},
    "ended": {"chat ok": 3},
    "refused": {"overloaded": 2},
    "totals": {
        **{"moved_requests": 1, "resubmissions": 0, "lost_channels": 0, "dead_engines": 0, "faults": 0},
        **{"preemptions": 14, "lost_leases": 0},
    },
    "scaling": {
        **{"target": 3, "running": 2, "demand": 0.57, "reason": "kv", "held_by": "replicas start"},
        **{"needs": {"kv": 2.5}, "missing_reports": 0},
    },
    "seconds": 15.0,
}


def test_models_take_turns_replicas_are_sorted_and_old_figures_are_called_old() -> None:
    other = copy.deepcopy(SHOWN)
    other["scaling"] = None

    async def test() -> None:
        scripted = Scripted(FleetView(1.0, {"first": SHOWN, "second": other}))
        async with Top(scripted).run_test(size=(80, 24)) as pilot:
            screen = await until(pilot, "░·")  # the prompt is cached, most is free: what the next report says
            assert "live, 2 ingresses" in screen
            assert max(map(len, screen.splitlines())) <= 80
            assert "first (1 of 2)   second: 3 replicas, 199 tokens/s" in screen
            assert "2 of 3 open, target 3: kv; held by: replicas start" in screen
            assert "120 ms, 95%: 1.5 s" in screen
            assert "Decided by   balance 12, prefix 6" in screen
            assert "refused: overloaded 2" in screen
            assert screen.index("aaaa") < screen.index("bbbb")
            assert "opening" in screen
            await pilot.press("s")
            screen = await until(pilot, "Demand▾")
            assert screen.index("bbbb") < screen.index("aaaa")
            await pilot.press("m")
            assert "a fixed number" in await until(pilot, "second (2 of 2)")
            scripted.said.put_nowait(Trouble("cannot reach http://quire: Connection refused; trying again"))
            screen = await until(pilot, "Connection refused")
            assert "the figures below are old" in screen.replace("\n", " ")
            await pilot.press("enter")
            assert "aaaa of second" in await until(pilot, "of second")
            scripted.said.put_nowait(FleetView(2.0, {"second": {**other, "replicas": []}}))
            await until(pilot, "It is gone.")

    asyncio.run(test())
