"""Real engines behind loopback replicas: a request for several sequences that moves makes the same tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_client_setting import until
from loopback import LoopbackHandle, LoopbackReplica
from model_checkpoints import save_tiny

from app.channel import wire
from app.channel.channel_hub import ChannelHub
from app.fleet.engine_client import EngineClient
from app.fleet.generation import GenerateRequest
from engine.config import EngineConfig
from engine.engine_thread import EngineThread, StepOutputs
from engine.request import TokenDelta
from engine.sampling_params import SamplingParams
from engine.token_logprobs import TokenLogprobs

PROMPT = [504, 1343, 3714, 260, 655, 28] * 3


class EngineOfReplica(LoopbackReplica):
    """A loopback replica whose engine is a thread with a model, as ``EngineReplica`` has it."""

    def __init__(self, name: str, thread: EngineThread) -> None:
        super().__init__(name)
        self.thread = thread
        self.engine = thread  # type: ignore[assignment]
        self.hub = ChannelHub(wire.Hello(thread.limits), thread.abort)

    def kill(self) -> None:
        self.dead = True
        for call in list(self.calls):
            call.cancel("replica died")


class Engines:
    """Two engines; each test puts new replicas and a new event loop before them."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(
            model=str(folder),
            dtype="float32",  # fp32 gives the same tokens in every batch
            num_blocks=64,
            max_model_len=512,
            token_budget=128,
            num_threads=1,
            check_invariants=True,
        )
        self.threads = [EngineThread(config, self._deliver, self._died) for _ in range(2)]
        self.replicas: list[EngineOfReplica] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        for thread in self.threads:
            thread.start()

    async def connect(self) -> tuple[LoopbackHandle, EngineClient]:
        self.loop = asyncio.get_running_loop()
        handle = LoopbackHandle(0)
        self.replicas = [EngineOfReplica(f"replica-{i}", thread) for i, thread in enumerate(self.threads)]
        handle.replicas.update({replica.name: replica for replica in self.replicas})
        client = EngineClient(handle, unavailable_after_s=60.0)
        await client.start()
        handle.announce(*handle.replicas)
        await until(lambda: len(handle.fleet.ledger.routable()) == 2)
        return handle, client

    def _deliver(self, outputs: StepOutputs) -> None:
        """On either engine's thread, which waits for the loop: else it may end before a test kills it."""
        assert self.loop is not None
        handled = threading.Event()
        self.loop.call_soon_threadsafe(self._hand_over, outputs.deltas, handled)
        handled.wait(0.1)  # in vain for the last step of a test, whose loop has ended

    def _hand_over(self, deltas: list[TokenDelta], handled: threading.Event) -> None:
        """A hub passes over what is of no attempt of its own; the numbers of attempts are the ingress's."""
        for replica in self.replicas:
            if not replica.dead:
                replica.hub.deliver(deltas)
        assert self.loop is not None
        self.loop.call_later(0.003, handled.set)  # several turns later

    def _died(self, error: BaseException) -> None:
        raise error


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, "Llama", vocab_size=4096, max_position_embeddings=512)
    both = Engines(folder)
    yield both
    for thread in both.threads:
        thread.stop()


async def generate(
    engines: Engines, params: SamplingParams, kill_after: int | None = None
) -> tuple[dict[int, list[int]], int]:
    """The tokens of each sequence, and how many replicas died at ``kill_after`` tokens of the first one."""
    _, client = await engines.connect()
    outputs: dict[int, list[int]] = {}
    killed = 0
    async for delta in client.generate(GenerateRequest("r", list(PROMPT), params)):
        outputs.setdefault(delta.sequence, []).extend(delta.token_ids)
        if not killed and kill_after is not None and len(outputs.get(0, ())) >= kill_after:
            for replica in engines.replicas:
                if replica.thread.num_live:
                    replica.kill()
                    killed += 1
    await client.stop()
    await until(lambda: all(thread.num_live == 0 for thread in engines.threads))
    return outputs, killed


def run(coroutine: Any) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(120):
            return await coroutine

    return asyncio.run(main())


async def scores(
    engines: Engines, params: SamplingParams, kill_after: int | None = None
) -> dict[int, list[tuple[int, TokenLogprobs]]]:
    """Each sequence's tokens with their log probabilities; the prompt's come once, and are sequence -1's."""
    _, client = await engines.connect()
    found: dict[int, list[tuple[int, TokenLogprobs]]] = {}
    async for delta in client.generate(GenerateRequest("r", list(PROMPT), params)):
        found.setdefault(delta.sequence, []).extend(zip(delta.token_ids, delta.logprobs or (), strict=True))
        if delta.prompt_logprobs is not None:
            assert -1 not in found
            found[-1] = list(zip(PROMPT[1:], delta.prompt_logprobs, strict=True))
        if kill_after is not None and len(found.get(0, ())) >= kill_after:
            kill_after = None
            for replica in engines.replicas:
                if replica.thread.num_live:
                    replica.kill()
    assert kill_after is None
    await client.stop()
    await until(lambda: all(thread.num_live == 0 for thread in engines.threads))
    return found


@pytest.mark.parametrize("n", [1, 3])
def test_penalties_and_log_probabilities_go_on_after_a_move(engines: Engines, n: int) -> None:
    """Over the wire, too: tokens made on the first replica still count as output on the second."""
    params = SamplingParams(
        max_tokens=40,
        n=n,
        seed=3,
        temperature=1.0,
        frequency_penalty=1.5,
        repetition_penalty=1.3,
        logit_bias={17: 4.0},
        bad_words=((17, 17),),
        logprobs=2,
        prompt_logprobs=1,
    )
    undisturbed = run(scores(engines, params))
    assert sorted(undisturbed) == [-1, *range(n)]
    assert run(scores(engines, params, kill_after=15)) == undisturbed


@pytest.mark.parametrize("kill_after", [1, 23])
def test_sampled_sequences_go_on_as_if_nothing_had_happened(engines: Engines, kill_after: int) -> None:
    params = SamplingParams(max_tokens=40, n=4, seed=3, temperature=1.0)
    undisturbed, _ = run(generate(engines, params))
    moved, killed = run(generate(engines, params, kill_after))
    assert killed == 1
    assert moved == undisturbed
    assert len({tuple(tokens) for tokens in moved.values()}) == 4


def test_a_request_moves_with_some_of_its_sequences_ended(engines: Engines) -> None:
    free, _ = run(generate(engines, SamplingParams(max_tokens=40, n=4, seed=3)))
    # A token that ends some sequences early and the first one not.
    stop = next(token for i in (1, 2, 3) for token in free[i][:18] if token not in free[0])
    params = SamplingParams(max_tokens=40, n=4, seed=3, stop_token_ids=(stop,))
    undisturbed, _ = run(generate(engines, params))
    assert min(map(len, undisturbed.values())) < 20 < len(undisturbed[0]) == len(free[0])
    moved, killed = run(generate(engines, params, kill_after=20))
    assert killed == 1
    assert moved == undisturbed
