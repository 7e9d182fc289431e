"""News of replicas that will probably be stopped: only what is new counts, for as long as it says."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from ingress_support import ingress_for
from loopback import LoopbackHandle

from app import config
from app.autoscaling import publishing
from app.autoscaling.publishing import NAMESPACE
from app.background import Background
from app.fleet import victim_feed
from app.fleet.victim_feed import LONGEST_S, VictimFeed, Victims, parse
from app.routing.timed_set import TimedSet


class Store:
    """Ray's internal KV and a clock, both set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.value: bytes | None = None
        self.error: Exception | None = None
        self.asked: list[bytes] = []
        self.likely_victims = TimedSet(lambda: self.now)
        self.feed = VictimFeed("quire", "engine", self.likely_victims, self.read)

    def read(self, key: bytes) -> bytes | None:
        self.asked.append(key)
        if self.error is not None:
            raise self.error
        return self.value

    def tell(self, seq: Any, *replicas: str, lasts_s: Any = 5.0) -> frozenset[str]:
        """Write a message, poll once, and return what fades then."""
        self.value = json.dumps({"seq": seq, "replicas": replicas, "lasts_s": lasts_s}).encode()
        return self.poll()

    def poll(self) -> frozenset[str]:
        self.feed.poll()
        return self.likely_victims.names()


@pytest.fixture
def store() -> Store:
    """One at which has been looked, with nothing in it."""
    store = Store()
    assert store.poll() == frozenset()
    return store


def test_news_last_as_long_as_they_say_and_are_replaced_as_a_whole(store: Store) -> None:
    assert store.asked == [b"victims:quire:engine"]
    assert store.tell(7, "a", "b") == {"a", "b"}
    store.now += 4.9
    assert store.tell(8, "b", "c") == {"b", "c"}
    store.now += 4.9
    assert store.poll() == {"b", "c"}
    store.now += 0.2
    assert store.poll() == frozenset(), "nobody has said it again"
    assert store.tell(9, "a") == {"a"}
    assert store.tell(10) == frozenset(), "demand is back"
    assert store.feed.state() == {"received": 4, "faults": 0, "likely_victims": []}


def test_what_is_read_again_or_older_is_no_news(store: Store) -> None:
    assert store.tell(7, "a") == {"a"}
    for _ in range(20):
        store.now += 1.0
        store.poll()
    assert store.likely_victims.names() == frozenset(), "its publisher is dead"
    assert store.tell(7, "a", "b") == frozenset()
    assert store.tell(6, "b") == frozenset()
    store.value = None
    assert store.poll() == frozenset()
    assert store.tell(7, "b") == frozenset(), "nothing in between makes it young again"
    assert store.tell(8, "b") == {"b"}


def test_what_is_there_at_the_first_look_may_be_of_a_dead_publisher() -> None:
    store = Store()
    assert store.tell(7, "a") == frozenset()
    assert store.poll() == frozenset()
    assert store.tell(8, "a") == {"a"}, "it lives"


MALFORMED = [
    b"",
    b"\xff\xfe",
    b"victims",
    b"[]",
    b"null",
    b"[" * 100_000,
    *(
        json.dumps({"seq": 9, "replicas": ["b"], "lasts_s": 5.0} | wrong).encode()
        for wrong in (
            {"seq": "9"},
            {"seq": True},
            {"seq": -1},
            {"seq": 9.5},
            {"seq": None},
            {"replicas": "b"},
            {"replicas": {"b": 1}},
            {"replicas": ["b", 1]},
            {"lasts_s": "5"},
            {"lasts_s": None},
            {"lasts_s": True},
            {"lasts_s": -1.0},
            {"lasts_s": float("nan")},
            {"lasts_s": float("inf")},
            {"lasts_s": 10**400},
            {"lasts_s": LONGEST_S + 1},
        )
    ),
    b'{"seq": 9, "replicas": ["b"]}',
]


@pytest.mark.parametrize("value", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_news_change_nothing(store: Store, value: bytes) -> None:
    assert store.tell(7, "a") == {"a"}
    store.value = value
    assert store.poll() == {"a"}
    assert store.feed.faults.count == 1
    assert store.poll() == {"a"}
    assert store.feed.faults.count == 1, "the same value is one fault, however often it is read"
    assert store.tell(8, "b") == {"b"}


def test_a_message_is_read_as_it_was_written() -> None:
    assert NAMESPACE == b"quire"
    assert parse(b'{"seq": 3, "replicas": ["a", "b"], "lasts_s": 5, "more": 1}') == Victims(
        3, frozenset({"a", "b"}), 5.0
    )


def test_what_the_scaling_policy_publishes_is_understood(store: Store) -> None:
    class Sink:
        def gauge(self, name: str, value: float, tags: Mapping[str, str]) -> None:
            raise NotImplementedError

        count = gauge

        def put(self, key: bytes, value: bytes) -> None:
            assert key == store.feed.key
            store.value = value

    assert store.feed.key == b"victims:quire:engine"
    publisher = publishing.Publisher(Sink())
    publisher.app, publisher.deployment = "quire", "engine"
    publisher.victims(1e9, ["a", "b"])
    assert store.poll() == {"a", "b"}
    for second in range(1, 20):
        store.now += 1.0
        publisher.victims(1e9 + second, ["b"])
        assert store.poll() == {"b"}
    restarted = publishing.Publisher(Sink())
    restarted.app, restarted.deployment = "quire", "engine"
    restarted.victims(1e9 + 20, ["c"])
    assert store.poll() == {"c"}
    restarted.victims(1e9 + 21, [])
    assert store.poll() == frozenset()
    assert (publisher.failures.count, restarted.failures.count, store.feed.faults.count) == (0, 0, 0)


def test_failed_looks_are_counted_and_told_at_powers_of_two(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.tell(7, "a") == {"a"}
    store.error = ConnectionError("no head node")
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            assert store.poll() == {"a"}
    assert store.feed.faults.count == 9
    said = [record.getMessage() for record in caplog.records]
    assert [f"({count} times so far)" in line for count, line in zip((1, 2, 4, 8), said, strict=True)] == [
        True
    ] * 4
    assert "ConnectionError: no head node" in caplog.text
    store.now += 5
    assert store.poll() == frozenset(), "without news it ends"
    store.error = None
    assert store.tell(8, "b") == {"b"}


def test_a_failed_first_look_is_none() -> None:
    store = Store()
    store.error = ConnectionError("not yet")
    store.poll()
    store.error = None
    assert store.tell(7, "a") == frozenset()
    assert store.tell(8, "a") == {"a"}


def test_it_looks_in_one_thread_of_its_own_until_it_is_stopped() -> None:
    looked = threading.Semaphore(0)
    threads: set[threading.Thread] = set()

    def read(_: bytes) -> None:
        threads.add(threading.current_thread())
        looked.release()

    feed = VictimFeed("quire", "engine", TimedSet(), read, every_s=0.001)
    feed.start(Background())
    feed.start(Background())
    for _ in range(5):
        assert looked.acquire(timeout=120)
    feed.stop()
    (thread,) = threads
    assert thread is not threading.current_thread()
    assert thread.daemon
    thread.join(120)
    assert not thread.is_alive()


def test_stopping_does_not_wait_for_an_answer() -> None:
    asked, answer = threading.Event(), threading.Event()

    def read(_: bytes) -> None:
        asked.set()
        answer.wait(120)

    feed = VictimFeed("quire", "engine", TimedSet(), read)
    feed.start(Background())
    assert asked.wait(120)
    feed.stop()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "victim-feed")
    assert thread.is_alive(), "it still waits, nobody waits for it"
    answer.set()
    thread.join(120)
    assert not thread.is_alive()


# Collecting the object calls __del__ once more, outside Serve with nobody to await it.
@pytest.mark.usefixtures("one_tokenizer")
@pytest.mark.filterwarnings("ignore:coroutine .*__del__.* was never awaited")
@pytest.mark.parametrize("scales", [True, False])
def test_an_ingress_looks_only_where_the_number_of_replicas_changes(
    scales: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[bytes] = set()
    looked = threading.Event()

    def read(key: bytes) -> None:
        asked.add(key)
        looked.set()

    monkeypatch.setattr(victim_feed, "_read_internal_kv", read)
    monkeypatch.setattr("app.ingress_model.tokenizer_digest", lambda _: "tokenizer")  # the replica's

    async def test() -> None:
        options = config.load({"instance": "test", **({"max_replicas": 3} if scales else {})}, {})
        handle = LoopbackHandle(1)
        ingress = ingress_for(options, handle)
        await ingress.reconfigure({})
        if scales:
            assert await asyncio.to_thread(looked.wait, 20)
            handle.fleet.likely_victims.set({"a"}, 60)
            assert (await ingress.inspect())["victims"] == {"received": 0, "faults": 0, "likely_victims": ["a"]}
        else:
            assert (await ingress.inspect())["victims"] == {}
        await ingress.__del__()
        for thread in threading.enumerate():
            if thread.name == "victim-feed":
                await asyncio.to_thread(thread.join, 20)
                assert not thread.is_alive()
        name = handle.deployment_id
        assert asked == ({f"victims:{name.app_name}:{name.name}".encode()} if scales else set())

    asyncio.run(test())
