"""Ingress processes that know nothing of each other agree on what replicas hold and how busy they are."""

from __future__ import annotations

import random

from engine_client_setting import run, until
from kv_loopback import KvIngress, KvReplica


def digests(ingress: KvIngress) -> dict[str, object]:
    return {replica: state["digest"] for replica, state in ingress.feed.state().items()}


def test_all_ingresses_hold_the_same_index() -> None:
    async def test() -> None:
        rng = random.Random(5)
        replicas = [KvReplica(name, blocks=24) for name in ("a", "b", "c")]
        one, two = (KvIngress(*replicas, cid=cid) for cid in ("one", "two"))
        for _ in range(200):
            rng.choice(replicas).step(*rng.choices(range(60), k=3))
        await until(lambda: all(i.in_step(replica) for i in (one, two) for replica in replicas))
        assert digests(one) == digests(two)
        assert None not in digests(one).values()
        for text in range(60):
            assert one.holds(text) == two.holds(text)
        await one.stop()
        await two.stop()

    run(test)


def test_an_ingress_hears_of_work_that_others_have_sent() -> None:
    async def test() -> None:
        replica = KvReplica("a")
        one, two = (KvIngress(replica, cid=cid) for cid in ("one", "two"))
        await until(lambda: one.in_step(replica) and two.in_step(replica))
        table = replica.pool.allocate(5)
        assert table is not None
        replica.step()
        await until(lambda: all(i.loads and i.loads[-1].referenced == 5 for i in (one, two)))
        await one.stop()
        await two.stop()

    run(test)


def test_a_restarted_ingress_is_in_step_with_its_first_snapshot() -> None:
    async def test() -> None:
        replicas = [KvReplica(name) for name in ("a", "b")]
        one = KvIngress(*replicas, cid="one")
        for text in range(20):
            replicas[text % 2].step(text)
        await until(lambda: all(one.in_step(replica) for replica in replicas))
        before = digests(one)
        assert all(state["synced"] >= state["opened"] for state in one.feed.state().values())
        await one.stop()
        assert one.feed.state() == {}
        again = KvIngress(*replicas, cid="again")
        await until(lambda: len(again.routes) == 2)
        await until(lambda: all(state["synced"] is not None for state in again.feed.state().values()))
        assert digests(again) == before
        assert [replica.snapshots for replica in replicas] == [2, 2]
        await again.stop()

    run(test)
