"""The choices of one response as they stream: what ends them, and what ends with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest
from tokenizers import Tokenizer

from app.api.answers import Answer
from app.api.caller import Caller
from app.api.choices import GenerationJob, TextDelta, stream_choices
from app.api.openai_types import parse_completion
from app.fleet.delta_queue import DeltaQueue
from app.fleet.generation import Delta, GenerateRequest, GenerationError, UnavailableError
from engine.text import TextDecoder
from engine.token_logprobs import TokenLogprobs


@pytest.fixture(scope="module")
def backend(bundled_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(bundled_model / "tokenizer.json"))


def job(prompts: int, **body: object) -> GenerationJob:
    asked = {"prompt": [[7]] * prompts if prompts > 1 else [7], "max_tokens": 9, **body}
    return GenerationJob(parse_completion(asked).options, [[7]] * prompts, False, Caller("", "test"))


class Source:
    """Answers each prompt with its deltas; the last step may be an error, or ``None``: it never ends."""

    def __init__(self, *answers: list[Delta | Exception | None]) -> None:
        self._answers = list(answers)
        self.running = 0
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        answer = self._answers[int(request.request_id.partition("-")[2] or 0)]
        self.running += 1
        self.requests.append(request)
        try:
            for step in answer:
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    await asyncio.Event().wait()
                else:
                    yield step
        finally:
            self.running -= 1


async def all_of(source: Source, wanted: GenerationJob, decoder: TextDecoder) -> list[TextDelta]:
    return [delta async for delta in stream_choices(wanted, source, decoder)]


def test_a_stop_string_in_the_last_token_is_the_reason(backend: Tokenizer) -> None:
    tokens = tuple(backend.encode("one two three", add_special_tokens=False).ids)
    source = Source([Delta(tokens, "length", 0, 0, final=True)])
    (delta,) = asyncio.run(all_of(source, job(1, stop=" three"), TextDecoder(backend)))
    assert (delta.text, delta.finish_reason, delta.num_tokens) == ("one two", "stop", len(tokens))


def test_no_token_past_a_stop_string_is_returned(backend: Tokenizer) -> None:
    """Whether the tokens arrive together or one by one."""
    ids = tuple(backend.encode("one two three four five", add_special_tokens=False).ids)
    scores = tuple(TokenLogprobs(-1.0 - place, 1) for place in range(len(ids)))
    together = [Delta(ids, "length", 0, 0, final=True, logprobs=scores)]
    pairs = zip(ids, scores, strict=True)
    singly = [Delta((token,), None, 0, place, logprobs=(score,)) for place, (token, score) in enumerate(pairs)]
    for deltas in (together, singly):
        asked = job(1, stop=" three", return_token_ids=True, logprobs=0)
        found = asyncio.run(all_of(Source([*deltas, None]), asked, TextDecoder(backend)))
        details = [delta.details for delta in found if delta.details is not None]
        assert tuple(token for one in details for token in one.token_ids) == ids[:3]
        assert tuple(score for one in details for score in one.logprobs) == scores[:3]


def test_an_error_of_one_prompt_ends_the_others(backend: Tokenizer) -> None:
    async def test() -> None:
        source = Source([UnavailableError("none is left")], [Delta((5,), None, 0, 0), None])
        with pytest.raises(UnavailableError, match="none is left"):
            await asyncio.wait_for(all_of(source, job(2), TextDecoder(backend)), 30)
        assert source.running == 0

    asyncio.run(test())


@pytest.mark.parametrize("last", [[], [Delta((5,), "abort", 0, 0, final=True)]])
def test_an_end_without_a_reason_is_an_error(backend: Tokenizer, last: list[Delta | Exception | None]) -> None:
    with pytest.raises(GenerationError):
        asyncio.run(all_of(Source(last), job(1), TextDecoder(backend)))


def test_each_choice_that_a_stop_string_ends_is_told_to_the_engine(backend: Tokenizer) -> None:
    ids = backend.encode("one two three four five", add_special_tokens=False).ids
    early, late = ids, [*ids[:1], *ids]
    deltas = [
        Delta((token,), None, 0, i, sequence)
        for i in range(len(ids))
        for sequence, token in ((0, late[i]), (1, early[i]))
    ]

    class Told(Source):
        told: ClassVar[list[int]] = []

        def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
            request.text_end.on_sequence_end = self.told.append
            return super().generate(request)

    asyncio.run(all_of(Told([*deltas, None]), job(1, n=2, stop=" three"), TextDecoder(backend)))
    assert Told.told == [1]  # with the other one the whole request ends


def test_the_tokens_up_to_a_stop_string_are_told_to_whoever_learns_lengths(backend: Tokenizer) -> None:
    ids = backend.encode("one two three four five", add_special_tokens=False).ids
    deltas = [Delta((token,), None, 0, i, i_sequence) for i, token in enumerate(ids) for i_sequence in (0, 1)]
    source = Source([*deltas, None])  # it would go on for ever
    asyncio.run(all_of(source, job(1, n=2, stop=" three"), TextDecoder(backend)))
    assert source.requests[0].text_end.tokens == 2 * 3
    source = Source([Delta((ids[0],), None, 0, 0), GenerationError("failed")])
    with pytest.raises(GenerationError):
        asyncio.run(all_of(source, job(1, stop=" three"), TextDecoder(backend)))
    assert source.requests[0].text_end.tokens is None


class Taker:
    """Takes deltas while it is ``free``."""

    def __init__(self) -> None:
        self.free = True
        self.taken: list[TextDelta] = []

    def ready(self) -> bool:
        return self.free

    def __call__(self, delta: TextDelta) -> None:
        self.taken.append(delta)


def test_text_in_the_middle_of_a_choice_goes_the_direct_way_if_it_is_free(backend: Tokenizer) -> None:
    ids = backend.encode("one two three four", add_special_tokens=False).ids
    words = [" two", " three", " four"]
    assert len(ids) == 4

    async def test() -> None:
        first, last = (
            Delta((ids[0],), None, 3, 0, fingerprint="f"),
            Delta((ids[3],), "length", 3, 3, final=True),
        )
        source, taker = Source([first, last]), Taker()
        choices = stream_choices(job(1), source, TextDecoder(backend), taker)
        await anext(choices)
        take = source.requests[0].take
        assert take is not None
        assert take(Delta((ids[1],), None, 3, 1, fingerprint="f"))
        taker.free = False
        assert not take(Delta((ids[2],), None, 3, 2))
        taker.free = True
        assert not take(last)
        assert not take(Delta((ids[2],), None, 3, 2, sequence=5))
        assert take(Delta((ids[2],), None, 3, 2, fingerprint="g"))
        assert taker.taken == [
            TextDelta(0, words[0], None, 2, 3, "f"),
            TextDelta(0, words[1], None, 3, 3, "g"),
        ]
        end = await anext(choices)
        assert (end.text, end.num_tokens, end.finish_reason) == (words[2], 4, "length")
        await choices.aclose()

    asyncio.run(test())


@pytest.mark.parametrize(
    "body", [{"stop": "x"}, {"logprobs": 1}, {"return_token_ids": True}, {"n": 2, "stop": "x"}]
)
def test_text_that_may_end_early_or_has_details_does_not_go_the_direct_way(
    backend: Tokenizer, body: dict[str, object]
) -> None:
    async def test() -> None:
        source = Source([Delta((5,), None, 0, 0), None])
        choices = stream_choices(job(1, **body), source, TextDecoder(backend), Taker())
        await anext(choices)
        assert source.requests[0].take is None
        await choices.aclose()

    asyncio.run(test())


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("fails", [False, True])
def test_what_nobody_reads_stays_where_tokens_are_joined(backend: Tokenizer, fails: bool) -> None:
    """However many prompts there are, until the client reads on, leaves, or a prompt fails."""
    tokens, read = 300, 0

    class Endless(Source):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
            nonlocal read
            async for delta in super().generate(request):
                read += 1
                yield delta

    deltas: list[Delta | Exception | None] = [
        Delta((5,), "length" if i + 1 == tokens else None, 0, i, final=i + 1 == tokens) for i in range(tokens)
    ]
    broken: list[Delta | Exception | None] = [*deltas[:50], GenerationError("broken")]

    async def test() -> None:
        nonlocal read
        for leaves in (False, True):
            read, source = 0, Endless(deltas, broken if fails else deltas, deltas)
            stream = stream_choices(job(3, max_tokens=tokens), source, TextDecoder(backend))
            found = [await anext(stream)]
            await turns(200)
            assert read <= 10
            if leaves:
                await asyncio.wait_for(stream.aclose(), 30)
            elif fails:
                with pytest.raises(GenerationError, match="broken"):
                    await asyncio.wait_for(_rest(stream, found), 30)
            else:
                await asyncio.wait_for(_rest(stream, found), 30)
                assert len(found) == 3 * tokens
            assert source.running == 0

    asyncio.run(test())


async def _rest(stream: AsyncIterator[TextDelta], found: list[TextDelta]) -> None:
    async for delta in stream:
        found.append(delta)


def test_all_that_is_drawn_counts_although_the_reader_leaves(backend: Tokenizer) -> None:
    async def test() -> None:
        deltas = [Delta((5,), None, 0, i // 3, i % 3, logprobs=(TokenLogprobs(-1.0, 1),)) for i in range(12)]
        source, wanted = Source([*deltas, None]), job(1, best_of=3, stop="zzzz")
        reading = asyncio.ensure_future(all_of(source, wanted, TextDecoder(backend)))
        await turns(50)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert (dict(wanted.drawn), source.running) == ({0: 4, 1: 4, 2: 4}, 0)

    asyncio.run(test())


@pytest.mark.parametrize("late", [False, True])
def test_each_choice_has_the_log_probabilities_of_its_prompt(backend: Tokenizer, late: bool) -> None:
    """Also of choices that are read late, all at once."""

    def scores(count: int) -> tuple[TokenLogprobs, ...]:
        return (TokenLogprobs(-1.0, 1),) * count

    prompt = backend.encode("one two three", add_special_tokens=False).ids
    asked = {"prompt": prompt, "n": 2, "max_tokens": 3, "echo": True, "logprobs": 0}
    options, caller = parse_completion(asked).options, Caller("", "test")
    wanted = GenerationJob(options, [prompt], False, caller, echoes=("one two three",))
    # The engine sends those of the prompt with choice 0; choice 1 ends first.
    deltas = [
        Delta((5,), None, 0, 0, 0, logprobs=scores(1), prompt_logprobs=scores(len(prompt) - 1)),
        Delta((6,), None, 0, 0, 1, logprobs=scores(1)),
        Delta((5,), None, 0, 1, 0, logprobs=scores(1)),
        Delta((6,), "stop", 0, 1, 1, logprobs=scores(1)),
        Delta((5,), "length", 0, 2, 0, final=True, logprobs=scores(1)),
    ]

    class Queued(Source):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
            queue, waiting = DeltaQueue(), list(deltas)
            final = False
            while not final:
                while waiting:
                    queue.put(waiting.pop(0))
                    if not late:
                        break
                delta = await queue.get()
                final = delta.final
                yield delta

    found = asyncio.run(all_of(Queued(), wanted, TextDecoder(backend)))
    answers = [Answer(), Answer()]
    for delta in found:
        answers[delta.index].add(delta)
    assert [len(answer.details.prompt_logprobs or ()) for answer in answers] == [len(prompt) - 1] * 2
    assert [len(answer.details.logprobs) for answer in answers] == [3, 2]
