"""``/dashboard``: the page, its events, and both together in a browser where there is one."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import chromium
import httpx
import pytest
from local_server import LocalServer, wait_until
from starlette.datastructures import Headers

from app.api.api_server import KnownLife
from app.api.authentication import Gate
from app.api.keys import KeyFile, digest_of
from app.api.tenant import tenant_of
from app.dashboard import live_feed
from app.dashboard.block_maps import BlockMaps
from app.dashboard.prefix_flows import PrefixFlows
from app.fleet.journal import AttemptNotes
from app.routing.prefix_flow import PrefixFlow
from app.routing.replica_state import Compared
from engine.kv.block_groups import GroupBy
from engine.kv.block_map import BlockMap
from engine.request import CacheNamespace

AXE = resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")

SCALES = """
source.close();
const scaling = { running: 1, reason: "hold", held_by: "", demand: 1, missing_reports: 0,
  needs: { prefill: 0.2, kv: 1.8, decode: 0.5 } };
const scaled = (target, ...names) => show({ ...last, scaling: { ...scaling, target },
  replicas: names.map((name) => ({ name, state: "open" })) });
scaled(1, "old"); scaled(2, "old"); scaled(2, "old", "new"); scaled(1, "old", "new"); scaled(1, "old");
0
"""
"""The page is told that a replica comes some time after the target has risen, and goes after it has fallen."""


async def few_blocks(replica: str, by: GroupBy = GroupBy.STATE, keys: Sequence[int] = ()) -> BlockMap:
    """Of the prefix whose key is 12, and of a request of this tenant beside another's."""
    of_prefix, of_request = bytes([255, 1, 1, 0, 0]), bytes([255, 1, 0, 0, 2])
    states = BlockMap(1, bytes([3, 2, 1, 0]), bytes([2]))
    if by is GroupBy.PREFIX:
        return states._replace(groups=of_prefix, names=tuple(f"{key:016x}" for key in keys))
    return states._replace(groups=of_request, names=("shown", "secret"), tenants=("", "other"))


def test_the_page_loads_nothing_and_may_not(http: httpx.Client) -> None:
    page = http.get("/dashboard")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert re.findall(r"""(?:src|href)=["'](?!/|data:,)""", page.text) == []
    ids = re.findall(r'id="([\w-]+)"', page.text)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:find|card|table|chart)\("([\w-]+)"', page.text))
    used |= set(re.findall(r'aria-(?:labelledby|controls)="([\w-]+)"', page.text))
    assert used <= set(ids)


def test_its_events_are_the_past_and_then_the_fleet(fleet: LocalServer, http: httpx.Client) -> None:
    http.post(
        "/v1/completions", json={"prompt": [5] * 40, "max_tokens": 3, "ignore_eos": True}
    ).raise_for_status()
    events: list[str] = []
    with http.stream("GET", "/dashboard/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
            if len(events) == 3:  # the first fleet may be that of a moment before the request
                break
    assert isinstance(json.loads(events[0]), dict)
    message = json.loads(events[2])["models"][fleet.service.model]
    (replica,) = message["replicas"]
    assert replica["name"] == "quire#engine#a1b2"
    assert sum(replica["blocks"]) == replica["pool"] == fleet.client.engine.stats().num_blocks
    assert replica["generated_tokens"] >= 3


def test_a_replica_shows_what_each_block_holds(
    fleet: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"model": fleet.service.model, "replica": "quire#engine#a1b2"}
    answer = http.get("/dashboard/blocks", params=wanted)
    assert answer.headers["cache-control"] == "no-store"
    found = answer.json()
    assert (found["each"], len(found["device"])) == (1, fleet.client.engine.stats().num_blocks)
    assert set(found["device"] + found["host"]) <= set("0123")
    for changed, status, message in (
        ({"replica": "other"}, 404, "has no replica 'other'"),
        ({"model": "other"}, 404, "other"),
        ({"by": "color"}, 400, "by is 'color' but must be one of state, prefix, request"),
    ):
        refused = http.get("/dashboard/blocks", params=wanted | changed)
        assert refused.status_code == status
        assert message in refused.json()["error"]["message"]


def test_a_replica_shows_which_prefix_and_which_request_each_block_belongs_to(
    fleet: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of others' requests it says that they are there, but not their names."""
    fleet.set_options(monkeypatch, tenant_header="x-tenant")
    engine = fleet.client.engine
    prompt = [7, 8, 9, 10] * 12
    key = engine.key_scheme.keys(
        prompt, CacheNamespace(tenant=tenant_of(Headers({"x-tenant": "a"}), "x-tenant"))
    )[1]
    monkeypatch.setattr(fleet.client, "flow", flow := PrefixFlow())
    for _ in range(3):
        flow.add([11, key], "quire#engine#a1b2", "prefix", prompt, 0)
    monkeypatch.setattr(fleet.api, "prefix_flows", PrefixFlows(fleet.api._ask_prefix_flow))
    monkeypatch.setattr(fleet.api, "block_maps", BlockMaps(fleet.api._block_map))
    body = {"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
    sent = {"x-request-id": "held", "x-tenant": "a"}
    wanted = {"model": fleet.service.model, "replica": "quire#engine#a1b2"}
    with fleet.slow_steps(), http.stream("POST", "/v1/completions", json=body, headers=sent) as response:
        lines = response.iter_lines()  # whoever drops this iterator hangs up
        next(lines)
        seen = {
            (by, tenant): http.get(
                "/dashboard/blocks", params=wanted | {"by": by}, headers={"x-tenant": tenant}
            ).json()
            for by, tenant in (("request", "a"), ("request", "b"), ("prefix", "b"))
        }
    own, others, prefixes = (
        Counter(names[group - 1] for group in base64.b64decode(found["groups"]) if group)
        for found in seen.values()
        for names in [found["names"]]
    )
    (name,) = own
    assert name.startswith("held")
    assert own[name] >= 3
    assert others.keys() == {None}
    assert prefixes[f"{key:016x}"] >= 3


@pytest.fixture
def keys(fleet: LocalServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        f"keys:\n  - {{id: a, sha256: {digest_of('key')}}}\n"
        f"  - {{id: b, sha256: {digest_of('admin')}, admin: true, models: [gone]}}\n"
        f"  - {{id: c, sha256: {digest_of('other')}}}\n"
    )
    monkeypatch.setattr(fleet.api, "gate", Gate(KeyFile(str(path), {})))


@pytest.mark.usefixtures("keys")
def test_with_keys_only_administrators_follow_blocks(
    fleet: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"model": fleet.service.model, "replica": "quire#engine#a1b2"}
    refused = http.get("/dashboard/blocks", params=asked, headers={"x-api-key": "key"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")
    assert http.get("/dashboard/blocks", params=asked, headers={"x-api-key": "admin"}).status_code == 200


@pytest.mark.usefixtures("keys")
def test_a_request_is_shown_to_its_tenant_and_to_administrators(http: httpx.Client) -> None:
    body = {"prompt": [5] * 40, "max_tokens": 3, "ignore_eos": True}
    sent = {"x-api-key": "key", "x-request-id": "own/1"}
    http.post("/v1/completions", json=body, headers=sent).raise_for_status()
    # Its end is told after its answer.
    path, admin = "/dashboard/requests/own/1", {"x-api-key": "admin"}
    wait_until(lambda: http.get(path, headers=admin).json()["requests"][0]["state"] == "ended")
    answers = {key: http.get(path, headers={"x-api-key": key}) for key in ("key", "other", "admin")}
    assert {key: answer.status_code for key, answer in answers.items()} == {
        "key": 200,
        "other": 404,
        "admin": 200,
    }
    (life,) = answers["admin"].json()["requests"]
    assert (life["outcome"], life["prompt_tokens"], life["output_tokens"]) == ("ok", 40, 3)
    unknown = http.get("/dashboard/requests/own/2", headers={"x-api-key": "other"}).json()["error"]
    assert unknown["message"] == answers["other"].json()["error"]["message"].replace("own/1", "own/2")


@pytest.mark.usefixtures("keys")
def test_a_request_of_the_same_id_hides_none_of_another_tenant(
    fleet: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tenant's ran at this ingress, the other's at another."""
    body = {"prompt": [5] * 40, "max_tokens": 1}
    sent = {"x-api-key": "key", "x-request-id": "twice"}
    http.post("/v1/completions", json=body, headers=sent).raise_for_status()
    elsewhere = KnownLife(tenant_of(Headers({}), None, "c"), {"ingress": "elsewhere"})

    async def others(method: str, *arguments: object) -> list[list[KnownLife]]:
        return [fleet.api.lives(str(arguments[0])), [elsewhere]]

    monkeypatch.setattr(fleet.api, "_ask_others", others)
    found = {
        key: http.get("/dashboard/requests/twice", headers={"x-api-key": key}).json()["requests"]
        for key in ("key", "other")
    }
    assert [life["prompt_tokens"] for life in found["key"]] == [40]
    assert found["other"] == [{"ingress": "elsewhere"}]


@pytest.mark.usefixtures("keys")
def test_prefixes_of_others_are_hashes_for_administrators_and_nothing_for_others(
    fleet: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.client, "flow", flow := PrefixFlow())
    fleet.set_options(monkeypatch, prefix_words=True)
    tenant = tenant_of(Headers({}), None, "a")
    prompt = fleet.tokenizer._backend.encode("Secret plans of the tenant").ids
    for _ in range(3):
        flow.add([11, 12], "quire#engine#a1b2", "prefix", prompt, 0, tenant)
    seen = {}
    for key in ("key", "other", "admin"):
        monkeypatch.setattr(fleet.api, "prefix_flows", PrefixFlows(fleet.api._ask_prefix_flow))
        asked = {"model": fleet.service.model}
        answer = http.get("/dashboard/prefixes", params=asked, headers={"x-api-key": key})
        seen[key] = answer.json()["prefixes"]
    (own, _), (nothing,), (hashed, _) = seen["key"], seen["other"], seen["admin"]
    assert (own["prefix"], own["words"]) == (f"{12:016x}", "Secret plans of the tenant")
    assert (hashed["prefix"], hashed["words"]) == (f"{12:016x}", None)
    assert (nothing["prefix"], nothing["words"], nothing["requests"]) == (None, None, 3)


@pytest.mark.usefixtures("keys")
def test_a_key_cannot_take_the_places_of_others(
    fleet: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.api.live_feed, "viewers", live_feed.MAX_VIEWERS // 2)
    monkeypatch.setattr(fleet.api.live_feed, "of_keys", Counter(a=live_feed.MAX_VIEWERS // 2))
    answers = {key: http.head("/dashboard/events", headers={"x-api-key": key}) for key in ("key", "admin")}
    assert {key: answer.status_code for key, answer in answers.items()} == {"key": 429, "admin": 200}
    assert answers["key"].headers["retry-after"] == "30"


def test_viewers_are_limited(fleet: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet.api.live_feed, "viewers", live_feed.MAX_VIEWERS)
    answer = http.get("/dashboard/events")
    assert answer.status_code == 503
    assert "close one" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "unavailable"


def test_viewers_that_come_together_are_limited_too(
    fleet: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.dashboard.MAX_VIEWERS", 2)
    wait_until(lambda: fleet.api.live_feed.viewers == 0)

    async def status(http: httpx.AsyncClient, everyone: asyncio.Barrier) -> int:
        async with http.stream("GET", "/dashboard/events") as response:
            await everyone.wait()
            return response.status_code

    async def test() -> list[int]:
        everyone = asyncio.Barrier(12)
        async with httpx.AsyncClient(base_url=fleet.url, timeout=60) as http:
            return await asyncio.gather(*(status(http, everyone) for _ in range(12)))

    assert sorted(asyncio.run(test())) == [200] * 2 + [503] * 10


def test_whoever_asks_for_the_headers_alone_gets_them_at_once(fleet: LocalServer, http: httpx.Client) -> None:
    before = fleet.api.live_feed.viewers
    answer = http.head("/dashboard/events", timeout=live_feed.STREAM_S / 2)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert fleet.api.live_feed.viewers <= before


@pytest.mark.usefixtures("keys")
def test_both_need_a_key(fleet: LocalServer, http: httpx.Client) -> None:
    routes = "", "/events", "/blocks", "/prefixes", "/requests/r"
    for route in (f"/dashboard{each}" for each in routes):
        assert http.get(route).status_code == 401
    assert http.get("/dashboard", headers={"x-api-key": "key"}).status_code == 200


@pytest.mark.skipif(chromium.PATH is None, reason="there is no Chromium")
def test_a_browser_shows_the_fleet(fleet: LocalServer, tmp_path: Path) -> None:
    with chromium.tab(tmp_path) as tab:
        tab.open(f"{fleet.url}/dashboard")
        tab.until("document.querySelector('#rows button')")
        page = tab.run("document.documentElement.outerHTML")
    assert "live, 1 ingress" in page
    assert ">a1b2</button>" in page
    pool = fleet.client.engine.stats().num_blocks
    assert f"{pool:,} blocks" in page
    assert re.search(
        r'class="bar" role="img" aria-label="\d+ shared, \d+ referenced, \d+ cached, \d+ free"', page
    )


@pytest.mark.skipif(chromium.PATH is None, reason="there is no Chromium")
def test_everyone_can_read_the_page_and_open_a_replica_with_the_keyboard(
    fleet: LocalServer, http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.client, "flow", flow := PrefixFlow())
    monkeypatch.setattr(fleet.client, "block_map", few_blocks)
    for _ in range(3):
        flow.add([11, 12], "quire#engine#a1b2", "prefix", [5] * 40, 0)
    body, headers = {"prompt": [5] * 40, "max_tokens": 3}, {"x-request-id": "shown"}
    http.post("/v1/completions", json=body, headers=headers).raise_for_status()
    notes = AttemptNotes(replica="quire#engine#a1b2", reason="wait", queue_s=0.01, prefill_s=0.02)
    notes.placed, notes.first_token = notes.began + 0.001, notes.began + 0.03
    notes.compared = (
        Compared("quire#engine#a1b2", 16, (0.1, 0.2, 0.0, 0.0, 0.0)),
        Compared("quire#engine#c3d4", 0, (0.9, 0.2, 0.0, 0.0, 0.0)),
    )
    (record,) = fleet.api.recent.find("shown")
    record.journals[0].arrived, record.journals[0].attempts = notes.began, [notes]
    with chromium.tab(tmp_path) as tab:
        tab.look(1280, 900, dark=False)
        tab.open(f"{fleet.url}/dashboard?request=shown")  # a link
        tab.until("document.querySelector('#rows button')")
        tab.until("document.getElementById('request-state').textContent === 'Request shown: ok'")
        tab.until("document.querySelector('#flow code')")
        assert tab.run("document.querySelector('#flow td:last-child').textContent") == "a1b2: 3 (prefix 3)"
        for _ in range(10):
            tab.press("Tab", 9)
            if tab.run("document.activeElement.textContent") == "a1b2":
                break
        tab.press("Enter", 13, "\r")
        assert tab.run("location.search") == "?request=shown&replica=quire%23engine%23a1b2"
        tab.until("document.getElementById('map').clientHeight > 0")
        assert tab.run("document.getElementById('cells').textContent").startswith(
            "Each cell is a block, by position"
        )
        tab.press("Tab", 9)
        for by, groups in (
            ("prefix", ["prefix 000000000000000c: 2", "several prefixes: 1", "no prefix known: 1"]),
            ("request", ["request shown: 1", "several requests: 1", "request of another tenant: 1"]),
        ):
            tab.press("ArrowRight", 39)
            assert tab.run("location.search").endswith(f"&by={by}")
            tab.until("document.querySelectorAll('#groups li').length === 3")
            listed = tab.run("[...document.querySelectorAll('#groups li')].map((item) => item.textContent)")
            assert sorted(listed) == sorted(groups)
        tab.press("Tab", 9)
        for cell in (
            "Block 0: shared, several requests",
            "Block 1: referenced, request shown",
            "Block 2: cached",
            "Block 3: free",
            "Host block 0: swapped, request of another tenant",
            "Host block 0: swapped, request of another tenant",
        ):
            tab.press("ArrowRight", 39)
            assert tab.run("document.getElementById('map').ariaValueText") == cell
            assert tab.run("document.getElementById('cell').textContent") == cell
        tab.run("asked = find('request').value = ''")
        tab.press("ArrowUp", 38)
        tab.press("Home", 36)
        tab.press("ArrowRight", 39)
        tab.press("Enter", 13, "\r")
        assert tab.run("asked") == "shown"
        tab.run(f"{AXE};0")
        for width in (390, 1280, 1920):
            for dark in (False, True):
                tab.look(width, 900, dark)
                found = tab.run(
                    "axe.run().then(({ violations }) => violations.map(({ id, impact }) => [impact, id]))"
                )
                assert [rule for rule in found if rule[0] in ("serious", "critical")] == [], (width, dark)
                assert tab.run("document.documentElement.scrollWidth") <= width
        tables = tab.run("[...document.querySelectorAll('#lives table')].map((table) => table.innerText)")
        assert [name in tables[0] for name in ("Routing", "Queue", "Prefill", "Decode")] == [True] * 4
        assert "a1b2, chosen" in tables[1]
        assert "0.9000" in tables[1]
        tab.run("window.fetch = async () => new Response('{}', { status: 403 }); 0")  # as without an admin key
        tab.until("document.getElementById('cells').textContent.startsWith('Only an administrator')")
        tab.run("points = [0, 1, 40, 41].map((at) => ({ ...points[0], at })); charts(); 0")
        drawn = tab.run("[...document.querySelectorAll('#g-tokens polyline')].map((e) => e.points.length)")
        assert drawn == [2, 2], "no line leads over the time in which no page was open"
        tab.run(SCALES)
        came, went = tab.run("[...document.querySelectorAll('#news li')].slice(0, 2).map((e) => e.innerText)")[
            ::-1
        ]
        assert came.endswith(": new came (target 1 to 2: kv)")
        assert went.endswith(": new went (target 2 to 1: less needed)")
