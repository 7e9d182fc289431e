"""Requests for several sequences outlive their replica as single ones do, each sequence by itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine_client_setting import break_at_random, collect, collect_all, quiet, run, started, until
from engine_client_setting import request as single
from loopback import LoopbackHandle, LoopbackReplica, expected_tokens, stepping
from ray.exceptions import RayTaskError

from app.channel import wire
from app.fleet.engine_client import EngineClient
from app.fleet.generation import Delta, GenerateRequest, GenerationError, UnavailableError
from app.fleet.in_flight import EXPECTED_TOKENS, InFlightRequest
from app.routing.fleet_estimates import OutputLength
from app.routing.ledger import Ledger, Route
from app.routing.routing_meta import RoutingMeta
from engine.errors import InvalidRequestError
from engine.kv.block_groups import GroupBy
from engine.request import COMPUTATION, FinishReason, RequestStats, TokenDelta
from engine.sampling_params import SamplingParams
from engine.structured_output import FORM_FAILED


def request(prompt: list[int], n: int, max_tokens: int = 30, **params: Any) -> GenerateRequest:
    return GenerateRequest("r", prompt, SamplingParams(max_tokens=max_tokens, n=n, **params))


def expected(prompt: list[int], n: int, max_tokens: int = 30) -> list[list[int]]:
    return [expected_tokens(prompt, max_tokens, sequence) for sequence in range(n)]


def busy(handle: LoopbackHandle) -> LoopbackReplica:
    return next(replica for replica in handle.replicas.values() if replica.engine.live and not replica.dead)


def assert_learned(handle: LoopbackHandle, outputs: list[list[int]]) -> None:
    """One request has ended: what comes of a sequence is learned from all of its own, whoever made them."""
    before, learned = Ledger().typical_output, OutputLength()
    learned.learn(sum(map(len, outputs)) / len(outputs))
    assert handle.fleet.ledger.typical_output == pytest.approx(learned.tokens)
    assert learned.tokens != before


async def until_busy(handle: LoopbackHandle) -> LoopbackReplica:
    await until(lambda: any(replica.engine.live and not replica.dead for replica in handle.replicas.values()))
    return busy(handle)


async def failing(
    handle: LoopbackHandle, client: EngineClient, message: str
) -> asyncio.Future[list[list[int]]]:
    """A request whose engine has said ``message`` of it: that it has failed."""
    job = asyncio.ensure_future(collect_all(client, request([5], 1, 500)))
    only = await until_busy(handle)
    (name,) = only.engine.live
    only.engine.live.clear()
    only.hub.deliver([TokenDelta(name, 0, (), FinishReason.ERROR, error=message, final=True)])
    return job


def test_sequences_arrive_each_whole_and_leave_nothing() -> None:
    async def test() -> None:
        handle, client = await started(2)
        async with stepping(handle):
            results = await asyncio.gather(*(collect_all(client, request([i], 1 + i % 5)) for i in range(20)))
            assert results == [expected([i], 1 + i % 5) for i in range(20)]
            await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


def test_every_unfinished_sequence_goes_on_after_a_kill_and_ended_ones_do_not_run_again() -> None:
    async def test() -> None:
        handle, client = await started(2)
        job = asyncio.ensure_future(collect_all(client, request([5], 4, 20)))
        victim = await until_busy(handle)
        for _ in range(18):
            victim.engine.step()
            await asyncio.sleep(0.002)
        (made,) = victim.engine.made.values()
        assert set(made) == {0, 1}, "sequences 2 and 3 have ended"
        victim.kill()
        other = await until_busy(handle)
        (moved,) = other.engine.live.values()
        assert moved.token_ids == [5]
        assert moved.generated_before == 0
        assert moved.outputs[2:] == (None, None)
        assert [len(output or ()) for output in moved.outputs[:2]] == [18, 18]
        async with stepping(handle):
            assert await job == expected([5], 4, 20)
            await until(lambda: quiet(handle, client))
        assert_learned(handle, expected([5], 4, 20))
        await client.stop()

    run(test)


def test_ranked_requests_begin_again() -> None:
    async def test() -> None:
        handle, client = await started(2)
        wanted = request([7], 2, 40, best_of=4, temperature=1.0)
        job = asyncio.ensure_future(collect_all(client, wanted))
        victim = await until_busy(handle)
        for _ in range(20):
            victim.engine.step()
        victim.kill()
        other = await until_busy(handle)
        (moved,) = other.engine.live.values()
        assert (moved.token_ids, moved.outputs, moved.generated_before) == ([7], (), 0)
        assert moved.params.best_of == 4
        assert moved.params.seed is not None
        async with stepping(handle):
            assert await job == expected([7], 2, 40)
            await until(lambda: quiet(handle, client))
        assert_learned(handle, expected([7], 2, 40))
        await client.stop()

    run(test)


def test_a_single_beam_search_result_begins_again_too() -> None:
    async def test() -> None:
        handle, client = await started(2)
        wanted = request([7], 1, 10, use_beam_search=True, beam_width=3)
        job = asyncio.ensure_future(collect(client, wanted))
        victim = await until_busy(handle)
        victim.engine.step()
        victim.kill()
        async with stepping(handle):
            assert await job == expected_tokens([7], 10)
        await client.stop()

    run(test)


def test_leaving_early_aborts_all_sequences_at_once() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        deltas = client.generate(request([5], 3, 500))
        async with stepping(handle):
            async for delta in deltas:
                if delta.index == 3:
                    break
            await deltas.aclose()  # type: ignore[attr-defined]
            await until(lambda: len(only.engine.aborted) == 1)
            await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


def test_a_sequence_that_its_text_has_ended_is_computed_no_further() -> None:
    """Neither here nor, after a kill, on the next replica; the others lose nothing."""

    async def test() -> None:
        handle, client = await started(2)
        wanted = request([5], 3, 300)
        outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
        killed, running = "", set[int]()  # the first replica; what runs on the second
        async with stepping(handle):
            async for delta in client.generate(wanted):
                outputs[delta.sequence] += delta.token_ids
                if delta.sequence == 1 and delta.index == 4:
                    wanted.text_end.on_sequence_end(1)
                for replica in handle.replicas.values():
                    if killed and replica.name != killed:
                        running |= {number for made in replica.engine.made.values() for number in made}
                    elif replica.engine.ended and not killed:
                        assert [number for _, number in replica.engine.ended] == [1]
                        killed = replica.name
                        replica.kill()
            await until(lambda: quiet(handle, client))
        assert killed
        (second,) = [replica for replica in handle.replicas.values() if replica.name != killed]
        assert len(second.engine.submitted) == 1
        assert running == {0, 2}
        assert [outputs[0], outputs[2]] == expected([5], 3, 300)[::2]
        assert outputs[1] == expected([5], 3, 300)[1][: len(outputs[1])]
        assert len(outputs[1]) < 100
        await client.stop()

    run(test)


@pytest.mark.parametrize("channel_breaks", [True, False])
def test_the_engine_learns_of_a_sequence_that_its_text_has_ended_although_the_beat_is_lost(
    channel_breaks: bool,
) -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        beat, lost = only.hub.beat, []

        def lossy(
            cid: str,
            epoch: int,
            acknowledged: int,
            stale: list[int],
            unwanted: list[tuple[int, int]],
            resync: bool = False,
            last: bool = False,
        ) -> bool:
            if not lost and unwanted:
                lost.append(unwanted)
                if channel_breaks:
                    only.hub.close(only.hub._channels[cid], "a test broke it")
                raise ConnectionError("the beat was lost")
            return beat(cid, epoch, acknowledged, stale, unwanted, resync, last)

        only.hub.beat = lossy  # type: ignore[method-assign]
        wanted = request([5], 3, 300)
        deltas = client.generate(wanted)
        reading = asyncio.ensure_future(anext(deltas))
        await until_busy(handle)
        only.engine.step()
        first = await reading
        wanted.text_end.on_sequence_end(1)
        await until(lambda: bool(only.engine.ended))
        assert [number for _, number in only.engine.ended] == [1]
        assert len(lost) == 1
        async with stepping(handle):
            outputs: list[list[int]] = [[], [], []]
            outputs[first.sequence] += first.token_ids
            async for delta in deltas:
                outputs[delta.sequence] += delta.token_ids
        assert outputs == [expected([5], 3, 300)[0], [105], expected([5], 3, 300)[2]]
        assert len(only.engine.submitted) == 1
        await client.stop()

    run(test)


@pytest.mark.parametrize("stopped", [True, False])
def test_a_request_that_its_text_ends_teaches_its_length_and_one_that_is_left_does_not(stopped: bool) -> None:
    async def test() -> None:
        handle, client = await started(1)
        before = handle.fleet.ledger.typical_output
        wanted = request([5], 2, 500)
        deltas = client.generate(wanted)
        reading = asyncio.ensure_future(anext(deltas))
        only = await until_busy(handle)
        only.engine.step()
        await reading
        if stopped:
            wanted.text_end.tokens = 22
        await deltas.aclose()  # type: ignore[attr-defined]
        await until(lambda: quiet(handle, client))
        if stopped:
            assert_learned(handle, [[0] * 11, [0] * 11])
        else:
            assert handle.fleet.ledger.typical_output == before
        await client.stop()

    run(test)


def test_an_answer_teaches_its_length_while_it_runs_and_counts_once() -> None:
    async def test() -> None:
        handle, client = await started(1)
        job = asyncio.ensure_future(collect(client, single([5], 600)))
        only = await until_busy(handle)
        for _ in range(550):
            only.engine.step()
        await until(lambda: handle.fleet.ledger.typical_output > EXPECTED_TOKENS)
        assert handle.fleet.ledger.typical_output == pytest.approx((256 + 512) / 2), "one has outgrown 512"
        async with stepping(handle):
            assert await job == expected_tokens([5], 600)
        await until(lambda: quiet(handle, client))
        assert_learned(handle, [[0] * 600])
        await client.stop()

    run(test)


def test_an_error_in_one_sequence_ends_the_request_with_it() -> None:
    async def test() -> None:
        handle, client = await started(1)
        job = asyncio.ensure_future(collect_all(client, request([5], 3, 500, use_beam_search=True)))
        only = await until_busy(handle)
        (name,) = only.engine.live
        only.engine.live.clear()
        # Live beams have numbers and lengths that no result has.
        only.hub.deliver(
            [
                TokenDelta(name, 17, (), FinishReason.ERROR, error="it broke", sequence=70),
                TokenDelta(name, 17, (), FinishReason.ERROR, error="it broke", sequence=71, final=True),
            ]
        )
        with pytest.raises(GenerationError, match="it broke"):
            await job
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


def test_why_a_computation_failed_is_for_the_log_and_not_for_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The texts of errors may name paths of the server."""

    async def test() -> None:
        handle, client = await started(1)
        job = await failing(handle, client, f"{COMPUTATION} failed: no file /srv/models/private")
        with pytest.raises(GenerationError) as failed:
            await job
        assert str(failed.value) == "the request's computation failed; the server's log says why"
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)
    told = [record.getMessage() for record in caplog.records if record.levelno >= 40]
    assert ["private" in line for line in told] == [True]


def test_a_form_that_became_too_complex_is_the_fault_of_its_request() -> None:
    async def test() -> None:
        handle, client = await started(1)
        job = await failing(handle, client, f"{FORM_FAILED}: too many states")
        with pytest.raises(InvalidRequestError, match="too many states") as caught:
            await job
        assert caught.value.code == "invalid_grammar"
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


def test_a_record_of_a_sequence_that_is_not_due_moves_the_request() -> None:
    async def test() -> None:
        handle, client = await started(2)
        job = asyncio.ensure_future(collect_all(client, request([5], 2, 10)))
        first = await until_busy(handle)
        (name,) = first.engine.live
        first.engine.step()
        await asyncio.sleep(0.01)
        first.hub.deliver([TokenDelta(name, 5, (1,), sequence=1)])
        await until(lambda: not first.engine.live)
        async with stepping(handle):
            assert await job == expected([5], 2, 10)
        await client.stop()

    run(test)


def test_an_engine_that_ends_before_all_sequences_have_is_found_out() -> None:
    live = InFlightRequest(request([1], 2))
    live.accept(wire.Record(1, 0, [4], end=FinishReason.STOP, sequence=1, final=True))
    assert live.ended
    with pytest.raises(GenerationError):
        asyncio.run(live.deltas.get())


def test_what_is_due() -> None:
    live = InFlightRequest(request([1], 2))
    live.accept(wire.Record(1, 0, [4, 5], sequence=1))
    live.accept(wire.Record(1, 0, [4], end=FinishReason.STOP, sequence=0))
    assert live.continues(wire.Record(1, 2, [6], sequence=1))
    assert not live.continues(wire.Record(1, 0, [4], sequence=1))
    assert not live.continues(wire.Record(1, 1, [6], sequence=0)), "it has ended"
    assert not live.continues(wire.Record(1, 0, [6], sequence=2)), "there is none"
    assert live.continues(wire.Record(1, 9, [], end=FinishReason.ABORT, sequence=99))


def test_the_prompt_is_booked_once_and_the_output_for_each_sequence() -> None:
    plain = InFlightRequest(request(list(range(50)), 3, 100))
    assert plain.routing_meta(1).prefill == 50
    assert plain.routing_meta(1).decode == 3 * 100
    plain.accept(wire.Record(1, 0, [1] * 40, sequence=1))
    plain.accept(wire.Record(1, 0, [1] * 10, end=FinishReason.STOP, sequence=0))
    assert plain.routing_meta(2).prefill == 50 + 40
    assert plain.routing_meta(2).decode == 60 + 100
    beams = InFlightRequest(request([1], 1, 1000, use_beam_search=True, beam_width=5))
    assert beams.routing_meta(1).decode == 5 * EXPECTED_TOKENS


def test_outputs_that_are_longer_here_are_expected_to_be() -> None:
    ledger = Ledger()
    ledger.open(Route("r", 1))
    for attempt in range(300):
        live = InFlightRequest(request([1] * 50, 1, 2000))
        live.typical_output = ledger.typical_output
        ledger.expect(attempt)
        booking = ledger.book(RoutingMeta("r", attempt, 50, live.routing_meta(attempt).decode))
        ledger.release(attempt, generated=1500)
    assert 1400 < booking.decode <= 1500
    live = InFlightRequest(request([1] * 50, 1, 100))
    live.typical_output = ledger.typical_output
    assert live.routing_meta(1).decode == 100


def test_sequences_that_can_never_run_are_refused() -> None:
    async def test() -> None:
        _, client = await started(1)
        with pytest.raises(InvalidRequestError, match="beams"):
            await collect_all(client, request([1], 2, 9000, use_beam_search=True, beam_width=60))
        await client.stop()

    run(test)


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_lose_and_double_nothing(seed: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        handle, client = await started(3, unavailable_after_s=5.0)
        wanted = [
            request([index, seed], 1 + index % 4, 300, **({"best_of": 5} if index % 3 == 0 else {}))
            for index in range(24)
        ]
        jobs = [asyncio.ensure_future(collect_all(client, one)) for one in wanted]
        async with stepping(handle):
            await break_at_random(handle, rng)
            results = await asyncio.gather(*jobs)
            assert results == [expected(one.token_ids, one.params.n, 300) for one in wanted]
            await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


# ---- the prefix caches


async def with_caches(replicas: int) -> tuple[LoopbackHandle, EngineClient]:
    handle, client = await started(replicas)
    for count, replica in enumerate(handle.replicas.values(), start=1):
        replica.cached_blocks = 10 * count
    return handle, client


def test_every_routable_replica_empties_its_prefix_cache() -> None:
    async def test() -> None:
        _, client = await with_caches(3)
        reset = await client.reset_prefix_cache()
        assert reset.freed_blocks == {"replica-0": 10, "replica-1": 20, "replica-2": 30}
        assert reset.failures == {}
        assert sum((await client.reset_prefix_cache()).freed_blocks.values()) == 0
        await client.stop()

    run(test)


def test_a_replica_that_fails_is_named_and_the_others_do_it_all_the_same() -> None:
    async def test() -> None:
        handle, client = await with_caches(2)
        handle.replicas["replica-0"].dead = True  # its channel does not know yet
        reset = await client.reset_prefix_cache()
        assert reset.freed_blocks == {"replica-1": 20}
        assert reset.failures == {"replica-0": "the replica is unavailable"}
        await client.stop()

    run(test)


def test_a_reset_that_fails_because_of_a_defect_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        handle, client = await with_caches(1)

        def reset(**_: object) -> object:
            raise RayTaskError("reset_prefix_cache", "", KeyError("a defect"))

        handle.reset_prefix_cache.remote = reset
        outcome = await client.reset_prefix_cache()
        assert list(outcome.failures) == ["replica-0"]
        assert client.inspect()["call_faults"] == 1
        (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert record.getMessage() == "resetting the prefix cache of replica replica-0 failed"
        assert record.exc_info is not None
        await client.stop()

    run(test)


def test_an_operator_who_leaves_leaves_no_replica_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        handle, client = await with_caches(2)
        answer, remote = asyncio.Event(), handle.reset_prefix_cache.remote

        async def late(*, target: str) -> int:
            await answer.wait()
            return int(await remote(target=target))

        monkeypatch.setattr(handle.reset_prefix_cache, "remote", late)
        asked = asyncio.ensure_future(client.reset_prefix_cache())
        await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        answer.set()
        await until(lambda: not any(replica.cached_blocks for replica in handle.replicas.values()))
        await client.stop()

    run(test)


def test_without_a_replica_there_is_nothing_to_empty() -> None:
    async def test() -> None:
        _, client = await started(0)
        with pytest.raises(UnavailableError):
            await client.reset_prefix_cache()
        await client.stop()

    run(test)


def test_single_requests_run_beside_families() -> None:
    async def test() -> None:
        handle, client = await started(2)
        async with stepping(handle):
            family = asyncio.ensure_future(collect_all(client, request([9], 4)))
            alone = asyncio.ensure_future(collect(client, single([9])))
            assert (await family)[0] == await alone == expected_tokens([9], 30)
        await client.stop()

    run(test)


# ---- the block map of one replica


def test_the_chosen_replica_says_what_its_blocks_hold() -> None:
    async def test() -> None:
        handle, client = await with_caches(2)
        found = await client.block_map("replica-1", GroupBy.PREFIX, [7])
        assert (found.each, found.device, found.names) == (1, bytes(20), ("prefix", "7"))
        with pytest.raises(UnavailableError, match="no channel to a replica 'replica-7'"):
            await client.block_map("replica-7")
        handle.replicas["replica-1"].dead = True  # its channel does not know yet
        with pytest.raises(UnavailableError, match="the replica is unavailable"):
            await client.block_map("replica-1")
        await client.stop()

    run(test)


def test_a_replica_of_an_older_version_says_nothing_of_its_blocks_and_is_no_defect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        class Older:
            async def block_map(self, *, target: str) -> str:
                return target

            block_map.__qualname__ = "EngineReplica.block_map"

        async def fail(*arguments: object, **named: object) -> str:
            raise TypeError("a defect")

        def remote(*arguments: object, **named: object) -> object:
            try:
                return Older().block_map(*arguments, **named)  # type: ignore[arg-type]
            except TypeError as error:
                raise RayTaskError("block_map", "", error) from error

        def reset(**named: object) -> object:
            error = TypeError("EngineReplica.reset_prefix_cache() got an unexpected keyword argument 'target'")
            raise RayTaskError("reset_prefix_cache", "", error)

        handle, client = await started(1)
        handle.reset_prefix_cache.remote = reset
        outcome = await client.reset_prefix_cache()
        assert outcome.failures == {"replica-0": "it runs a different version of Quire than this ingress"}
        assert client.inspect()["call_faults"] == 0
        handle.block_map.remote = remote
        with pytest.raises(UnavailableError, match="different version of Quire than this ingress"):
            await client.block_map("replica-0")
        assert "failed" not in caplog.text
        handle.block_map.remote = fail
        with pytest.raises(UnavailableError, match="a defect"):
            await client.block_map("replica-0")
        assert "the block map of replica replica-0 failed" in caplog.text
        assert client.inspect()["call_faults"] == 1
        await client.stop()

    run(test)


def test_a_replica_that_dies_when_no_sequence_is_wanted_any_more_takes_no_request_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One has ended by itself, and its last tokens have not been read yet when the text ends the other."""

    async def test() -> None:
        handle, client = await started(2)
        wanted = GenerateRequest("r", [7], SamplingParams(max_tokens=3, temperature=0.0, n=2))
        deltas = client.generate(wanted)
        reading = asyncio.ensure_future(anext(deltas))
        await until(lambda: any(replica.engine.live for replica in handle.replicas.values()))
        (live,) = client._requests
        handle.step()
        await reading
        handle.step()
        await until(lambda: live.finished == [False, True])
        wanted.text_end.on_sequence_end(0)
        for replica in handle.replicas.values():
            if replica.engine.live:
                replica.kill()
        await until(lambda: live.runner is None)
        ended = [delta.sequence async for delta in until_ended(deltas) if delta.finish_reason]
        assert ended == [1]
        await client.stop()

    async def until_ended(deltas: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
        async for delta in deltas:
            yield delta
            if delta.finish_reason is not None:
                return

    run(test)
    assert not [one.getMessage() for one in caplog.records if one.name.startswith("app") and one.levelno >= 40]


def test_what_a_ranked_request_generates_is_known_before_its_end() -> None:
    """A retry begins again, for which its client does not pay."""
    beams = InFlightRequest(request([1], 1, 1000, use_beam_search=True, beam_width=5))
    for attempt, tokens in ((1, 64), (2, 32)):
        beams.begin_attempt(attempt, 1.0)
        packed = wire.pack_records(1, 0, [wire.Record(attempt, 0, [], stats=RequestStats(generated=tokens))])
        (record,) = wire.unpack_frame(packed).records
        assert beams.continues(record)
        beams.accept(record)
        assert (beams.notes.generated, beams.request.journal.generated) == (tokens, 64)
    assert not beams.deltas._waiting
