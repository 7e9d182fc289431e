"""The HTTP surface over a real engine in this process: no Ray, everything else as deployed."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from delayed_steps import delayed_steps

from app.api.api_server import ApiServer
from app.api.openai_service import OpenAIService
from app.api.prompt_tokenizer import PromptTokenizer
from app.api.routes import make_api
from app.api.tokenizer_parts import TokenizerParts
from app.fleet.cache_reset import CacheReset
from app.fleet.fleet_limits import FleetLimits
from app.fleet.generation import Delta, GenerateRequest, GenerationError
from app.fleet.journal import AttemptNotes
from app.option_groups import IngressOptions
from app.routing.prefix_flow import PrefixFlow
from engine.config import EngineConfig
from engine.engine_thread import EngineThread, StepOutputs
from engine.kv.block_groups import GroupBy
from engine.kv.block_map import BlockMap
from engine.request import FinishReason, Request, TokenDelta

MODEL = "smollm2-135m-instruct"
CONTEXT = 512  # tokens
POOL = 24 * 16  # tokens; less than the context, so that a request can be too long for it alone
SLOW_S = 0.1  # of a step in which a test looks at a request that runs
COUNT = {"prompt": "one, two, three, four,", "temperature": 0, "max_tokens": 8}


class LocalClient:
    """What ``EngineClient`` promises, with one engine thread and no network."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = EngineThread(config, self._on_outputs, self._on_death)
        self.engine.start()
        self.aborted: list[str] = []
        self.last: GenerateRequest | None = None
        self.flow = PrefixFlow()
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[TokenDelta]]] = {}
        self._numbers = itertools.count()

    def limits(self) -> FleetLimits | None:
        return FleetLimits((self.engine.limits,))

    async def first_limits(self, timeout_s: float) -> FleetLimits | None:
        return self.limits()

    def status(self) -> dict[str, Any]:
        return {"replicas": 1, "routable": 1, "live_requests": len(self._queues)}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self.last = request
        params = request.params
        if params.seed is None:
            params = params.with_seed(random.getrandbits(63))
        request_id = f"{request.request_id}-{next(self._numbers)}"
        queue: asyncio.Queue[TokenDelta] = asyncio.Queue()
        self._queues[request_id] = (asyncio.get_running_loop(), queue)
        ended, notes = False, AttemptNotes()
        if params.ranked:
            request.journal.attempts.append(notes)
        try:
            self.engine.submit(
                Request(
                    request_id,
                    list(request.token_ids),
                    params,
                    request.namespace,
                    request.priority,
                    client=request.client,
                )
            )
            while not ended:
                delta = await queue.get()
                ended = delta.final
                if delta.stats is not None:
                    notes.engine_stats(delta.stats, ended=delta.finish_reason is not None)
                    if params.ranked and delta.finish_reason is None:
                        continue
                if delta.finish_reason is FinishReason.ERROR:
                    raise GenerationError(delta.error or "unknown")
                reason = None if delta.finish_reason is None else delta.finish_reason.value
                yield Delta(
                    delta.token_ids,
                    reason,
                    delta.cached_tokens,
                    delta.index,
                    delta.sequence,
                    delta.final,
                    self.engine.identity.fingerprint,
                    delta.logprobs,
                    delta.prompt_logprobs,
                )
        finally:
            del self._queues[request_id]
            if not ended:
                self.aborted.append(request_id)
                self.engine.abort(request_id)

    async def reset_prefix_cache(self) -> CacheReset:
        return CacheReset({"local": await asyncio.wrap_future(self.engine.reset_prefix_cache())}, {})

    async def block_map(self, replica: str, by: GroupBy = GroupBy.STATE, keys: Sequence[int] = ()) -> BlockMap:
        return self.engine.block_map(by, keys)

    def _on_outputs(self, outputs: StepOutputs) -> None:
        for delta in outputs.deltas:
            found = self._queues.get(delta.request_id)
            if found is not None:
                found[0].call_soon_threadsafe(found[1].put_nowait, delta)

    def _on_death(self, error: BaseException) -> None:
        raise error


@dataclasses.dataclass(frozen=True)
class LocalServer:
    """A running server."""

    url: str
    client: LocalClient
    api: ApiServer
    service: OpenAIService
    tokenizer: PromptTokenizer

    def set_options(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        """Change options of the ingress until the test ends."""
        changed = self.service.options.model_copy(update=options)
        monkeypatch.setattr(self.service, "options", changed)
        monkeypatch.setattr(self.api, "options", changed)

    @contextmanager
    def slow_steps(self) -> Iterator[None]:
        """Until the block ends, steps take ``SLOW_S``: no request is over before a test looks at it."""
        over = threading.Event()
        with delayed_steps(self.client.engine, lambda: over.wait(SLOW_S)):
            try:
                yield
            finally:
                over.set()


@contextmanager
def serve_locally(folder: Path, config: EngineConfig, model: str) -> Iterator[LocalServer]:
    """Serve ``folder`` on a free port of 127.0.0.1 until the block ends."""
    client = LocalClient(config)
    tokenizer = PromptTokenizer(TokenizerParts.read(folder))
    tokenizer.warm_up()
    api = ApiServer([model], IngressOptions(), instance="here")
    service = OpenAIService(
        client,
        tokenizer,
        model,
        api.options,
        api.live,
        api.bodies.threads.run,
        engine_wait_s=60.0,
        recent=api.recent,
    )
    api.add(service)
    # A server that ends an idle connection first, after 5 s, may do so just when a client uses it again.
    settings = uvicorn.Config(
        make_api(lambda: api), log_level="warning", lifespan="off", timeout_keep_alive=3600
    )
    server = uvicorn.Server(settings)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield LocalServer(f"http://127.0.0.1:{listener.getsockname()[1]}", client, api, service, tokenizer)
    finally:
        server.should_exit = True
        thread.join(10)
        client.engine.stop()
        listener.close()


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def is_idle(server: LocalServer) -> bool:
    stats = server.client.engine.stats().scheduler
    return (
        server.client.engine.num_live == 0
        and server.client.status()["live_requests"] == 0
        and stats.referenced_blocks == 0
        and stats.running + stats.waiting + stats.preempted + stats.swapped == 0
    )
