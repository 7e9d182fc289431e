"""What one engine keeps of a channel that broke, for whom, for how long, and what goes on on the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from loopback import LIMITS
from virtual_time import loop_time, run_virtually

from app.channel import channel_hub, wire
from app.channel.channel_hub import CALL_END_S, KEEP_S, LEASE_S, UNREAD_S, ChannelHub
from app.channel.engine_channel import UnknownEpochError
from app.channel.wire_resume import AttemptClaim, Resumption, pack_resumption, unpack_resumption
from engine.request import FinishReason, TokenDelta
from engine.token_logprobs import TokenLogprobs


class Setting:
    """A hub under the loop's clock; engine request ``eN`` is attempt N."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.streams: list[AsyncIterator[bytes]] = []  # one that is forgotten ends
        self.hub = ChannelHub(wire.Hello(LIMITS), self.aborted.append, clock=loop_time)

    async def open(
        self, epoch: int, *claims: AttemptClaim, cid: str = "ingress", of: int | None = None
    ) -> tuple[AsyncIterator[bytes], tuple[int, ...]]:
        """A channel, and the attempts that go on there."""
        resumption = pack_resumption(epoch - 1 if of is None else of, claims) if claims else b""
        stream = self.hub.stream(cid, epoch, resumption)
        self.streams.append(stream)
        hello = wire.unpack_frame(await anext(stream)).hello
        assert hello is not None
        return stream, hello.resumed

    def token(self, number: int, index: int, sequence: int = 0, end: FinishReason | None = None) -> None:
        """Token ``10 * index + sequence``."""
        token = 10 * index + sequence
        self.hub.deliver(
            [TokenDelta(f"e{number}", index, (token,), end, sequence=sequence, final=end is not None)]
        )

    def break_(self, cid: str = "ingress") -> None:
        self.hub.close(self.hub._channels[cid], "a test broke it")

    def nothing_left(self) -> bool:
        return not self.hub._kept and not self.hub._attempts and not self.hub.num_kept


def run(test: Callable[[Setting], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await test(Setting())

    run_virtually(main())


async def frame(stream: AsyncIterator[bytes]) -> list[tuple[int, int, int, list[int], bool]]:
    """The records of the next frame that has some: attempt, sequence, offset, tokens, final."""
    while not (records := wire.unpack_frame(await anext(stream)).records):
        pass
    return [(one.attempt, one.sequence, one.index, one.token_ids, one.final) for one in records]


@pytest.mark.parametrize("arrived", range(6))
def test_an_attempt_goes_on_from_what_has_arrived(arrived: int) -> None:
    async def test(setting: Setting) -> None:
        stream, _ = await setting.open(1)
        call = setting.hub.attach("ingress", 1, 1, "e1")
        for index in range(3):  # three frames leave
            setting.token(1, index)
            assert await frame(stream) == [(1, 0, index, [10 * index], False)]
        setting.token(1, 3)  # these wait
        setting.break_()
        setting.token(1, 4)
        stream, resumed = await setting.open(2, AttemptClaim(1, (arrived,)))
        assert resumed == (1,)
        if arrived < 5:
            assert await frame(stream) == [(1, 0, arrived, [10 * i for i in range(arrived, 5)], False)]
        setting.token(1, 5, end=FinishReason.LENGTH)
        assert await frame(stream) == [(1, 0, 5, [50], True)]
        assert await call.done == 6
        assert setting.aborted == []
        assert setting.nothing_left()

    run(test)


def test_what_is_acknowledged_is_not_kept_and_cannot_be_asked_for_again() -> None:
    async def test(setting: Setting) -> None:
        stream, _ = await setting.open(1)
        for number in (1, 2):
            setting.hub.attach("ingress", 1, number, f"e{number}")
        for index in range(3):
            setting.token(1, index)
            setting.token(2, index)
            await frame(stream)
        assert setting.hub.beat("ingress", 1, 3)  # the hello and two frames
        assert [sequence for sequence, _ in setting.hub._channels["ingress"].sent] == [3]
        setting.break_()
        stream, resumed = await setting.open(2, AttemptClaim(1, (2,)), AttemptClaim(2, (1,)))
        assert resumed == (1,)
        assert await frame(stream) == [(1, 0, 2, [20], False)]
        assert setting.aborted == ["e2"]

    run(test)


def test_an_attempt_that_has_ended_sends_its_last_tokens_again() -> None:
    async def test(setting: Setting) -> None:
        stream, _ = await setting.open(1)
        call = setting.hub.attach("ingress", 1, 1, "e1")
        setting.token(1, 0)
        await frame(stream)
        setting.token(1, 1, end=FinishReason.LENGTH)
        await frame(stream)
        assert await call.done == 2
        setting.break_()
        stream, resumed = await setting.open(2, AttemptClaim(1, (1,)), AttemptClaim(2, (0,)))
        assert resumed == (1,)
        assert await frame(stream) == [(1, 0, 1, [10], True)]

    run(test)


def test_sequences_go_on_each_from_its_own_offset() -> None:
    async def test(setting: Setting) -> None:
        stream, _ = await setting.open(1)
        setting.hub.attach("ingress", 1, 1, "e1")
        ends = FinishReason.LENGTH
        for sequence in range(3):
            setting.token(1, 0, sequence)
        setting.hub.deliver([TokenDelta("e1", 1, (11,), ends, sequence=1)])
        await frame(stream)
        setting.token(1, 1, 0)
        setting.token(1, 1, 2)
        setting.break_()
        stream, resumed = await setting.open(2, AttemptClaim(1, (1, None, 1)))
        assert resumed == (1,)
        assert await frame(stream) == [(1, 0, 1, [10], False), (1, 2, 1, [12], False)]

    run(test)


@pytest.mark.parametrize("sent", [True, False])
def test_the_final_record_of_a_sequence_that_need_not_go_on_arrives_without_its_tokens(sent: bool) -> None:
    async def test(setting: Setting) -> None:
        stream, _ = await setting.open(1)
        setting.hub.attach("ingress", 1, 1, "e1")
        for sequence in range(2):
            setting.token(1, 0, sequence)
        await frame(stream)
        setting.token(1, 1, 0, end=None)
        setting.hub.deliver([TokenDelta("e1", 2, (20,), FinishReason.LENGTH, sequence=0)])
        setting.token(1, 1, 1)
        setting.token(1, 2, 1, end=FinishReason.STOP)
        if sent:
            await frame(stream)
        setting.break_()
        stream, resumed = await setting.open(2, AttemptClaim(1, (1, None)))
        assert resumed == (1,)
        assert await frame(stream) == [(1, 0, 1, [10, 20], False), (1, 1, 3, [], True)]

    run(test)


def test_an_error_that_has_not_arrived_arrives() -> None:
    async def test(setting: Setting) -> None:
        await setting.open(1)
        setting.hub.attach("ingress", 1, 1, "e1")
        setting.break_()
        error = TokenDelta("e1", 0, (), FinishReason.ERROR, final=True, error="planted")
        setting.hub.deliver([error])
        stream, resumed = await setting.open(2, AttemptClaim(1, (0,)))
        assert resumed == (1,)
        (record,) = wire.unpack_frame(await anext(stream)).records
        assert (record.end, record.message, record.final) == (FinishReason.ERROR, "planted", True)

    run(test)


def test_what_is_not_claimed_is_aborted() -> None:
    async def test(setting: Setting) -> None:
        await setting.open(1)
        calls = [setting.hub.attach("ingress", 1, number, f"e{number}") for number in (1, 2)]
        setting.break_()
        assert setting.hub.num_kept == 2
        _, resumed = await setting.open(2, AttemptClaim(2, (0,)))
        assert (resumed, setting.aborted) == ((2,), ["e1"])
        with pytest.raises(UnknownEpochError):
            await calls[0].done
        setting.break_()
        await setting.open(3)
        assert setting.aborted == ["e1", "e2"]
        assert setting.nothing_left()

    run(test)


def test_nobody_else_can_resume_an_attempt() -> None:
    async def test(setting: Setting) -> None:
        await setting.open(1)
        setting.hub.attach("ingress", 1, 1, "e1")
        setting.break_()
        _, resumed = await setting.open(2, AttemptClaim(1, (0,)), cid="another")
        assert (resumed, setting.hub.num_kept) == ((), 1)
        _, resumed = await setting.open(
            3, AttemptClaim(1, (0,)), of=2
        )  # it was a channel of the same ingress, not that one
        assert (resumed, setting.aborted) == ((), ["e1"])

    run(test)


def test_a_late_call_for_an_older_channel_takes_nothing_away() -> None:
    async def test(setting: Setting) -> None:
        await setting.open(3)
        setting.hub.attach("ingress", 3, 1, "e1")
        setting.break_()
        with pytest.raises(UnknownEpochError, match="not older"):
            await setting.open(2, AttemptClaim(1, (0,)))
        _, resumed = await setting.open(4, AttemptClaim(1, (0,)))
        assert resumed == (1,)

    run(test)


def test_an_ingress_that_does_not_come_back_leaves_nothing() -> None:
    async def test(setting: Setting) -> None:
        stream, _ = await setting.open(1)
        call = setting.hub.attach("ingress", 1, 1, "e1")
        await stream.aclose()  # type: ignore[attr-defined]
        setting.hub.leave(call)  # the connection broke: its call ends, too
        await asyncio.sleep(LEASE_S - 0.01)
        setting.token(1, 0)
        assert setting.aborted == []
        await asyncio.sleep(0.02)
        assert setting.aborted == ["e1"]
        assert setting.nothing_left()
        with pytest.raises(UnknownEpochError):
            await call.done

    run(test)


def test_an_ingress_that_lives_may_come_back_later_but_not_for_ever() -> None:
    async def test(setting: Setting) -> None:
        await setting.open(1)
        setting.hub.attach("ingress", 1, 1, "e1")
        setting.break_()
        for _ in range(int(KEEP_S) - 1):
            await asyncio.sleep(1.0)
            assert not setting.hub.beat("ingress", 1, 0)
        assert setting.aborted == []
        await asyncio.sleep(1.01)
        assert setting.aborted == ["e1"]
        assert setting.nothing_left()

    run(test)


@pytest.mark.parametrize("broken", [True, False])
def test_tokens_for_an_ingress_that_does_not_read_them_are_bounded(
    monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """The attempts with the most end, and are tried again; the others go on."""
    monkeypatch.setattr(channel_hub, "MAX_WAITING_TOKENS", 100)

    async def test(setting: Setting) -> None:
        stream, _ = await setting.open(1)
        for number in (1, 2, 3):
            setting.hub.attach("ingress", 1, number, f"e{number}")
        channel = setting.hub._channels["ingress"]
        if broken:
            setting.break_()
        for index in range(60):
            setting.token(2, index)
        for index in range(30):
            setting.token(1, index)
            setting.token(3, index, end=FinishReason.LENGTH if index == 29 else None)
        for _ in range(5):
            await asyncio.sleep(UNREAD_S / 5)
            setting.hub.beat("ingress", 1, 0)
        assert (setting.aborted, channel.waiting_tokens) == ([], 120)
        setting.token(1, 30)
        assert (setting.aborted, channel.waiting_tokens) == (["e2"], 61)
        for index in range(31, 71):
            setting.token(1, index)
        assert (setting.aborted, channel.waiting_tokens) == (["e2"], 101)
        setting.hub.deliver([])
        assert (setting.aborted, channel.waiting_tokens) == (["e2", "e1"], 30)
        if broken:
            claims = AttemptClaim(1, (0,)), AttemptClaim(2, (0,)), AttemptClaim(3, (0,))
            stream, resumed = await setting.open(2, *claims)
            assert resumed == (3,)
        whole = (3, 0, 0, [10 * index for index in range(30)], True)
        assert sorted(await frame(stream)) == (
            [whole] if broken else [(1, 0, 0, [], True), (2, 0, 0, [], True), whole]
        )
        assert setting.nothing_left()

    run(test)


def test_what_one_step_brings_waits_for_the_next_frame_however_much_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_hub, "MAX_WAITING_TOKENS", 100)

    async def test(setting: Setting) -> None:
        stream, _ = await setting.open(1)
        for number in (1, 2):
            setting.hub.attach("ingress", 1, number, f"e{number}")
        for index in range(3):
            await asyncio.sleep(UNREAD_S / 2)
            setting.hub.beat("ingress", 1, 0)
            setting.hub.deliver([TokenDelta("e1", 500 * index, (7,) * 500), TokenDelta("e2", index, (8,))])
            setting.hub.deliver([])
            assert await frame(stream) == [(1, 0, 500 * index, [7] * 500, False), (2, 0, index, [8], False)]
        assert setting.aborted == []

    run(test)


@pytest.mark.parametrize("call_first", [True, False])
def test_a_connection_that_breaks_ends_call_and_channel_and_the_attempt_goes_on(call_first: bool) -> None:
    async def test(setting: Setting) -> None:
        await setting.open(1)
        call = setting.hub.attach("ingress", 1, 1, "e1")
        if call_first:
            setting.hub.leave(call)
            await asyncio.sleep(CALL_END_S / 2)
        setting.break_()
        if not call_first:
            setting.hub.leave(call)
        _, resumed = await setting.open(2, AttemptClaim(1, (0,)))
        await asyncio.sleep(2 * CALL_END_S)
        assert (resumed, setting.aborted) == ((1,), [])
        setting.hub.beat("ingress", 2, 0, stale=[1])
        assert setting.aborted == ["e1"]

    run(test)


def test_an_engine_that_dies_or_stops_keeps_nothing() -> None:
    async def test(setting: Setting) -> None:
        await setting.open(1)
        setting.hub.attach("ingress", 1, 1, "e1")
        setting.break_()
        await setting.open(1, cid="another")
        setting.hub.attach("another", 1, 2, "e2")
        setting.hub.close_all("the engine died")
        assert sorted(setting.aborted) == ["e1", "e2"]
        assert setting.nothing_left()

    run(test)


def test_resumptions_survive_the_wire_and_damaged_ones_are_refused() -> None:
    claims = (AttemptClaim(2**40, (5, None, 0)), AttemptClaim(1, (0,)))
    data = pack_resumption(7, claims)
    assert unpack_resumption(data) == Resumption(7, claims)
    for damaged in (data[:-1], data + b"\0", b"", bytes([data[0] + 1]) + data[1:]):
        with pytest.raises(wire.WireError):
            unpack_resumption(damaged)


def test_tokens_with_log_probabilities_count_for_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_hub, "MAX_WAITING_TOKENS", 1000)
    score = TokenLogprobs(-1.0, 1, tuple(range(20)), (-1.0,) * 20)

    async def test(setting: Setting) -> None:
        await setting.open(1)
        for number in (1, 2):
            setting.hub.attach("ingress", 1, number, f"e{number}")
        channel = setting.hub._channels["ingress"]
        for index in range(5):
            setting.hub.deliver([TokenDelta("e1", index, (7,), logprobs=(score,))])
        setting.hub.deliver([TokenDelta("e2", 0, (7,), prompt_logprobs=(score,) * 10)])
        assert channel.waiting_tokens == 5 * 44 + 431
        channel.drop_records(1)
        assert channel.waiting_tokens == 431
        assert setting.aborted == []
        setting.hub.deliver([TokenDelta("e2", 1, (7,) * 20, logprobs=(score,) * 20)])
        for _ in range(5):
            await asyncio.sleep(UNREAD_S / 5)
            setting.hub.beat("ingress", 1, 0)
        setting.token(1, 5)
        assert (setting.aborted, channel.waiting_tokens) == (["e2"], 1)

    run(test)
