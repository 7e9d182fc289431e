"""What Quire relies on inside this release of Ray Serve, beyond its public interface."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter

import pytest
import ray
from local_cluster import SOON_S
from ray import serve
from ray.serve._private import controller as controller_module
from ray.serve._private.router import AsyncioRouter
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter

from app.fleet.engine_client import EngineClient
from app.fleet.generation import GenerateRequest
from app.launch import serving
from app.launch.ray_processes import pace_controller
from app.routing import fleet
from app.routing.policies import Policy
from engine.sampling_params import SamplingParams
from loadtests.cluster import LocalCluster


def test_ray_is_the_release_that_was_read() -> None:
    assert ray.__version__.startswith("2.60.")


def test_serve_chooses_by_the_method_that_is_overridden() -> None:
    parameters = inspect.signature(RequestRouter._choose_replica_for_request).parameters
    assert list(parameters) == ["self", "pending_request", "is_retry"]
    assert parameters["is_retry"].kind is inspect.Parameter.KEYWORD_ONLY
    source = inspect.getsource(AsyncioRouter._route_and_send_request_once)
    assert source.count("_choose_replica_for_request(") == 1
    # Between the choice and the sending, nothing may wait: what the choice writes into the arguments is sent.
    between = source.split("_choose_replica_for_request(")[1].split("try_send_request(")[0]
    assert "await" not in between


def test_pending_requests_carry_the_callers_own_arguments() -> None:
    fields = PendingRequest.__dataclass_fields__
    assert {"args", "kwargs", "metadata"} <= fields.keys()


def test_handles_take_the_grpc_transport() -> None:
    assert "_by_reference" in inspect.signature(DeploymentHandle.options).parameters


def test_the_controller_takes_another_interval(bare_cluster: LocalCluster) -> None:
    controller = _get_global_client()._controller

    def interval(_: object) -> float:
        from ray.serve._private import controller as module

        return float(module.CONTROL_LOOP_INTERVAL_S)

    before = ray.get(controller.__ray_call__.remote(interval))
    try:
        assert ray.get(pace_controller(controller, before + 0.05)), "this Ray has no such interval"
        assert ray.get(controller.__ray_call__.remote(interval)) == before + 0.05
    finally:
        ray.get(pace_controller(controller, before))
    source = inspect.getsource(controller_module)
    assert "asyncio.sleep(CONTROL_LOOP_INTERVAL_S)" in source, "it is read anew in each turn of the loop"


def test_burst_is_booked_evenly_and_pinned_calls_keep_their_replica(cluster: LocalCluster) -> None:
    handle = serve.get_deployment_handle("engine", serving.APP_NAME)

    async def burst() -> tuple[Counter[str], list[str]]:
        # By what is booked alone: the replicas' own figures differ where others take the processor from one.
        client = EngineClient(handle, unavailable_after_s=SOON_S, policy=Policy.LEAST_TOKENS)
        await client.start()
        async with asyncio.timeout(SOON_S):
            while client.status()["routable"] < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        members = fleet.get_fleet(serving.APP_NAME).members
        wanted = [
            GenerateRequest(f"burst-{index}", [1, 2, 3, index], SamplingParams(max_tokens=8, temperature=0.0))
            for index in range(64)
        ]
        jobs = [asyncio.ensure_future(_finish(client, request)) for request in wanted]
        await asyncio.sleep(0)
        chosen: Counter[str] = Counter()
        seen: set[int] = set()
        while not all(job.done() for job in jobs):
            for attempt in range(1, 65):
                booking = fleet.get_fleet(serving.APP_NAME).ledger.booking(attempt)
                if booking is not None and attempt not in seen:
                    seen.add(attempt)
                    chosen[booking.route.replica] += 1
            await asyncio.sleep(0.002)
        await asyncio.gather(*jobs)
        pinned = [(await handle.inspect.remote(target=name))["replica"] for name in members for _ in range(3)]
        assert pinned == [name for name in members for _ in range(3)]
        await client.stop()
        return chosen, pinned

    chosen, _ = asyncio.run(burst())
    assert len(chosen) == 2
    assert max(chosen.values()) - min(chosen.values()) <= 2 + 64 - sum(chosen.values())


def test_call_pinned_to_a_replica_that_is_gone_fails(cluster: LocalCluster) -> None:
    handle = serve.get_deployment_handle("engine", serving.APP_NAME)
    with pytest.raises(Exception, match="engine replica nobody is gone"):
        handle.inspect.remote(target="nobody").result(timeout_s=30)


async def _finish(client: EngineClient, request: GenerateRequest) -> None:
    async for _ in client.generate(request):
        pass
