"""News of a simulated replica: with tokens at once, without them after a while, and nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence

from app.routing.load import LoadReport
from engine.kv.kv_events import KvBatch
from engine.request import Request
from engine.sampling_params import SamplingParams
from loadtests.experiments.routing.arms import Router
from loadtests.experiments.routing.channels import Channel, Feed
from loadtests.experiments.routing.constants import BLOCK_SIZE, CHANNEL_DELAY, COST
from loadtests.experiments.simulated_replica import ReplicaConfig, SimulatedReplica

PARAMS = SamplingParams(max_tokens=1, ignore_eos=True)


class Listener(Router):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, list[int], int]] = []  # when, keys stored by batch, acknowledged

    def news(self, replica: str, batches: Sequence[KvBatch], load: LoadReport, now: float) -> None:
        self.heard.append((now, [len(batch.stored) for batch in batches], load.acknowledged))


def make(channels: list[Channel]) -> Feed:
    replica = SimulatedReplica(ReplicaConfig(COST, 64, BLOCK_SIZE, 64, kv_events=True))
    return Feed(replica, channels)


def compute(feed: Feed, first: int, tokens: int) -> None:
    tokens_of = list(range(first, first + tokens))
    feed.replica.add(Request(f"from {first}", tokens_of, PARAMS, arrival=1.0), channel=0, attempt=5)
    while feed.replica.begin_step() is not None:
        plan = feed.replica.plan
        assert plan is not None
        feed.replica.end_step([0] * plan.num_samples)


def test_news_leaves_with_tokens_and_the_rest_by_itself() -> None:
    told, other = Listener(), Listener()
    channels = [Channel(0, told), Channel(1, other)]
    feed = make(channels)
    compute(feed, 100, 64)
    assert feed.step(1.0, {0})
    compute(feed, 200, 32)
    assert feed.step(2.0, {0})
    feed.flush(3.0)
    for channel in channels:
        channel.receive(2.0)
    assert (told.heard, other.heard) == ([(1.0 + CHANNEL_DELAY, [4], 5)], [])
    for channel in channels:
        channel.receive(10.0)
    assert told.heard[1:] == [(2.0 + CHANNEL_DELAY, [2], 5)]
    assert other.heard == [(3.0 + CHANNEL_DELAY, [4, 2], 0)]  # each batch of changes stays its own


def test_a_step_without_changes_still_tells_the_load() -> None:
    listener = Listener()
    channel = Channel(0, listener)
    feed = make([channel])
    assert not feed.step(1.0, {0})
    channel.receive(2.0)
    assert [batches for _, batches, _ in listener.heard] == [[]]
    assert feed.step(2.0, set())
    feed.flush(2.5)
    channel.receive(3.0)
    assert [at for at, _, _ in listener.heard] == [1.0 + CHANNEL_DELAY, 2.5 + CHANNEL_DELAY]


def test_messages_arrive_in_the_order_of_their_times() -> None:
    heard: list[str] = []
    channel = Channel(0, Listener())
    channel.send(3.0, lambda: heard.append("late"))
    channel.send(1.0, lambda: heard.append("early"))
    channel.receive(2.0)
    assert heard == ["early"]
    channel.receive(3.0 + CHANNEL_DELAY)
    assert heard == ["early", "late"]
