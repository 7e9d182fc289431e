"""News of a simulated replica: with tokens at once, without them after a while, and nothing is lost."""

from __future__ import annotations

from loadtests.experiments.routing.arms import Flush
from loadtests.experiments.routing.constants import CHANNEL_DELAY
from loadtests.experiments.routing.news import Channel, Feed
from loadtests.experiments.routing.replica import Replica
from loadtests.experiments.routing.row import Row
from loadtests.experiments.routing.workloads import Job, Source

Message = tuple[float, str, object]


class Listener:
    """Writes down what it hears."""

    hears = True

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def add(self, replica: Replica) -> None:
        """Not of interest."""

    def choose(self, job: Job, attempt: int, now: float) -> str:
        """Never asked."""
        raise AssertionError

    def flush(self, flush: Flush, now: float) -> None:
        self.heard.append((now, "flush", flush))

    def first_token(self, attempt: int) -> None:
        self.heard.append((0.0, "first", attempt))

    def end(self, attempt: int, made: int) -> None:
        self.heard.append((0.0, "end", (attempt, made)))


def stored(listener: Listener) -> list[int]:
    return [len(flush.stored) for _, _, flush in listener.heard if isinstance(flush, Flush)]


def compute(replica: Replica, source: Source, tokens: int) -> None:
    prompt = source.prompt(tokens)
    replica.deliver(Row(Job(0, 0.0, prompt, 1, 1), 0, 1, 0), 0.0)
    while replica.plan(0.0) is not None:
        replica.settle(1.0)


def test_news_leaves_with_tokens_and_what_is_left_by_itself() -> None:
    told, other = Listener(), Listener()
    channels = [Channel(0, told), Channel(1, other)]
    replica, source = Replica("r", 64, token_budget=64), Source(1)
    feed = Feed(replica, channels)
    compute(replica, source, 64)
    assert feed.step(1.0, {0})
    compute(replica, source, 32)
    assert feed.step(2.0, {0})
    feed.flush(3.0)
    for channel in channels:
        channel.receive(2.0)
    assert (stored(told), stored(other)) == ([4], [])
    for channel in channels:
        channel.receive(10.0)
    # Each batch of changes keeps its own number; the load that comes with it is of the moment that it left.
    assert (stored(told), stored(other)) == ([4, 2], [4, 2])
    flushes = [flush for _, _, flush in other.heard if isinstance(flush, Flush)]
    assert [flush.sequence for flush in flushes] == [1, 2]
    assert [at for at, _, _ in other.heard] == [3.0 + CHANNEL_DELAY] * 2


def test_a_step_without_changes_still_tells_the_load() -> None:
    listener = Listener()
    channel = Channel(0, listener)
    feed = Feed(Replica("r", 64), [channel])
    assert not feed.step(1.0, {0})
    channel.receive(2.0)
    assert stored(listener) == [0]
    assert feed.step(2.0, set())
    feed.flush(2.5)
    channel.receive(3.0)
    assert stored(listener) == [0, 0]


def test_messages_arrive_in_the_order_of_their_times() -> None:
    listener = Listener()
    channel = Channel(0, listener)
    channel.send((2, 7), 3.0)
    channel.send((1, 0), 1.0)
    channel.receive(2.0)
    assert [what for _, what, _ in listener.heard] == ["first"]
    channel.receive(3.0)
    assert listener.heard[-1][1:] == ("end", (2, 7))
