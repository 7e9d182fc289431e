"""A fault never multiplies the load: resubmissions have a budget, and beyond it they wait."""

from __future__ import annotations

import asyncio

from engine_client_setting import collect, quiet, request, run, started, until
from loopback import expected_tokens, stepping
from virtual_time import loop_time, run_virtually

from app.fleet.resubmission_budget import FLOOR, REFILL_S, SHARE, ResubmissionBudget


def test_one_for_each_live_request_at_once_and_then_no_faster_than_it_refills() -> None:
    async def test() -> None:
        live, began = 200, loop_time()
        budget = ResubmissionBudget(lambda: live, loop_time)
        times: list[float] = []

        async def resubmit() -> None:
            await budget.take()
            times.append(loop_time() - began)

        jobs = [asyncio.ensure_future(resubmit()) for _ in range(400)]
        await asyncio.sleep(0.1)
        assert len(times) == FLOOR + live
        assert budget.waiting == 400 - len(times)
        await asyncio.sleep(REFILL_S / 4)
        assert abs(len(times) - (FLOOR + live) * 1.25) < 5
        await asyncio.gather(*jobs)
        assert (budget.waiting, budget.resubmitted) == (0, 400)
        assert times[-1] > (400 - FLOOR - live) / (FLOOR + live) * REFILL_S - 1

    run_virtually(test())


def spent() -> ResubmissionBudget:
    """One that time does not fill."""
    budget = ResubmissionBudget(lambda: 0, lambda: 0.0)
    assert all(budget._take() for _ in range(int(FLOOR)))
    assert not budget._take()
    return budget


def test_each_submission_adds_a_share() -> None:
    async def test() -> None:
        budget = spent()
        for _ in range(round(10 / SHARE)):
            budget.submitted()
        assert sum(budget._take() for _ in range(20)) in (9, 10)

    asyncio.run(test())


def test_a_request_that_leaves_while_it_waits_is_not_counted() -> None:
    async def test() -> None:
        budget = spent()
        job = asyncio.ensure_future(budget.take())
        await asyncio.sleep(1.0)
        assert budget.waiting == 1
        job.cancel()
        await asyncio.wait({job})
        assert (budget.waiting, budget.resubmitted) == (0, 0)

    run_virtually(test())


def test_channels_that_break_again_and_again_do_not_multiply_the_requests() -> None:
    async def test() -> None:
        handle, client = await started(2)
        jobs = [asyncio.ensure_future(collect(client, request([index], 40))) for index in range(40)]
        replicas = list(handle.replicas.values())
        submitted = [replica.engine.submitted for replica in replicas]
        await until(lambda: sum(map(len, submitted)) == 40)
        for _ in range(20):
            for replica in replicas:
                for channel in list(replica.hub._channels.values()):
                    channel.lapsed = True  # the ingress's own doing
                    replica.hub.close(channel, "a test broke it", keep=False)
            await asyncio.sleep(0.5)
        seconds = 20 * 0.5
        assert sum(map(len, submitted)) <= 40 + (FLOOR + 40) * (1 + seconds / REFILL_S) + 1
        assert client.status()["resubmissions_waiting"] > 0
        async with stepping(handle):
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 40) for index in range(40)]
        await until(lambda: quiet(handle, client))
        assert client.status()["resubmissions_waiting"] == 0
        await client.stop()

    run(test)
