"""One engine's channels: leases, epochs, bounds, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from engine_client_setting import until
from loopback import LIMITS, CountingEngine
from virtual_time import loop_time, run_virtually

from app.channel import wire
from app.channel.channel_hub import CALL_END_S, ChannelHub
from app.channel.engine_attempt import request_of, run_attempt
from app.channel.engine_channel import MAX_UNACKNOWLEDGED, Attempt, EngineChannel, UnknownEpochError
from engine.engine_thread import StepOutputs
from engine.errors import ClientLimitError, GrammarFault, InvalidRequestError
from engine.request import FinishReason, TokenDelta
from engine.sampling_params import SamplingParams
from engine.scheduling.load_report import EngineLoad
from engine.structured_output import StructuredOutput
from engine.token_logprobs import TokenLogprobs

LEASE_S = 5.0
GRACE_S = 60.0


class Setting:
    """A hub under the loop's clock."""

    def __init__(self, load: EngineLoad | None = None) -> None:
        self.aborted: list[str] = []
        self.streams: list[AsyncIterator[bytes]] = []  # one that is forgotten ends
        self.hub = ChannelHub(
            wire.Hello(LIMITS),
            self.aborted.append,
            clock=loop_time,
            lease_s=LEASE_S,
            grace_s=GRACE_S,
            idle_frame_s=0.02,
            load=load,
        )

    async def open(self, cid: str = "ingress", epoch: int = 1) -> AsyncIterator[bytes]:
        stream = self.hub.stream(cid, epoch)
        frame = wire.unpack_frame(await anext(stream))
        assert frame.hello == wire.Hello(LIMITS)
        assert (frame.epoch, frame.sequence) == (epoch, 0)
        self.streams.append(stream)
        return stream

    def token(self, number: int, index: int, token: int, end: FinishReason | None = None) -> None:
        self.hub.deliver([TokenDelta(f"e{number}", index, (token,), end, final=end is not None)])


def run(test: Callable[[Setting], Coroutine[Any, Any, None]], load: EngineLoad | None = None) -> None:
    async def main() -> None:
        await test(Setting(load))

    run_virtually(main())


async def next_records(stream: AsyncIterator[bytes]) -> list[wire.Record]:
    while True:
        frame = wire.unpack_frame(await anext(stream))
        if frame.records:
            return frame.records


def test_the_engines_name_of_an_attempt_has_the_requests_id() -> None:
    assert [request_of(name) for name in ("a@b@0f:7", "plain")] == ["a@b", "plain"]


def test_tokens_that_have_left_do_not_wait_any_more() -> None:
    channel = EngineChannel("ingress", 1)
    channel.add(wire.Record(1, 0, [5, 6, 7]))
    assert channel.waiting_tokens == 3
    channel.take_frame(0)
    assert channel.waiting_tokens == 0


def test_withheld_tokens_are_queued_once() -> None:
    channel = EngineChannel("ingress", 1)
    attempt = Attempt(1, "e1", channel, Future())  # type: ignore[arg-type]
    attempt.withheld.append(wire.Record(1, 0, [5, 6, 7]))
    for _ in range(2):  # each of its channels breaks
        attempt.stay()
    assert channel.waiting_tokens == 3


def test_records_of_one_step_share_a_frame_and_waiting_tokens_merge() -> None:
    async def test(setting: Setting) -> None:
        stream = await setting.open()
        for number in (1, 2):
            setting.hub.attach("ingress", 1, number, f"e{number}")
        setting.hub.deliver([TokenDelta("e1", 0, (10,)), TokenDelta("e2", 0, (20,))])
        setting.token(1, 1, 11)
        records = await next_records(stream)
        assert [(r.attempt, r.index, r.token_ids) for r in records] == [(1, 0, [10, 11]), (2, 0, [20])]
        setting.token(2, 1, 21, FinishReason.STOP)
        (record,) = await next_records(stream)
        assert (record.index, record.token_ids, record.end) == (1, [21], FinishReason.STOP)

    run(test)


def test_sequences_of_an_attempt_are_apart_and_its_final_record_comes_last() -> None:
    async def test(setting: Setting) -> None:
        stream = await setting.open()
        attempt = setting.hub.attach("ingress", 1, 1, "e1")
        ends = FinishReason.LENGTH
        setting.hub.deliver([TokenDelta("e1", 0, (10 + sequence,), sequence=sequence) for sequence in range(3)])
        setting.hub.deliver([TokenDelta("e1", 1, (21,), ends, sequence=1)])
        setting.hub.deliver([TokenDelta("e1", 1, (32,), sequence=2), TokenDelta("e1", 1, (30,))])
        assert setting.hub.inspect()["ingress"]["attempts"] == 1
        # Sequence 0 began first and ends last: its record must not lead to the end before the others are read.
        setting.hub.deliver(
            [TokenDelta("e1", 2, (42,), ends, sequence=2), TokenDelta("e1", 2, (40,), ends, final=True)]
        )
        records = await next_records(stream)
        assert [(r.attempt, r.sequence, r.index, r.token_ids, r.end, r.final) for r in records] == [
            (1, 1, 0, [11, 21], ends, False),
            (1, 2, 0, [12, 32, 42], ends, False),
            (1, 0, 0, [10, 30, 40], ends, True),
        ]
        assert await attempt.done == 8
        assert setting.hub.inspect()["ingress"]["attempts"] == 0
        assert setting.aborted == []

    run(test)


def test_an_attempt_lives_until_all_its_sequences_have_ended() -> None:
    async def test(setting: Setting) -> None:
        await setting.open()
        attempt = setting.hub.attach("ingress", 1, 1, "e1")
        setting.hub.deliver([TokenDelta("e1", 0, (10,), FinishReason.STOP, sequence=1)])
        assert not attempt.done.done()
        setting.hub.detach(attempt)
        setting.hub._channels["ingress"].drop_records(1)
        assert setting.hub.inspect()["ingress"] == {
            "epoch": 1, "attempts": 0, "unsent": 0, "frames": 1, "acknowledged": 0
        }  # fmt: skip

    run(test)


def test_end_gives_the_count_and_frees_the_attempt() -> None:
    async def test(setting: Setting) -> None:
        await setting.open()
        attempt = setting.hub.attach("ingress", 1, 1, "e1")
        setting.token(1, 0, 10)
        setting.token(1, 1, 11, FinishReason.LENGTH)
        assert await attempt.done == 2
        setting.hub.leave(attempt)
        await asyncio.sleep(2 * CALL_END_S)
        assert setting.hub.inspect()["ingress"]["attempts"] == 0
        assert setting.aborted == []

    run(test)


def test_load_comes_at_once_to_who_opens_a_channel() -> None:
    idle = EngineLoad(0, 0, 0, 0, 30, 0, 9000.0, 0.0, 0, 0, 0, 8, 0, 0, 0)
    busy = replace(
        idle, waiting_tokens=700, running=8, step_seconds=0.01, waiting=4, num_blocked=3, num_lacking=4
    )

    async def test(setting: Setting) -> None:
        # Nothing here waits for a beat, or for a first step.
        hub = setting.hub
        for epoch, load in ((1, idle), (2, busy)):
            stream = await setting.open(epoch=epoch)
            frame = wire.unpack_frame(await anext(stream))
            assert frame.load is not None
            for name in (
                "waiting_tokens",
                "running",
                "free",
                "prefill_rate",
                "waiting",
                "num_blocked",
                "num_lacking",
                "max_running",
                "first_end",
                "half_ended",
                "all_ended",
            ):
                assert getattr(frame.load, name) == getattr(load, name)
            assert (frame.load.acknowledged, frame.load.num_blocks) == (0, LIMITS.num_blocks)
            hub.attach("ingress", epoch, 5, "e5")
            hub.on_step(StepOutputs([], ["e5"], None, busy))
            frame = wire.unpack_frame(await anext(stream))
            assert frame.load is not None
            assert (frame.load.acknowledged, frame.load.waiting) == (5, 4)

    run(test, idle)


def test_silence_is_broken_by_empty_frames() -> None:
    async def test(setting: Setting) -> None:
        stream = await setting.open()
        frame = wire.unpack_frame(await anext(stream))
        assert (frame.records, frame.sequence) == ([], 1)

    run(test)


def test_a_channel_without_beats_is_suspended_keeps_its_tokens_and_goes_on_with_the_next_beat() -> None:
    async def test(setting: Setting) -> None:
        stream = await setting.open()
        attempt = setting.hub.attach("ingress", 1, 1, "e1")
        frames = asyncio.ensure_future(next_records(stream))
        await asyncio.sleep(LEASE_S - 0.1)
        assert setting.hub.beat("ingress", 1, 0)
        await asyncio.sleep(LEASE_S - 0.1)
        setting.token(1, 0, 10)
        assert [record.token_ids for record in await frames] == [[10]]
        await asyncio.sleep(0.2)
        frames = asyncio.ensure_future(next_records(stream))
        for index in range(1, 50):
            await asyncio.sleep(1.0)
            setting.token(1, index, 10 + index, FinishReason.LENGTH if index == 49 else None)
        assert await attempt.done == 50
        assert not frames.done()
        assert setting.hub.beat("ingress", 1, 0)
        (record,) = await frames
        assert (record.index, record.token_ids, record.final) == (1, list(range(11, 60)), True)
        assert setting.aborted == []

    run(test)


def test_a_channel_whose_ingress_stays_silent_ends_and_aborts_what_runs() -> None:
    async def test(setting: Setting) -> None:
        stream = await setting.open()
        attempt = setting.hub.attach("ingress", 1, 1, "e1")
        await asyncio.sleep(GRACE_S - 0.1)
        assert setting.aborted == []
        with pytest.raises(UnknownEpochError, match="no beat for 60 s"):
            await attempt.done
        assert setting.aborted == ["e1"]
        assert not setting.hub.beat("ingress", 1, 0)
        with pytest.raises(UnknownEpochError, match="no beat for 60 s"):
            assert not [wire.unpack_frame(frame).records async for frame in stream]

    run(test)


def test_newer_epoch_replaces_the_older_one() -> None:
    async def test(setting: Setting) -> None:
        older = await setting.open(epoch=1)
        attempt = setting.hub.attach("ingress", 1, 1, "e1")
        await setting.open(epoch=2)
        with pytest.raises(UnknownEpochError, match="epoch 2 replaced it"):
            await attempt.done
        assert setting.aborted == ["e1"]
        with pytest.raises(StopAsyncIteration):
            await anext(older)
        with pytest.raises(UnknownEpochError):
            setting.hub.attach("ingress", 1, 2, "e2")
        with pytest.raises(UnknownEpochError, match="not older"):
            await anext(setting.hub.stream("ingress", 2))
        assert not setting.hub.beat("ingress", 1, 0)
        assert setting.hub.beat("ingress", 2, 0)

    run(test)


def test_channels_of_two_ingresses_are_apart() -> None:
    async def test(setting: Setting) -> None:
        first, second = await setting.open("one"), await setting.open("two")
        setting.hub.attach("one", 1, 1, "e1")
        setting.hub.attach("two", 1, 1, "e2")
        setting.token(1, 0, 10)
        setting.token(2, 0, 20)
        assert [record.token_ids for record in await next_records(first)] == [[10]]
        assert [record.token_ids for record in await next_records(second)] == [[20]]
        await first.aclose()  # type: ignore[attr-defined]
        assert set(setting.hub.inspect()) == {"two"}
        await asyncio.sleep(LEASE_S - 0.1)
        assert setting.aborted == []
        setting.hub.beat("two", 1, 0)
        await asyncio.sleep(0.2)
        assert setting.aborted == ["e1"]

    run(test)


def test_unacknowledged_frames_are_bounded_and_nothing_is_lost() -> None:
    async def test(setting: Setting) -> None:
        stream = await setting.open()
        setting.hub.attach("ingress", 1, 1, "e1")
        tokens: list[int] = []
        frames = 1
        for index in range(3000):
            setting.token(1, index, index)
            if frames < MAX_UNACKNOWLEDGED:
                (record,) = await next_records(stream)
                tokens += record.token_ids
                frames += 1
        waiting = asyncio.ensure_future(next_records(stream))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        state = setting.hub.inspect()["ingress"]
        assert (state["frames"], state["unsent"]) == (MAX_UNACKNOWLEDGED, 1)
        assert setting.hub.beat("ingress", 1, frames)
        (record,) = await waiting
        assert record.index == len(tokens)
        assert tokens + record.token_ids == list(range(3000))

    run(test)


def test_attempts_unknown_to_the_ingress_are_aborted() -> None:
    async def test(setting: Setting) -> None:
        await setting.open()
        lost = setting.hub.attach("ingress", 1, 1, "e1")
        setting.hub.attach("ingress", 1, 2, "e2")
        assert setting.hub.beat("ingress", 1, 0, stale=[1, 77])
        assert setting.aborted == ["e1"]
        with pytest.raises(UnknownEpochError, match="forgot"):
            await lost.done

    run(test)


def test_last_tokens_leave_before_a_dying_engines_channel_ends() -> None:
    async def test(setting: Setting) -> None:
        stream = await setting.open()
        attempt = setting.hub.attach("ingress", 1, 1, "e1")
        setting.token(1, 0, 10)
        setting.hub.close_all("the engine died")
        assert [record.token_ids for record in await next_records(stream)] == [[10]]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(UnknownEpochError, match="the engine died"):
            await attempt.done
        with pytest.raises(UnknownEpochError, match="the engine died"):
            await anext(setting.hub.stream("ingress", 5))

    run(test)


def test_an_attempt_whose_call_ends_is_aborted_and_its_ingress_is_told() -> None:
    async def test(setting: Setting) -> None:
        stream = await setting.open()
        attempt = setting.hub.attach("ingress", 1, 1, "e1")
        setting.token(1, 0, 10)
        setting.hub.leave(attempt)
        await asyncio.sleep(2 * CALL_END_S)
        assert setting.aborted == ["e1"]
        setting.token(1, 1, 11)
        assert [(r.attempt, r.token_ids, r.end, r.final) for r in await next_records(stream)] == [
            (1, [], FinishReason.ABORT, True)
        ]
        state = setting.hub.inspect()["ingress"]
        assert (state["attempts"], state["unsent"]) == (0, 0)

    run(test)


@pytest.mark.parametrize("ended", [False, True])
def test_a_canceled_call_aborts_its_attempt_unless_that_has_ended(ended: bool) -> None:
    async def test(setting: Setting) -> None:
        stream = await setting.open()
        engine = CountingEngine()
        engine.hub = setting.hub
        params = SamplingParams(max_tokens=1 if ended else 9, temperature=0.0)
        payload = wire.pack_submission(wire.Submission("r", 7, [1, 2], params))
        call = asyncio.ensure_future(run_attempt(setting.hub, engine, "ingress", 1, payload))
        await until(lambda: bool(engine.live))
        engine.step()
        call.cancel()
        await asyncio.wait({call})
        await asyncio.sleep(2 * CALL_END_S)
        assert setting.aborted == ([] if ended else ["r@ingress:7"])
        assert setting.hub.inspect()["ingress"]["attempts"] == 0
        await stream.aclose()  # type: ignore[attr-defined]

    run(test)


class CompilingEngine(CountingEngine):
    """Compiles when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.compiling: Future[Any] = Future()
        self.senders: list[str] = []

    def compile(self, form: StructuredOutput, sender: str) -> Future[Any]:
        self.senders.append(sender)
        return self.compiling


def test_an_attempt_waits_for_its_grammar() -> None:
    """It is queued with what was compiled, refused with the reason, or gone if the client has left before."""

    async def test(setting: Setting) -> None:
        stream = await setting.open()
        params = SamplingParams(max_tokens=3, structured_output=StructuredOutput("json_object"))
        payload = wire.pack_submission(wire.Submission("r", 7, [1, 2], params, client="c", sender="s"))
        grammar = object()
        refusal = InvalidRequestError("no", "structured_output", "invalid_grammar")
        answers: dict[Exception, dict[str, Any]] = {
            refusal: {"invalid": (refusal.message, refusal.param, refusal.code)},
            GrammarFault("later"): {"failed": "later"},
            ClientLimitError("too long", 2): {"limited": ("too long", 2)},
        }
        for outcome in (grammar, *answers, None):
            engine = CompilingEngine()
            engine.hub = setting.hub
            call = asyncio.ensure_future(run_attempt(setting.hub, engine, "ingress", 1, payload))
            await asyncio.sleep(5)
            assert not call.done()
            assert engine.submitted == []
            assert engine.senders == ["s"]
            if outcome is grammar:
                engine.compiling.set_result(outcome)
                await until(lambda engine=engine: bool(engine.live))
                assert [request.grammar for request in engine.live.values()] == [grammar]
                for _ in range(3):
                    engine.step()
                assert await call == {"generated": 3}
            elif isinstance(outcome, Exception):
                engine.compiling.set_exception(outcome)
                assert await call == answers[outcome]
            else:
                call.cancel()
                await asyncio.wait({call})
                assert engine.compiling.cancelled()
            assert engine.live == {}
            assert setting.hub.inspect()["ingress"]["attempts"] == 0
        await stream.aclose()  # type: ignore[attr-defined]

    run(test)


def test_blocked_property_counts_frames_in_flight() -> None:
    channel = EngineChannel("c", 1, sequence=MAX_UNACKNOWLEDGED - 1)
    assert not channel.blocked
    channel.sequence += 1
    assert channel.blocked


def test_the_prompts_log_probabilities_leave_first() -> None:
    """Those of all sequences are needed when the first of them is read, though its own record leaves last."""

    async def test() -> None:
        channel = EngineChannel("ingress", 1)
        of_prompt = (TokenLogprobs(-1.0, 1),)
        channel.add(wire.Record(1, 0, [5], sequence=0, prompt_logprobs=of_prompt))
        channel.add(wire.Record(1, 0, [6], sequence=1, end=FinishReason.STOP))
        channel.add(wire.Record(1, 1, [5], sequence=0, end=FinishReason.STOP, final=True))
        records = wire.unpack_frame(channel.take_frame(0)).records
        assert [(record.sequence, record.prompt_logprobs) for record in records] == [(1, of_prompt), (0, None)]
        channel.add(wire.Record(2, 0, [5], prompt_logprobs=of_prompt))
        channel.add(wire.Record(2, 1, [5], end=FinishReason.STOP, final=True))
        (record,) = wire.unpack_frame(channel.take_frame(1)).records
        assert (record.token_ids, record.prompt_logprobs) == ([5, 5], of_prompt)

    asyncio.run(test())
